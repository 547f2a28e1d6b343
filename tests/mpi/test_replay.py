"""Recordings between real ranks: a replay's row has the run's outcomes, and prompts make room."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mpissd.common.records import outcome_digest
from mpissd.engine.workload.replay.recording import load, save
from tests.loop.markov_rig import Pair, greedy
from tests.loop.recorded import recording_of
from tests.mpi.harness import Together, launch, needs_mpi
from tests.mpi.test_markov_modes import SHAPES, emitted

pytestmark = needs_mpi

STOP, LIMIT = 7, 24
PAIR = Pair(temperature=0.0, vocab=12, order=2, prompt_tokens=3, seed=4, divergence=0.35)
MACHINE = [*SHAPES.split(), *"--backend=emulated --device=null --warmup_rounds=20".split()]
MODELS = "--workload=markov --seed=4 --vocab=12 --order=2 --prompt_tokens=3".split()
ENDS = f"--divergence=0.35 --num_tokens={LIMIT} --stop_token={STOP}".split()
METHODS: dict[str, tuple[int, list[str]]] = {
    "ssd": (2, "--lookahead=3 --fan_out=list:1,1,1,2/list:2,0,1,1".split()),
    "fast": (2, "--lookahead=4 --fan_out=uniform:2 --backup=fast".split()),
    "T=2": (3, "--lookahead=2 --fan_out=geometric:9 --backup_lookahead=1".split()),
    "sd": (2, "--mode=sd --lookahead=5".split()),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Recordings of 5 and of 9 prompts."""
    folder, found = tmp_path_factory.mktemp("recordings"), {}
    for count in (5, 9):
        found[count] = folder / f"{count}.npz"
        save(found[count], recording_of(PAIR.laws, count, limit=LIMIT, K=5, F=9, stop=STOP))
    return found


@pytest.fixture(scope="module")
def runs(files: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Together:
    replay = ["--workload=replay", "--batch_size=5"]
    told = {}
    for name, (np_, flags) in METHODS.items():
        told[name] = np_, [*MACHINE, *MODELS, *ENDS, "--batch_size=5", *flags]
        told[f"{name}, replayed"] = np_, [*MACHINE, *replay, f"--recording={files[5]}", *flags]
    nine = ["--workload=replay", "--batch_size=4", f"--recording={files[9]}"]
    told["nine prompts"] = 2, [*MACHINE, *nine, "--fan_out=uniform:3"]
    return Together(told, tmp_path_factory.mktemp("runs"))


@pytest.mark.parametrize("name", METHODS)
def test_a_replay_has_the_run_s_very_outcomes(
    name: str, runs: Together, files: dict[int, Path]
) -> None:
    run, replay = runs[name], runs[f"{name}, replayed"]
    assert replay.row["outcome_digest"] == run.row["outcome_digest"]
    assert replay.arrays["sequences"].tolist() == run.arrays["sequences"].tolist()
    assert replay.row["recording"] == load(str(files[5])).label
    assert run.row["recording"] is None
    for key in ("num_tokens", "accept_histogram", "hit_rate"):
        assert replay.row[key] == run.row[key], key
    assert {n: tokens[:LIMIT] for n, tokens in emitted(run).items()} == emitted(replay)


def test_prompts_follow_each_other(runs: Together) -> None:
    """Four at a time of nine; every answer is whole, and the row counts it up to its end."""
    job = runs["nine prompts"]
    want = {
        n: tokens[:LIMIT]
        for n, tokens in greedy(replace(PAIR, batch=9), LIMIT, stop_token=STOP).items()
    }
    assert emitted(job) == want
    assert job.row["num_tokens"] == sum(map(len, want.values()))
    rows = job.arrays["sequences"]
    assert outcome_digest(rows) == job.row["outcome_digest"]
    assert len(set(rows[rows[:, 0] == 0, 1])) == 4 and len(set(rows[:, 1])) == 9


def test_a_broken_recording_is_refused_before_ranks_start(
    files: dict[int, Path], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.npz"
    broken.write_bytes(files[5].read_bytes()[:-100])
    job = launch(2, *MACHINE, "--workload=replay", f"--recording={broken}", folder=tmp_path)
    assert job.code == 2 and job.out == ""
    (line,) = job.lines
    assert f"recording={broken}: BadZipFile" in line
