"""Any workload decides the same over a transformer's forward as over products only."""

from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.records import outcome_digest
from mpissd.engine import Decoder

MODEL = "gen:layers=2,hidden=64,ffn=128,heads=4,kv_heads=2,head_dim=16,vocab=97"
CASES: list[tuple[str, dict[str, Any]]] = [
    ("ar", {}),
    ("sd", {"num_drafts": 0, "alpha": 0.9}),
    ("ssd", {"batch_size": 3, "context": 70}),
    ("ssd", {"batch_size": 2, "lookahead": 3}),
    ("ssd", {"workload": "markov", "vocab": 20, "temperature": 0.8, "batch_size": 2}),
]


def config(mode: str, **flags: Any) -> RunConfig:
    models = {"target": MODEL, "draft": MODEL, "backend": "numpy", "rounds": 5}
    return RunConfig(mode=mode, **{**models, **flags})


def digest(told: RunConfig) -> str:
    """Of 40 rounds, eight times the tokens after which positions begin again."""
    with Decoder(told) as decoder:
        for _ in range(40):
            decoder.step()
        return outcome_digest(decoder.records.sequences())


@pytest.mark.parametrize(("mode", "flags"), CASES, ids=lambda told: str(told))
def test_outcomes_do_not_depend_on_the_forward(mode: str, flags: dict[str, Any]) -> None:
    assert digest(config(mode, forward="transformer", **flags)) == digest(config(mode, **flags))
