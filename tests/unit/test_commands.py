"""predict, plan, why and tables on the command line: JSON at the end, or one line of refusal."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mpissd import cli
from mpissd.__main__ import main
from mpissd.config import RunConfig
from mpissd.job import resolve
from mpissd.predict import jobfile
from mpissd.predict.costs import DeviceCosts, HostCosts

COMMANDS = ("predict", "plan", "why", "tables", "probe")


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


def job_profile(**flags: Any) -> dict[str, Any]:
    """What a run on the toy pair could have written."""
    config = RunConfig(pair="toy", lookahead=2, rounds=50, **flags)
    job = resolve(config, 1, backend="numpy", memory_bytes=None)
    target = {rows: 1e-3 + rows * 1e-5 for rows in job.target_buckets()}
    draft = {rows: 1e-4 + rows * 1e-6 for rows in job.draft_buckets()}
    device = DeviceCosts.from_points(target, draft)
    return jobfile.to_dict(job, "numpy", 50, device, HostCosts(link=1e-6), None)


def save(data: Any) -> str:
    Path("job.json").write_text(json.dumps(data))
    return "job.json"


def test_a_prediction_from_a_device_s_profile(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--profile=h100", "--pair=8b/1b", "--lookahead=5", "--rounds=50"
    sd = said(capfd, "predict", *flags, "--mode=sd")
    ssd = said(capfd, "predict", *flags, "--mode=ssd")
    ar = said(capfd, "predict", *flags, "--mode=ar")
    assert 0 < ar["tok_per_s"] < sd["tok_per_s"] < ssd["tok_per_s"]
    wider = said(capfd, "predict", *flags, "--mode=ar", "--tp=2")
    assert wider["tok_per_s"] > ar["tok_per_s"]


def test_a_prediction_from_a_job_s_profile(capfd: pytest.CaptureFixture[str]) -> None:
    name = f"--profile={save(job_profile())}"
    same = said(capfd, "predict", name)
    assert same == said(capfd, "predict", name, "--lookahead=2", "--rounds=50", "--mode=ssd")
    better = said(capfd, "predict", name, "--alpha=1", "--p_hit=1")
    assert better["tok_per_s"] > same["tok_per_s"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ((), "profile: needed"),
        (("--profile=h10",), "did you mean 'h100'"),
        (("--profile=./none.json",), "none.json"),
        (("--profile=h100", "--lookahead=x"), "lookahead=x"),
        (("--profile=h100", "--mode=sdd"), "unknown mode 'sdd'"),
        (("--profile=h100", "--pair=70b/1b"), "needs 136.9 GB a rank"),
        (("--profile=h100", "--pair=toy", "--tp=3"), "not divisible by tp=3"),
        (("--profile=h100", "--roundz=3"), "did you mean '--rounds'"),
        (("h100",), "is not a flag"),
    ],
)
def test_what_cannot_be_predicted(
    flags: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, "predict", *flags)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lookahead=9",), "rows"),
        (("--batch_size=4",), "covers batch_size=1, not 4"),
        (("--tp=2",), "covers tp=1, not 2"),
        (("--pair=8b/1b",), "covers target=toy-target, not llama-3.1-8b"),
        (("--target=toy-target", "--draft=1b"), "covers the draft toy-draft"),
        (("--fuse",), "covers fuse"),
        (("--mode=sd", "--num_drafts=0"), "covers the draft"),
    ],
)
def test_what_a_job_did_not_measure(
    flags: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, "predict", f"--profile={save(job_profile())}", *flags)


def paths_of(data: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Where the dictionary has keys, all the way down."""
    if not isinstance(data, dict):
        return []
    return [p for key, value in data.items() for p in [(*at, key), *paths_of(value, (*at, key))]]


@pytest.mark.parametrize("junk", [None, "junk", -1, [], {}, True], ids=repr)
def test_a_damaged_job_profile_is_refused_or_read_and_never_crashes(
    junk: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    good = job_profile()
    for path in paths_of(good):
        damaged = copy.deepcopy(good)
        at: Any = damaged
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = junk
        code = main(["predict", f"--profile={save(damaged)}"])
        out, err = capfd.readouterr()
        assert code in (0, 2), path
        assert err.count("\n") == (code == 2), (path, err)
        assert code == 0 or out == "", path


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"kind": "job"}', "\0"])
def test_a_file_that_is_no_profile(text: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("job.json").write_text(text)
    assert "job.json" in refused(capfd, "predict", "--profile=job.json")


def test_a_plan_is_a_line_that_runs(capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--gpus=3", "--profile=h100", "--pair=8b/1b", "--alpha=0.7", "--batch_size=2"
    assert main(["plan", *flags]) == 0
    out, _ = capfd.readouterr()
    line = next(line for line in out.splitlines() if "mpirun" in line)
    found = re.search(r"mpirun -np (\d+) python -m mpi4py -m mpissd (run .*)", line)
    assert found is not None
    command = cli.parse(found[2].split())
    assert command is not None
    config: RunConfig = command.config
    best = json.loads(out.splitlines()[-1])["best"]
    assert int(found[1]) == best["tp"] + best["num_drafts"] <= 3
    assert (config.mode, config.batch_size) == (best["mode"], 2)
    assert config.acceptance_text == "alpha:0.7"
    job = resolve(config, best["tp"], backend="emulated", memory_bytes=80 * 10**9)
    assert job.lookahead == best["lookahead"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "--gpus=0"), "gpus=0"),
        (("plan", "--profile=h10"), "did you mean 'h100'"),
        (("plan", "--pair=70b/1b", "--gpus=1", "--profile=h100"), ""),
        (("plan", "--alpha=2"), "alpha=2"),
        (("why",), "runs.jsonl"),
        (("why", "--result=nothing"), "runs.jsonl"),
        (("why", "--result=./none.jsonl"), "none.jsonl"),
        (("why", "--out=none"), "none"),
        (("tables", "--results=none"), "results 'none'"),
        (("probe", "--backend=cuda"), "unknown backend 'cuda'"),
        (("predict", "word"), "'word' is not a flag"),
        (("plan", "word"), "'word' is not a flag"),
        (("probe", "word"), "'word' is not a flag"),
        (("why", "word"), "runs.jsonl"),  # it may be the name of a run,
        (("tables", "word"), "results 'word'"),  # and here a folder
        (("why", "one", "two"), "'two' is not a flag"),
        (("tables", "one", "two"), "'two' is not a flag"),
        *(((command, "--nonsense=1"), "unknown flag '--nonsense'") for command in COMMANDS),
    ],
)
def test_refusals(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capfd, *arguments)


@pytest.mark.parametrize("text", ["{}\n", "[]\n", "not json\n", "\n", '{"schema": 2}\n'])
@pytest.mark.parametrize("command", ["why", "tables"])
def test_rows_that_are_none(command: str, text: str, capfd: pytest.CaptureFixture[str]) -> None:
    """An empty line may pass in tables; a broken one is named."""
    Path("out").mkdir()
    Path("out/runs.jsonl").write_text(text)
    code = main([command])
    out, err = capfd.readouterr()
    if command == "tables" and text == "\n":
        assert code == 0 and err == ""
    else:
        assert code == 2 and out == "" and err.count("\n") == 1 and "runs.jsonl" in err


def test_tables_without_rows_say_what_to_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tables"]) == 0
    out, err = capfd.readouterr()
    assert err == "" and "make run" in out


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0 and command in "".join(capfd.readouterr())
