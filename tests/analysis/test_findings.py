"""The sentence beside a figure says what its numbers say."""

from __future__ import annotations

import pandas as pd

from analysis.findings import throughput
from analysis.uses import BESIDE

SAYS = "panel series x y low high headline rival gpus missing".split()


def numbers(*told: tuple[object, ...]) -> pd.DataFrame:
    return pd.DataFrame([("own best K, all GPUs", BESIDE, *one) for one in told], columns=SAYS)


def test_the_best_other_use_is_named_with_its_interval() -> None:
    said = throughput(
        numbers(
            (0.5, 0.83, 0.80, 0.86, True, "SD inline T=2", 2, ""),
            (0.8, 1.02, 0.97, 1.07, True, "SD inline T=2", 2, ""),
        )
    )
    assert said == (
        "SSD against the best other use of 2 GPUs: 0.83× (0.80–0.86) of SD inline T=2 at α=0.5, "
        "no difference (0.97–1.07) of SD inline T=2 at α=0.8."
    )


def test_where_one_was_not_measured_nothing_is_called_best() -> None:
    lacking = (0.8, 1.35, 1.3, 1.4, True, "SD inline T=1", 2, "SD inline T=2")
    said = throughput(numbers(lacking))
    assert "the fastest measured use of 2 GPUs: 1.35× (1.30–1.40) of SD inline T=1" in said
    assert said.endswith("(not measured: SD inline T=2).") and "best" not in said


def test_nothing_is_said_of_nothing() -> None:
    assert throughput(numbers()) == ""
