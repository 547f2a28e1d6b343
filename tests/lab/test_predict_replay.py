"""A predicted replay has the outcomes of its run, timed by the recurrence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mpissd.__main__ import main
from mpissd.common.config import RunConfig
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.job import Job, resolve
from mpissd.engine.workload.markov import MarkovLaws, MarkovModel
from mpissd.engine.workload.replay.recording import load, save
from mpissd.lab.pair.outcomes import of_recording
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.recorded import predict_replay
from tests.loop.recorded import recording_of

LAWS = MarkovLaws(MarkovModel(60, 2, 3), MarkovModel(60, 2, 3, 0.3), 0.0, seed=6, prompt_tokens=2)
K, LIMIT = 4, 40


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recorded") / "pair.npz"
    save(path, recording_of(LAWS, 10, limit=LIMIT, K=K, F=8))
    return path


def job(path: Path, **flags: object) -> Job:
    named = {"workload": "replay", "recording": str(path), "pair": "8b/1b", "lookahead": K}
    config = RunConfig(**{**named, "num_tokens": LIMIT, **flags})  # type: ignore[arg-type]
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def costs(job: Job) -> DeviceCosts:
    return DeviceCosts.from_profile(load_profile("h100"), job)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_rounds_are_the_recording_s_and_take_the_device_s_time(path: Path, mode: str) -> None:
    made = job(path, mode=mode)
    device, row = costs(made), predict_replay(made, costs(made), HostCosts())
    if mode == "ar":
        rounds, step = LIMIT * 10, float(device.verify(1))
        assert row["num_rounds"] == row["num_tokens"] == rounds
        assert row["wall_s"] == pytest.approx(rounds * step)
        return
    wanted = of_recording(load(str(path)), K)
    assert row["num_rounds"] == len(wanted.accepted) and row["num_tokens"] == 10 * LIMIT
    assert row["acceptance_length"] == pytest.approx(1 + wanted.accepted.mean())
    if mode == "sd":  # every round drafts K tokens, then verifies
        each = row["t_target_s"] + row["t_draft_s"]
        assert row["wall_s"] == pytest.approx(each * row["num_rounds"], rel=1e-3)
        return
    assert wanted.rank is not None
    counted = wanted.rank[wanted.rank != -2]
    hits = ((counted > 0) & (counted <= 3)).mean()  # uniform:3
    assert row["hit_rate"] == pytest.approx(hits)
    assert np.isfinite(row["wall_s"]) and row["wall_s"] > row["num_rounds"] * row["t_target_s"]


def test_the_command(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--profile=h100", "--pair=70b/1b", "--tp=4", "--workload=replay"]
    limits = ["--num_tokens=20", "--batch_size=2", "--mode=ssd"]
    assert main(["plan", *flags, *limits, f"--recording={path}"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert row["num_tokens"] == 200 and row["tok_per_s"] > 0
