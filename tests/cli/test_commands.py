"""plan and compare on the command line: JSON at the end, or one line of refusal."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.cli import arguments as cli
from mpissd.cli.configs import ProbeConfig
from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import resolve
from mpissd.lab.predict.costs import DeviceCosts
from tests.tiny_pair import tiny_pair

COMMANDS = ("plan", "compare", "probe")
PROBED = Path(__file__).resolve().parents[2] / "results" / "h200" / "profiles"
EIGHT = f"--profile={PROBED / 'h200-8b-1b-T1D1.json'}"  # 8B at T=1 and 1B, fused
TWO = f"--profile={PROBED / 'h200-70b-1b-T2D1.json'}"  # 70B at T=2 and 1B, fused
SEVENTY = f"--profile={PROBED / 'h200-70b-T4.json'}"  # 70B at T=4, no draft


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def said(capfd: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON on the last line."""
    assert main(list(arguments)) == 0
    out, err = capfd.readouterr()
    assert err == ""
    found = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert isinstance(found, dict)
    return found


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr."""
    assert main(list(arguments)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mpissd: ") and err.count("\n") == 1
    return err


def test_a_prediction_from_a_device_s_profile(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h100", "--pair=8b/1b", "--lookahead=5", "--rounds=50"
    sd = said(capfd, "plan", *flags, "--mode=sd")
    ssd = said(capfd, "plan", *flags, "--mode=ssd")
    ar = said(capfd, "plan", *flags, "--mode=ar")
    assert 0 < ar["tok_per_s"] < sd["tok_per_s"] < ssd["tok_per_s"]
    wider = said(capfd, "plan", *flags, "--mode=ar", "--tp=2")
    assert wider["tok_per_s"] > ar["tok_per_s"]


def test_a_slower_draft_device_is_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=a100-80", "--pair=8b/1b", "--lookahead=5", "--rounds=50", "--mode=sd"
    same = said(capfd, "plan", *flags, "--draft_device=a100-80")
    slower = said(capfd, "plan", *flags, "--draft_device=v100-32")
    assert same == said(capfd, "plan", *flags)
    assert slower["t_target_s"] == same["t_target_s"]
    config = RunConfig(pair="8b/1b", lookahead=5, mode="sd")
    job = resolve(config, 1, backend="emulated", memory_bytes=None)
    costs = DeviceCosts.from_profile(load_profile("v100-32"), job)
    assert slower["t_draft_s"] == pytest.approx(5 * float(costs.draft_s([1])[0]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lookahead=7",), "lookahead=7 without mode: allowed: with mode"),
        (("--tp=2",), "tp=2 without mode"),
        (("--profile=h10",), "did you mean 'h100'"),
        (("--profile=./none.json",), "none.json"),
        (("--profile=h100", "--mode=sd", "--lookahead=x"), "lookahead=x"),
        (("--profile=h100", "--mode=sdd"), "unknown mode 'sdd'"),
        (("--mode=ssd", "--pair=70b/1b"), "needs 136.9 GB a rank"),
        (("--mode=ssd", "--pair=toy", "--tp=3"), "not divisible by tp=3"),
        (("--profile=h100", "--roundz=3"), "did you mean '--rounds'"),
        (("h100",), "is not a flag"),
    ],
)
def test_what_cannot_be_predicted(
    flags: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, "plan", *flags)


def run_line(out: str) -> tuple[int, RunConfig]:
    """(ranks, configuration) of the line that a plan says to run."""
    line = next(line for line in out.splitlines() if "mpirun" in line)
    found = re.search(r"mpirun -np (\d+) python -m mpi4py -m mpissd (run .*)", line)
    assert found is not None
    command = cli.parse(shlex.split(found[2]))
    assert command is not None
    assert isinstance(command.config, RunConfig)
    return int(found[1]), command.config


def test_a_plan_is_a_line_that_runs(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus=2", "--profile=a100-80", "--pair=8b/1b", "--alpha=0.7", "--batch_size=2"
    assert main(["plan", *flags]) == 0
    out, _ = capfd.readouterr()
    ranks, config = run_line(out)
    best = json.loads(out.splitlines()[-1])["best"]
    assert ranks == best["tp"] + best["num_drafts"] <= 2
    assert (config.mode, config.batch_size) == (best["mode"], 2)
    assert config.acceptance_text == "alpha:0.7"
    job = resolve(config, best["tp"], backend="emulated", memory_bytes=80 * 10**9)
    assert job.lookahead == best["lookahead"]


RATES = ".95,.9,.7,.4,.2,.1,.05,.02,.01,.01,.01,.01,.01,.01,.01,.01,.01,.01"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus=2", "--p_hit=0.7"),
        ("--gpus=2", "--acceptance_fast=rates:.2,.1,.1,.1,.1,.1,.1,.1,.1,.1"),
        ("--gpus=2", "--batch_size=16", "--fuse", "--lm_head", "--context=128"),
    ],
)
def test_a_list_of_rates_is_cut_to_the_k_that_is_run(
    flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--profile=a100-80", f"--acceptance=rates:{RATES}", *flags]) == 0
    out, _ = capfd.readouterr()
    ranks, config = run_line(out)
    best = json.loads(out.splitlines()[-1])["best"]
    job = resolve(config, best["tp"], backend="emulated", memory_bytes=80 * 10**9)
    assert best["mode"] in (job.config.mode, "lookup") and job.world_size == ranks
    assert 0 < job.lookahead == best["lookahead"] < RATES.count(",")
    listed = config.acceptance_text.partition(":")[2].split(",")
    assert listed == RATES.split(",")[: job.lookahead]


def test_a_histogram_of_any_name_is_run_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    Path("my counts.json").write_text("[1, 1, 2, 8]")
    assert main(["plan", "--profile=a100-80", "--acceptance=histogram:my counts.json"]) == 0
    _, config = run_line(capfd.readouterr()[0])
    assert config.acceptance == "histogram:my counts.json"
    resolve(config, 1, backend="emulated", memory_bytes=None)


def test_where_nothing_is_drafted_no_law_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "--acceptance=rates:.01,.01",
                "--gpus=1",
                "--fuse",
                "--profile=a100-80",
                "--acceptance_fast=alpha:0",
            ]
        )
        == 0
    )
    ranks, config = run_line(capfd.readouterr()[0])
    assert (ranks, config) == (1, RunConfig(mode="ar", num_drafts=0, pair="8b/1b", fuse=True))


def test_a_plan_names_the_fastest_sequence_and_the_most_of_all_gpus(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two GPUs: one sequence is fastest over both, two on one GPU each give more together."""
    assert main(["plan", "--profile=h200", "--fuse", "--alpha=.7", "--gpus=2"]) == 0
    *lines, told = capfd.readouterr().out.splitlines()
    plan = json.loads(told)
    best, most = plan["best"], plan["most_tok_per_s"]
    copies = [(2 // (c["tp"] + c["num_drafts"])) * c["tok_per_s"] for c in plan["judged"]]
    assert most["tok_per_s"] == max(copies) > best["tok_per_s"] and most["copies"] == 2
    below = next(n for n, line in enumerate(lines) if "fastest single sequence" in line)
    assert f"on 2 GPUs, {best['tok_per_s']:.1f} tok/s" in lines[below]
    assert f"most tok/s of all 2 GPUs: SD inline T=1 × 2, {max(copies):.1f} " in lines[below + 1]
    assert lines[below - 1].strip().startswith("AR T=1")  # right below the table
    (twice,) = (line for line in lines if "2 such jobs: " in line)
    assert run_line(twice)[0] == most["tp"] == 1
    assert main(["plan", "--profile=h200", "--fuse", "--gpus=1", "--batch_size=4"]) == 0
    out = capfd.readouterr().out
    assert "→ fastest batch of 4 sequences: " in out and "most tok/s" not in out


def test_a_plan_is_made_for_what_was_probed(capfd: pytest.CaptureFixture[str]) -> None:
    """Pair and fused products are the probe's where nothing else is said; other T are derived."""
    assert main(["plan", EIGHT, "--gpus=4"]) == 0
    out, _ = capfd.readouterr()
    for choice in json.loads(out.splitlines()[-1])["judged"]:
        told = choice["derived"]
        assert told is None if choice["tp"] == 1 else told.startswith("derived")
    assert main(["plan", EIGHT, "--gpus=1"]) == 0
    out, _ = capfd.readouterr()
    _, config = run_line(out)
    assert (config.pair, config.fuse) == ("8b/1b", True)
    found = json.loads(out.splitlines()[-1])
    same = said(capfd, "plan", EIGHT, "--mode=ar")
    assert same["tok_per_s"] == pytest.approx(found["judged"][-1]["tok_per_s"])
    assert said(capfd, "plan", SEVENTY, "--target=70b", "--mode=ar", "--tp=4")["tok_per_s"] > 80


def test_a_plan_lists_every_use_that_it_judged(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--profile=h200", "--pair=8b/1b", "--alpha=.5"]) == 0
    out, _ = capfd.readouterr()
    found = json.loads(out.splitlines()[-1])
    names = ["AR T=1", "AR T=2", "SD inline T=1", "SD inline T=2", "SD T=1 D=1", "SSD T=1 D=1"]
    names += ["lookup T=1", "lookup T=2"]
    assert all(f"{name} " in out for name in names) and len(found["judged"]) == len(names)
    rates = [choice["tok_per_s"] for choice in found["judged"]]
    assert rates == sorted(rates, reverse=True)
    assert not found["unjudged"] and found["best"] == found["judged"][0]


def test_a_t_that_was_not_probed_is_derived_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """Without it SSD was "1.671x the best other use" of two GPUs."""
    assert main(["plan", EIGHT, "--gpus=2", "--alpha=.5"]) == 0
    out, _ = capfd.readouterr()
    lines = out.splitlines()
    assert any("SD inline T=2" in line and "(derived)" in line for line in lines)
    assert any("AR T=2: derived from T=1" in line for line in lines)
    assert json.loads(lines[-1])["gain"] < 1.2


CHAT = str(Path(__file__).resolve().parents[2] / "results/recordings/smollm2.laws.json")


@pytest.mark.parametrize(
    ("flags", "probed"),
    [
        # It was "run it", of SD inline and SSD; measured, AR T=2 is the fastest for 16 chats.
        (("--forward=transformer", f"--laws={CHAT}", "--batch_size=16"), ("sd", 2, 0)),
        # It was "SSD 1.267x the best other use of 3", SD inline T=2 with an idle GPU.
        (("--pair=70b/1b", "--gpus=3", "--alpha=.8"), ("sd", 3, 0)),
    ],
)
def test_nothing_is_advised_on_what_is_derived(
    flags: tuple[str, ...], probed: tuple[str, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--profile=h200", *flags]) == 0
    out, _ = capfd.readouterr()
    first = json.loads(out.splitlines()[-1])["probe_first"][0]
    assert tuple(first[name] for name in ("mode", "tp", "num_drafts")) == probed
    lines = [line for line in out.splitlines() if "→ probe first, " in line]
    assert lines and "run it" not in out and "does this draft pay here? yes" not in out
    found = re.search(r"mpirun -np (\d+) python -m mpi4py -m mpissd (probe .*)", lines[0])
    assert found is not None and int(found[1]) == probed[1] + probed[2]
    command = cli.parse(shlex.split(found[2]))
    assert command is not None and isinstance(command.config, ProbeConfig)
    run = command.config.run
    assert (run.forward, run.drafts) == ("transformer", probed[2])
    resolve(run, probed[1], backend="emulated", memory_bytes=None)


def test_a_use_that_cannot_be_judged_is_said_first_and_nothing_is_best(
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = Path(EIGHT.partition("=")[2]).read_text().replace("NVIDIA H200", "Another GPU")
    Path("other.json").write_text(text)
    assert main(["plan", "--profile=./other.json", "--gpus=2", "--alpha=.5"]) == 0
    out, _ = capfd.readouterr()
    first, *lines = out.splitlines()
    assert (
        first.startswith("not judged: AR T=2, lookup T=2, SD inline T=2")
        and "all-reduce over 2" in first
    )
    found = json.loads(lines[-1])
    assert not any("best" in line or "→" in line for line in lines[:-1])
    assert found["best"] is None and found["gain"] is None
    assert found["break_even_alpha"] is None and found["break_even_p_hit"] is None
    assert found["extra_gpu"]["gain_at_equal_gpus"] is None
    assert found["extra_gpu"]["gain"] > 1  # over one GPU, of which everything is known
    assert {(u["mode"], u["tp"]) for u in found["unjudged"]} == {
        *(("ar", 2), ("lookup", 2), ("sd", 2))
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((EIGHT, "--pair=70b/1b"), "doesn't cover llama-3.1-70b T="),
        ((EIGHT, "--lm_head"), "doesn't cover llama-3.1-8b T=1 fuse lm_head"),
        ((EIGHT, "--context=64"), "doesn't cover llama-3.1-8b T=1 fuse kv_tokens=64"),
        ((SEVENTY, "--pair=70b/1b"), "doesn't cover llama-3."),
    ],
)
@pytest.mark.parametrize("command", [("plan", "--mode=ssd"), ("plan", "--gpus=1"), ("plan",)])
def test_a_pair_that_was_not_probed_is_refused(
    command: tuple[str, ...],
    flags: tuple[str, ...],
    message: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """One line that says what the profile covers; the memory of T=1 speaks first."""
    if command == ("plan", "--gpus=1") and flags[0] == SEVENTY:
        command = ("plan", "--gpus=5")
    assert message in refused(capfd, *command, *flags)


def test_rates_alone_model_any_pair(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h200", "--pair=66b/125m", "--lm_head"
    assert said(capfd, "plan", "--mode=ssd", *flags)["tok_per_s"] > 0
    assert main(["plan", *flags, "--gpus=2"]) == 0


def test_a_model_of_the_same_name_and_other_weights_is_refused(
    capfd: pytest.CaptureFixture[str],
) -> None:
    data = json.loads(Path(EIGHT.partition("=")[2]).read_text())
    for entry in data["tables"]["forwards"]:
        entry["params"] += entry["model"] == "llama-3.1-8b"
    Path("other.json").write_text(json.dumps(data))
    for mode in ((), ("--mode=ssd",)):
        message = refused(capfd, "plan", *mode, "--profile=./other.json")
        assert "doesn't cover this llama-3.1-8b" in message


EMULATED = ("run", "--dry_run", "--world_size=2", "--backend=emulated")


@pytest.mark.parametrize("command", [("plan", "--profile="), (*EMULATED, "--device=")])
def test_a_profile_of_another_schema_or_none_is_one_line(
    command: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    device = json.loads(Path(EIGHT.partition("=")[2]).read_text())
    for change, message in (
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"numbers": {}}, "missing or malformed"),
        ({"tables": {"forwards": [{"model": "x"}]}}, "missing or malformed"),
        ({"tables": {"guesses": []}}, "missing or malformed"),
    ):
        Path("probed.json").write_text(json.dumps({**device, **change}))
        *words, flag = command
        assert message in refused(capfd, *words, f"{flag}probed.json")
    assert "never.json" in refused(capfd, *words, f"{flag}never.json")


def test_a_probe_that_was_never_made_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    message = refused(capfd, "plan", "--profile=out/profiles/mine.json")
    assert "'out/profiles/mine.json': no such file: allowed: what `probe` saved" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--gpus=0"), "gpus=0"),
        (("plan", "--profile=h10"), "did you mean 'h100'"),
        (("plan", "--pair=70b/1b", "--gpus=1", "--profile=h100"), ""),
        (("plan", "--alpha=2"), "alpha=2"),
        # Three ranks divide neither model; what the profile lacks is said first.
        (("plan", TWO, "--gpus=3", "--pair=8b/1b"), "doesn't cover llama-3.1-8b T=1"),
        (("plan", TWO, "--gpus=3", "--pair=toy"), "doesn't cover toy-target T=1"),
        (("probe", "--backend=cuda"), "unknown backend 'cuda'"),
        (("plan", "word"), "'word' is not a flag"),
        (("probe", "word"), "'word' is not a flag"),
        (("compare", "--into=none.md", "word"), "into=none.md with results"),
        *(((command, "--nonsense=1"), "unknown flag '--nonsense'") for command in COMMANDS),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *arguments)


@pytest.mark.parametrize("text", ["{}\n", "[]\n", "not json\n", "\n", '{"schema": 3}\n'])
@pytest.mark.parametrize("show", ["why", "tables", "best"])
def test_rows_that_are_none(show: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """An empty line may pass in tables; a broken one is named."""
    Path("out").mkdir()
    Path("out/runs.jsonl").write_text(text)
    code = main(["compare", f"--show={show}"])
    out, err = capfd.readouterr()
    if show == "tables" and text == "\n":
        assert code == 0 and err == ""
    else:
        assert code == 2 and out == "" and err.count("\n") == 1 and "out" in err


def test_what_plan_says_to_run_for_a_pair_with_weights_can_be_run(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Beside weights, laws are refused unless the command says that laws are meant."""
    pair = tiny_pair(tmp_path, kv_heads=6)
    flags = f"--pair={pair.target}/{pair.draft}", "--gpus=1", "--alpha=0.7", "--profile=a100-80"
    assert main(["plan", *flags]) == 0
    command = capfd.readouterr().out.split("run it: ")[1].splitlines()[0]
    words = shlex.split(command)
    assert main([*words[words.index("run") :], "--dry_run", f"--out={tmp_path / 'out'}"]) == 0
