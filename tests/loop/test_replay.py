"""A text run, its recording by the same models, and the replay: the same decisions, one by one."""

from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.common.records import outcome_digest
from mpissd.engine import RunConfig
from tests.text_config import finished
from tests.tiny_pair import TinyPair

PROMPTS = "5,6,7,8;9;" + ",".join(str(n * 11 % 97) for n in range(40)) + ";3,3,9;48,2;1,2,3,1,2"
LIMIT, STOP, COUNT = 20, 94, 6
REPLAYED = {"backend": "emulated", "device": "null", "workload": "replay"}
RUNS: list[dict[str, Any]] = [
    {"mode": "ar", "batch_size": 4},
    {"mode": "sd", "num_drafts": 0, "lookahead": 5, "batch_size": 2},
    {"mode": "sd", "lookahead": 3, "backup": "fast", "lookup": "suffix", "batch_size": 2},
    {"mode": "ssd", "lookahead": 3, "fan_out": "list:6,0,2,1", "batch_size": 4, "backup": "fast"},
    {"mode": "ssd", "lookahead": 5, "fan_out": "geometric:12/uniform:1", "batch_size": 2},
    {"mode": "ssd", "lookahead": 5, "fan_out": "uniform:8", "backup_lookahead": 2},
]


@pytest.fixture(scope="module")
def recording(pair: TinyPair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "pair.npz"
    told = {"target": pair.target, "draft": pair.draft, "prompt_ids": PROMPTS, "out": path}
    told |= {"num_tokens": LIMIT, "stop_token": STOP, "lookahead": 5, "fan_out": 8}
    assert main(["pair", *(f"--{name}={value}" for name, value in told.items())]) == 0
    return path


@pytest.mark.parametrize("flags", RUNS, ids=str)
def test_a_replay_has_the_text_run_s_outcomes(
    flags: dict[str, Any], pair: TinyPair, recording: Path
) -> None:
    models = {"target": str(pair.target), "draft": str(pair.draft), "backend": "numpy"}
    told = {"prompt_ids": PROMPTS, "num_tokens": LIMIT, "stop_token": STOP}
    run = finished(RunConfig(workload="text", **models, **told, **flags))
    replay = finished(RunConfig(pair="toy", recording=str(recording), **REPLAYED, **flags))
    rows = run.records.sequences()
    assert replay.records.sequences().tolist() == rows.tolist()
    assert outcome_digest(replay.records.sequences()) == outcome_digest(rows)
    cut = {n: tokens[:LIMIT] for n, tokens in run.tokens.items()}
    assert replay.tokens == cut and len(cut) == COUNT
    if flags["mode"] != "ar":
        assert 0 < rows[:, 3].mean() < flags["lookahead"]


def test_a_replay_runs_over_a_transformer(pair: TinyPair, recording: Path) -> None:
    """The recording decides, whatever the forwards compute."""
    flags = {"mode": "ssd", "lookahead": 4, "fan_out": "uniform:3", "batch_size": 3}
    models = {"target": str(pair.target), "draft": str(pair.draft), "backend": "numpy"}
    told = {"recording": str(recording), "workload": "replay", **flags}
    found = finished(RunConfig(forward="transformer", **models, **told))
    products = finished(RunConfig(pair="toy", backend="emulated", device="null", **told))
    assert found.records.sequences().tolist() == products.records.sequences().tolist()
    small = "gen:layers=1,hidden=64,ffn=64,heads=4,vocab=50"
    with pytest.raises(ConfigError, match=r"has 97 tokens, .* 50: allowed: forward=gemm"):
        models = {"target": small, "draft": small, "backend": "numpy"}
        finished(RunConfig(forward="transformer", **models, **told))
