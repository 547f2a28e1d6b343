"""The best other use of G GPUs: what counts, what is missing, and that nothing is claimed then."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.presets import PRESETS
from mpissd.common.rivals import Family, families, other_uses, tps_of, widest
from mpissd.engine.model.shard import Shard


@dataclass(frozen=True)
class Row:
    mode: str
    tp: int
    num_drafts: int
    tok_per_s: float


AR1, AR2 = Row("ar", 1, 0, 300.0), Row("ar", 2, 0, 525.0)
INLINE1, INLINE2 = Row("sd", 1, 0, 606.0), Row("sd", 2, 0, 796.0)
SD, SSD = Row("sd", 1, 1, 590.0), Row("ssd", 1, 1, 846.0)
ALL = [SSD, AR1, INLINE1, SD, AR2, INLINE2]
TPS = (1, 2, 4)


def test_sd_inline_over_all_gpus_is_a_rival() -> None:
    """README's comparison of 8B left it out."""
    found = other_uses("ssd", 2, ALL, widest(2, TPS))
    assert found.best is found.fastest is INLINE2 and found.missing == ()
    assert found.judged == (INLINE2, INLINE1, SD, AR2, AR1)


def test_one_that_was_not_measured_is_named_and_nothing_is_best() -> None:
    found = other_uses("ssd", 2, [SSD, AR1, INLINE1, SD, AR2], widest(2, TPS))
    assert found.missing == (Family("sd", 2, 0),) and found.not_known == "SD inline T=2"
    assert found.best is None and found.fastest is INLINE1


def test_more_gpus_than_given_and_the_mode_itself_do_not_count() -> None:
    assert other_uses("ssd", 1, ALL, widest(2, TPS)).judged == (INLINE1, AR1)
    assert other_uses("sd", 2, ALL).judged == (SSD, AR2, AR1)
    assert other_uses("ssd", 2, []).best is None


def test_a_smaller_t_that_is_faster_is_the_best_other_use() -> None:
    """All-reduces may cost more than they save."""
    found = other_uses("ssd", 2, [AR1, Row("ar", 2, 0, 200.0)])
    assert found.best is AR1


def test_repeats_of_a_family_count_by_the_fastest_and_equals_by_fewer_gpus() -> None:
    slower, same = Row("sd", 2, 0, 700.0), Row("sd", 1, 2, 796.0)
    assert other_uses("ssd", 3, [slower, same, INLINE2]).judged == (INLINE2, same)


@pytest.mark.parametrize(
    ("gpus", "tps", "names"),
    [
        (1, (1, 2, 4), ["AR T=1", "SD inline T=1"]),
        (2, (1, 2, 4), ["AR T=2", "SD inline T=2", "SD T=1 D=1", "SSD T=1 D=1"]),
        (3, (1, 2, 4), ["AR T=2", "SD inline T=2", "SD T=2 D=1", "SSD T=2 D=1"]),
        (4, (1, 2, 4), ["AR T=4", "SD inline T=4", "SD T=2 D=1", "SSD T=2 D=1"]),
        (2, (), []),
    ],
)
def test_the_widest_of_each_method_has_to_be_known(
    gpus: int, tps: tuple[int, ...], names: list[str]
) -> None:
    assert [str(family) for family in widest(gpus, tps)] == names


def test_families_of_a_t() -> None:
    assert [str(f) for f in families(2, 2)] == ["AR T=2", "SD inline T=2"]
    assert [str(f) for f in families(1, 3, most_drafts=4)] == [
        "AR T=1", "SD inline T=1", "SD T=1 D=1", "SD T=1 D=2", "SSD T=1 D=1", "SSD T=1 D=2",
    ]  # fmt: skip
    assert families(4, 3) == ()


def runs(name: str, tp: int) -> bool:
    try:
        Shard(PRESETS[name], tp)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", [n for n, shape in PRESETS.items() if shape.head is None])
def test_t_of_a_target_are_those_that_it_divides_by(name: str) -> None:
    assert tps_of(name, 12) == tuple(t for t in range(1, 13) if runs(name, t))


def test_t_of_an_unknown_target_are_all() -> None:
    assert tps_of("llama-3.1-70b", 12, "transformer") == tuple(range(1, 9))  # a KV head each
    assert tps_of("somebody's own", 3) == (1, 2, 3)
