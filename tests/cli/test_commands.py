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
from mpissd.engine.job import resolve
<<<<<<< HEAD
from mpissd.lab.predict.costs import DeviceCosts
from tests.tiny_pair import tiny_pair

COMMANDS = ("plan", "compare", "probe")
PROBED = Path(__file__).resolve().parents[2] / "results" / "h200" / "profiles"
=======
from tests.tiny_pair import tiny_pair

RESULTS = Path(__file__).resolve().parents[2] / "results"
PROBED = RESULTS / "h200/profiles"
>>>>>>> flags
EIGHT = f"--profile={PROBED / 'h200-8b-1b-T1D1.json'}"  # 8B at T=1 and 1B, fused
TWO = f"--profile={PROBED / 'h200-70b-1b-T2D1.json'}"  # 70B at T=2 and 1B, fused
SEVENTY = f"--profile={PROBED / 'h200-70b-T4.json'}"  # 70B at T=4, no draft
A100 = "--profile=a100-80"


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def plan(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON on the last line, and all that is printed."""
    assert main(["plan", *arguments]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    return json.loads(out.splitlines()[-1], parse_constant=pytest.fail), out


def refused(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr."""
    assert main(list(arguments)) == 2
    out, err = capfd.readouterr()
    assert out == "" and err.startswith("mpissd: ") and err.count("\n") == 1
    return err


<<<<<<< HEAD
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
=======
def command_line(out: str, name: str) -> tuple[int, Any]:
    """(ranks, configuration) of the line that a plan prints for a command."""
    found = re.search(rf"mpirun -np (\d+) python -m mpi4py -m mpissd ({name} .*)", out)
>>>>>>> flags
    assert found is not None
    return int(found[1]), cli.parse(shlex.split(found[2])).config


def test_a_mode_is_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h100", "--pair=8b/1b", "--lookahead=5", "--rounds=50"
    ar, sd, ssd = (plan(capfd, *flags, f"--mode={mode}")[0] for mode in ("ar", "sd", "ssd"))
    assert 0 < ar["tok_per_s"] < sd["tok_per_s"] < ssd["tok_per_s"]
    assert plan(capfd, *flags, "--mode=ar", "--tp=2")[0]["tok_per_s"] > ar["tok_per_s"]
    same = plan(capfd, *flags, "--mode=sd", "--draft_device=h100")[0]
    slower = plan(capfd, *flags, "--mode=sd", "--draft_device=v100-32")[0]
    assert same == sd and slower["t_target_s"] == same["t_target_s"]
    assert slower["t_draft_s"] > same["t_draft_s"]


RATES = ".95,.9,.7,.4,.2,.1,.05,.02,.01,.01,.01,.01,.01,.01,.01,.01,.01,.01"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus=2", "--alpha=0.7", "--batch_size=2"),
        ("--gpus=1", f"--acceptance=rates:{RATES}"),
        ("--gpus=2", f"--acceptance=marginal:{RATES}", "--p_hit=0.7"),
        ("--gpus=2", "--acceptance=alpha:.7", "--acceptance_fast=rates:.2,.1,.1,.1,.1,.1,.1,.1,.1"),
    ],
    ids=str,
)
def test_a_plan_is_a_line_that_runs(
    flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """Lists of rates are cut to the K that is run."""
    told, out = plan(capfd, A100, "--pair=8b/1b", *flags)
    ranks, config = command_line(out, "run")
    best = told["best"]
    assert ranks == best["tp"] + best["num_drafts"] and best["mode"] in (config.mode, "lookup")
    job = resolve(config, best["tp"], backend="emulated", memory_bytes=80 * 10**9)
    assert job.lookahead == best["lookahead"] and job.world_size == ranks
    kind, _, listed = config.acceptance_text.partition(":")
    if kind != "alpha":
        assert listed.split(",") == RATES.split(",")[: job.lookahead]


def test_where_nothing_is_drafted_no_acceptance_is_given(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--acceptance=rates:.01,.01", "--acceptance_fast=alpha:0", "--gpus=1", "--fuse"
    ranks, config = command_line(plan(capfd, A100, *flags)[1], "run")
    assert (ranks, config) == (1, RunConfig(mode="ar", num_drafts=0, pair="8b/1b", fuse=True))


def test_a_plan_names_the_fastest_sequence_and_the_most_of_all_gpus(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Two GPUs: one sequence is fastest over both, two on one GPU each give more together."""
    told, out = plan(capfd, "--profile=h200", "--fuse", "--alpha=.7", "--gpus=2")
    best, most = told["best"], told["most_tok_per_s"]
    copies = [(2 // (c["tp"] + c["num_drafts"])) * c["tok_per_s"] for c in told["judged"]]
    assert most["tok_per_s"] == max(copies) > best["tok_per_s"] and most["copies"] == 2
    assert told["best"] == told["judged"][0] and not told["unjudged"]
    names = {f"{mode} T={tp}" for mode in ("AR", "SD inline", "lookup") for tp in (1, 2)}
    assert all(f"{name} " in out for name in (*names, "SD T=1 D=1", "SSD T=1 D=1"))
    assert "fastest single sequence" in out and f"{best['tok_per_s']:.1f} tok/s" in out
    assert command_line(out.split("2 such jobs: ")[1], "run")[0] == most["tp"] == 1


def test_a_plan_is_made_for_what_was_probed(capfd: pytest.CaptureFixture[str]) -> None:
<<<<<<< HEAD
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
=======
    """Pair and fused products are the probe's where no flag sets them; other T are derived."""
    told, _ = plan(capfd, EIGHT, "--gpus=4")
    for choice in told["judged"]:
        derived = choice["derived"]
        assert derived is None if choice["tp"] == 1 else derived.startswith("derived")
    told, out = plan(capfd, EIGHT, "--gpus=1")
    _, config = command_line(out, "run")
    assert (config.pair, config.fuse) == ("8b/1b", True)
    (ar,) = (choice for choice in told["judged"] if choice["mode"] == "ar")
    assert plan(capfd, EIGHT, "--mode=ar")[0]["tok_per_s"] == pytest.approx(ar["tok_per_s"])
>>>>>>> flags


def test_nothing_is_advised_on_what_is_derived(capfd: pytest.CaptureFixture[str]) -> None:
    """It was "SSD 1.267x the best other use of 3", SD inline T=2 with an idle GPU."""
    told, out = plan(capfd, "--profile=h200", "--pair=70b/1b", "--gpus=3", "--alpha=.8")
    first = told["probe_first"][0]
    assert (first["mode"], first["tp"], first["num_drafts"]) == ("sd", 3, 0)
    assert "→ probe first, " in out and "run it" not in out
    ranks, config = command_line(out, "probe")
    assert ranks == 3 and isinstance(config, ProbeConfig)
    resolve(config.run, 3, backend="emulated", memory_bytes=None)


def test_without_an_all_reduce_nothing_is_best(capfd: pytest.CaptureFixture[str]) -> None:
    text = Path(EIGHT.partition("=")[2]).read_text().replace("NVIDIA H200", "Another GPU")
    Path("other.json").write_text(text)
    told, out = plan(capfd, "--profile=./other.json", "--gpus=2", "--alpha=.5")
    assert out.startswith("not judged: AR T=2, lookup T=2, SD inline T=2")
    assert "→" not in out and told["best"] is None and told["gain"] is None
    assert {(u["mode"], u["tp"]) for u in told["unjudged"]} == {
        *(("ar", 2), ("lookup", 2), ("sd", 2))
    }


@pytest.mark.parametrize(
<<<<<<< HEAD
    ("flags", "message"),
    [
        ((EIGHT, "--pair=70b/1b"), "doesn't cover llama-3.1-70b T="),
        ((EIGHT, "--pair=8b/0.6b"), "doesn't cover qwen3-0.6b T=1"),
        ((EIGHT, "--pair=8b/1b", "--nofuse"), "doesn't cover llama-3.1-8b T=1: it has measured"),
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
    for pair in ("8b/0.6b", "32b/0.6b", "66b/125m"):
        flags = "--profile=h200", f"--pair={pair}", "--lm_head"
        assert said(capfd, "plan", "--mode=ssd", *flags)["tok_per_s"] > 0
        assert main(["plan", *flags, "--gpus=2"]) == 0
        capfd.readouterr()


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
=======
>>>>>>> flags
    ("arguments", "message"),
    [
        (("plan", "--gpus=0"), "gpus=0"),
        (("plan", "--profile=h10"), "did you mean 'h100'"),
        (("plan", "--alpha=2"), "alpha=2"),
<<<<<<< HEAD
        # Three ranks divide neither model; what the profile lacks is said first.
        (("plan", TWO, "--gpus=3", "--pair=8b/1b"), "doesn't cover llama-3.1-8b T=1"),
        (("plan", TWO, "--gpus=3", "--pair=toy"), "doesn't cover toy-target T=1"),
        (("probe", "--backend=cuda"), "unknown backend 'cuda'"),
=======
>>>>>>> flags
        (("plan", "word"), "'word' is not a flag"),
        (("plan", "--profile=out/mine.json"), "no such file: allowed: what `probe` saved"),
        (("plan", "--lookahead=3"), "lookahead=3 without mode: allowed: with mode"),
        (("plan", "--mode=ar", "--pair=70b/1b"), "needs 136.9 GB a rank"),
        (("plan", "--mode=sd", "--pair=toy", "--tp=3"), "not divisible by tp=3"),
        (("plan", TWO, "--gpus=3", "--pair=8b/1b"), "doesn't cover llama-3.1-8b T=1"),
        (("plan", EIGHT, "--pair=8b/0.6b"), "doesn't cover qwen3-0.6b T=1"),
        (("plan", EIGHT, "--pair=8b/1b", "--nofuse"), "doesn't cover llama-3.1-8b T=1: it has"),
        (("plan", EIGHT, "--mode=sd", "--lm_head"), "doesn't cover llama-3.1-8b T=1 fuse lm_head"),
        (("plan", SEVENTY, "--pair=70b/1b", "--gpus=5"), "doesn't cover llama-3."),
        (("probe", "--backend=cuda"), "unknown backend 'cuda'"),
        (("compare", "--into=none.md", "word"), "into=none.md with results"),
        (("compare", "--nonsense=1"), "unknown flag '--nonsense'"),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *arguments)


@pytest.mark.parametrize(
    "words", [("plan", "--profile="), ("run", "--dry_run=2", "--backend=emulated", "--device=")]
)
def test_a_damaged_profile_is_one_line(
    words: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    device = json.loads(Path(EIGHT.partition("=")[2]).read_text())
    for change, message in (
        ({"schema": 2}, "schema 2, this version reads 1"),
        ({"numbers": {}}, "missing or malformed"),
        ({"tables": {"forwards": [{"model": "x"}]}}, "missing or malformed"),
    ):
        Path("probed.json").write_text(json.dumps({**device, **change}))
        assert message in refused(capfd, *words[:-1], f"{words[-1]}probed.json")
    for entry in device["tables"]["forwards"]:
        entry["params"] += entry["model"] == "llama-3.1-8b"
    Path("probed.json").write_text(json.dumps(device))
    assert "doesn't cover this llama-3.1-8b" in refused(capfd, "plan", "--profile=./probed.json")


@pytest.mark.parametrize("show", ["why", "tables", "best"])
def test_rows_that_are_none(show: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("out").mkdir()
    for text in ("{}\n", "[]\n", "not json\n", '{"schema": 3}\n'):
        Path("out/runs.jsonl").write_text(text)
        assert "out" in refused(capfd, "compare", f"--show={show}")


def test_a_plan_for_a_pair_with_weights_can_be_run(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With weights, imposed acceptance needs --workload=gemm."""
    pair = tiny_pair(tmp_path, kv_heads=6)
    _, out = plan(capfd, f"--pair={pair.target}/{pair.draft}", "--gpus=1", "--alpha=0.7", A100)
    words = shlex.split(out.split("run it: ")[1].splitlines()[0])
    assert main([*words[words.index("run") :], "--dry_run", f"--out={tmp_path / 'out'}"]) == 0
