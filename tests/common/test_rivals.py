"""The uses of G GPUs that a method must beat."""

from __future__ import annotations

import pytest

from mpissd.common.rivals import tps_of, widest

TPS = (1, 2, 4)


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
