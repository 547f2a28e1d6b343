"""plan and compare on the command line: JSON at the end, or one line of refusal."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.cli import arguments as cli
from mpissd.cli.arguments import ProbeConfig
from mpissd.engine.job import resolve
from tests.scripts import refused
from tests.tiny_pair import tiny_pair

RESULTS = Path(__file__).resolve().parents[2] / "results"
PROBED = RESULTS / "h200/profiles"
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


def command_line(out: str, name: str) -> tuple[int, Any]:
    """(ranks, configuration) of the line that a plan prints for a command."""
    found = re.search(rf"mpirun -np (\d+) python -m mpi4py -m mpissd ({name} .*)", out)
    assert found is not None
    return int(found[1]), cli.parse(shlex.split(found[2])).config


def test_a_mode_is_predicted(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h100", "--pair=8b/1b", "--lookahead=5", "--rounds=50"
    ar, sd, ssd = (plan(capfd, *flags, f"--mode={mode}")[0] for mode in ("ar", "sd", "ssd"))
    rate = "expected_tok_per_s"
    assert 0 < ar[rate] < sd[rate] < ssd[rate]
    assert plan(capfd, *flags, "--mode=ar", "--tp=2")[0][rate] > ar[rate]
    same = plan(capfd, *flags, "--mode=sd", "--draft_device=h100")[0]
    slower = plan(capfd, *flags, "--mode=sd", "--draft_device=v100-32")[0]
    assert same == sd and slower["t_target_s"] == same["t_target_s"]
    assert slower["t_draft_s"] > same["t_draft_s"]


RATES = ".95,.9,.7,.4,.2,.1,.05,.02,.01,.01,.01,.01,.01,.01,.01,.01,.01,.01"


@pytest.mark.parametrize(
    "flags",
    [
        ("--gpus=2", "--alpha=0.7", "--batch_size=2"),
        ("--gpus=2", f"--acceptance=marginal:{RATES}", "--p_hit=0.7"),
    ],
    ids=str,
)
def test_a_plan_is_one_that_runs(flags: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
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


def test_a_plan_is_of_one_sequence_and_of_all_gpus(capfd: pytest.CaptureFixture[str]) -> None:
    """Two GPUs: one sequence is fastest over both, two on one GPU each give more together."""
    told, out = plan(capfd, "--profile=h200", "--fuse", "--alpha=.7", "--gpus=2")
    copies = [(2 // (c["tp"] + c["num_drafts"])) * c["tok_per_s"] for c in told["judged"]]
    most = re.search(r"most tok/s of all 2 GPUs: (.*) T=1 × 2, ([0-9.]+) tok/s", out)
    assert most is not None and float(most[2]) == pytest.approx(max(copies), abs=0.1)
    assert max(copies) > told["best"]["tok_per_s"]
    assert told["best"] == told["judged"][0] and not told["unjudged"]
    names = {f"{mode} T={tp}" for mode in ("AR", "SD inline", "lookup") for tp in (1, 2)}
    assert all(f"{name} " in out for name in (*names, "SD T=1 D=1", "SSD T=1 D=1"))


def test_a_plan_is_made_for_what_was_probed(capfd: pytest.CaptureFixture[str]) -> None:
    """Pair and fused products are the probe's where no flag sets them; other T are derived."""
    told, _ = plan(capfd, EIGHT, "--gpus=4")
    for choice in told["judged"]:
        derived = choice["derived"]
        assert derived is None if choice["tp"] == 1 else derived.startswith("derived")
    told, out = plan(capfd, EIGHT, "--gpus=1")
    _, config = command_line(out, "run")
    assert (config.pair, config.fuse) == ("8b/1b", True)
    (ar,) = (choice for choice in told["judged"] if choice["mode"] == "ar")
    assert plan(capfd, EIGHT, "--mode=ar")[0]["expected_tok_per_s"] == pytest.approx(
        ar["tok_per_s"]
    )


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
    assert "→" not in out and told["best"] is None
    assert {(u["mode"], u["tp"]) for u in told["unjudged"]} == {
        *(("ar", 2), ("lookup", 2), ("sd", 2))
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--profile=h10"), "did you mean 'h100'"),
        (("plan", "--profile=out/mine.json"), "no such file: allowed: what `probe` saved"),
        (("plan", "--lookahead=3"), "lookahead=3 without mode: allowed: with mode"),
        (("plan", "--mode=ar", "--pair=70b/1b"), "needs 139.0 GB a rank"),
        (("plan", "--mode=sd", "--pair=toy", "--tp=3"), "not divisible by tp=3"),
        (("plan", TWO, "--gpus=3", "--pair=8b/1b"), "doesn't cover llama-3.1-8b T=1"),
        (("plan", EIGHT, "--pair=8b/0.6b"), "doesn't cover qwen3-0.6b T=1"),
        (("plan", EIGHT, "--pair=8b/1b", "--nofuse"), "doesn't cover llama-3.1-8b T=1: it has"),
        (("plan", EIGHT, "--mode=sd", "--lm_head"), "doesn't cover llama-3.1-8b T=1 fuse lm_head"),
        (("plan", SEVENTY, "--pair=70b/1b", "--gpus=5"), "doesn't cover llama-3."),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *arguments)


def test_a_profile_of_other_weights_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    device = json.loads(Path(EIGHT.partition("=")[2]).read_text())
    for entry in device["tables"]["forwards"]:
        entry["params"] += entry["model"] == "llama-3.1-8b"
    Path("probed.json").write_text(json.dumps(device))
    assert "doesn't cover this llama-3.1-8b" in refused(capfd, "plan", "--profile=./probed.json")


def test_a_plan_for_weights_can_be_run(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With weights, imposed acceptance needs --workload=gemm."""
    pair = tiny_pair(tmp_path, kv_heads=6)
    _, out = plan(capfd, f"--pair={pair.target}/{pair.draft}", "--gpus=1", "--alpha=0.7", A100)
    words = shlex.split(out.split("run it: ")[1].splitlines()[0])
    assert main([*words[words.index("run") :], "--dry_run", f"--out={tmp_path / 'out'}"]) == 0
