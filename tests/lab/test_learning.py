"""A learner's fields in a row and its card, and whose GPU it is counted with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpissd.engine.backend.base import DeviceInfo
from mpissd.lab.measure.reports import Measured
from mpissd.lab.measure.row import shares_gpu_of

INFOS = [DeviceInfo("a GPU", "gpu", uuid=f"GPU-{name}") for name in "ab"]


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
