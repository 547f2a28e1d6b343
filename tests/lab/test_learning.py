"""A learner's fields in a row and its card, and whose GPU it is counted with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpissd.engine.backend.base import DeviceInfo
from mpissd.lab.measure.reports import Measured
from mpissd.lab.measure.row import shares_gpu_of
from tests.common.clean_row import Line, Rounds, judge, make

INFOS = [DeviceInfo("a GPU", "gpu", uuid=f"GPU-{name}") for name in "ab"]
SEEN = {"sequences": 128, "steps": 28, "published": 1, "refused": 6}


@pytest.mark.parametrize(
    ("report", "infos", "shared"),
    [
        ({"gpu": "GPU-b"}, INFOS, 1),
        ({"gpu": "GPU-c"}, INFOS, None),
        (None, INFOS, None),
    ],
)
def test_a_learner_shares_the_gpu_of_the_rank_that_has_the_same_one(
    report: dict[str, Any] | None, infos: list[DeviceInfo], shared: int | None
) -> None:
    measured = cast(Measured, SimpleNamespace(lead=SimpleNamespace(learner=report)))
    assert shares_gpu_of(measured, infos) == shared


def learned(shared: int | None) -> tuple[Line, Rounds]:
    """A row of three ranks, of which the last one learns on the GPU of another, or its own."""
    row, rounds = make()
    row |= {"world_size": 3, "learners": 1, "learner_state": "learning", "draft_versions": 1}
    row["learner"] = {**SEEN, "shares_gpu_of": shared}
    row["tok_per_s_per_gpu"] = row["tok_per_s"] / (3 if shared is None else 2)
    return row, rounds


@pytest.mark.parametrize("shared", [None, 0, 1])
def test_a_gpu_that_a_learner_shares_counts_once(shared: int | None) -> None:
    row, rounds = learned(shared)
    assert judge(row, rounds) == []
    row["tok_per_s_per_gpu"] = row["tok_per_s"] / (2 if shared is None else 3)
    (told,) = judge(row, rounds)
    assert "tok_per_s_per_gpu" in told
