"""The uses of G GPUs that a method must beat: known ones and missing ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mpissd.common.rivals import Family, other_uses, tps_of, widest


@dataclass(frozen=True)
class Row:
    mode: str
    tp: int
    num_drafts: int
    tok_per_s: float


AR1, AR2 = Row("ar", 1, 0, 300.0), Row("ar", 2, 0, 525.0)
INLINE1, INLINE2 = Row("sd", 1, 0, 606.0), Row("sd", 2, 0, 796.0)
LOOKUP, SD, SSD = Row("lookup", 2, 0, 700.0), Row("sd", 1, 1, 590.0), Row("ssd", 1, 1, 846.0)
ALL = [SSD, AR1, INLINE1, SD, AR2, INLINE2, LOOKUP]
TPS = (1, 2, 4)


def test_every_use_of_as_many_gpus_is_ranked() -> None:
    found = other_uses("ssd", 2, ALL, widest(2, TPS))
    assert found.best is found.fastest is INLINE2 and found.missing == ()
    assert found.judged == (INLINE2, LOOKUP, INLINE1, SD, AR2, AR1)


def test_one_that_was_not_measured_is_named_and_nothing_is_best() -> None:
    found = other_uses("ssd", 2, [row for row in ALL if row is not LOOKUP], widest(2, TPS))
    assert found.missing == (Family("lookup", 2, 0),) and found.not_known == "lookup T=2"
    assert found.best is None and found.fastest is INLINE2


@pytest.mark.parametrize(
    ("gpus", "tps", "names"),
    [
        (1, TPS, "AR T=1, SD inline T=1, lookup T=1"),
        (2, TPS, "AR T=2, SD inline T=2, lookup T=2, SD T=1 D=1, SSD T=1 D=1"),
        (3, (1, 2, 3), "AR T=3, SD inline T=3, lookup T=3, SD T=2 D=1, SSD T=2 D=1"),
        (2, (), ""),
    ],
)
def test_the_widest_of_each_method_has_to_be_known(
    gpus: int, tps: tuple[int, ...], names: str
) -> None:
    assert ", ".join(map(str, widest(gpus, tps))) == names


def test_t_of_a_target_are_all_that_have_a_kv_head_each() -> None:
    assert tps_of("llama-3.1-70b", 12) == tuple(range(1, 9))
    assert tps_of("somebody's own", 3) == (1, 2, 3)
