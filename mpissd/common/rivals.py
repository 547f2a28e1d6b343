"""The best other use of G GPUs: one definition, wherever a mode is set beside the others.

A *use* is a mode on T target ranks and D draft ranks, and its tok/s, at its own best K. Beside SSD
the others are AR, SD inline (D = 0) and SD, at every T and D with T + D <= G; beside another mode
likewise. A use that would fit and of which nothing is known makes the comparison no verdict: it is
named, and there is no best.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model


class Use(Protocol):
    """Anything that was measured or forecast: a choice of `plan`, a row, a point of a figure."""

    @property
    def mode(self) -> str: ...
    @property
    def tp(self) -> int: ...
    @property
    def num_drafts(self) -> int: ...
    @property
    def tok_per_s(self) -> float: ...


U = TypeVar("U", bound=Use)


@dataclass(frozen=True, order=True)
class Family:
    """All uses of one mode, T and D, whatever their K."""

    mode: str
    tp: int
    num_drafts: int

    @classmethod
    def of(cls, use: Use) -> Family:
        """The family of a use."""
        return cls(use.mode, use.tp, use.num_drafts)

    @property
    def gpus(self) -> int:
        """T + D."""
        return self.tp + self.num_drafts

    def __str__(self) -> str:
        """As tables and messages name it: AR T=2, SD inline T=2, SD T=1 D=1."""
        inline = " inline" * (self.mode == "sd" and not self.num_drafts)
        drafts = f" D={self.num_drafts}" * bool(self.num_drafts)
        return f"{self.mode.upper()}{inline} T={self.tp}{drafts}"


@dataclass(frozen=True)
class Others(Generic[U]):
    """judged: the fastest use of each family, fastest first; missing: families that would fit."""

    judged: tuple[U, ...]
    missing: tuple[Family, ...]

    @property
    def fastest(self) -> U | None:
        """The fastest of those judged: no claim that nothing is faster."""
        return self.judged[0] if self.judged else None

    @property
    def best(self) -> U | None:
        """The best other use; None where there is none, or where one could not be judged."""
        return None if self.missing else self.fastest

    @property
    def not_known(self) -> str:
        """The missing families in words; "" where there is none."""
        return ", ".join(map(str, self.missing))


def other_uses(mode: str, gpus: int, uses: Iterable[U], wanted: Iterable[Family] = ()) -> Others[U]:
    """What else `gpus` GPUs could do than run `mode`; wanted: the families that have to be judged.

    Of uses that are equal to five digits, the one on fewer GPUs counts, then the first given.
    """
    found: dict[Family, U] = {}
    fits = [use for use in uses if use.mode != mode and use.tp + use.num_drafts <= gpus]
    for use in sorted(fits, key=_rank):
        found.setdefault(Family.of(use), use)
    missing = {f for f in wanted if f.mode != mode and f.gpus <= gpus and f not in found}
    return Others(tuple(found.values()), tuple(sorted(missing)))


def families(tp: int, gpus: int, most_drafts: int = 1) -> tuple[Family, ...]:
    """Every family of T target ranks on at most so many GPUs."""
    drafts = range(1, 1 + min(most_drafts, gpus - tp))
    alone = (Family("ar", tp, 0), Family("sd", tp, 0)) if tp <= gpus else ()
    return (*alone, *(Family(mode, tp, d) for mode in ("sd", "ssd") for d in drafts))


def widest(gpus: int, tps: Collection[int]) -> tuple[Family, ...]:
    """What rows have to hold before one use is called the best: of AR, SD inline, SD and SSD the
    largest T that fits, of those that the target divides by.

    A smaller T reads more bytes a rank, and a second draft rank has a part of the first one's work:
    where rows have them they count, but nothing is wrong without them.
    """
    whole, beside = (max((t for t in tps if t <= gpus - d), default=0) for d in (0, 1))
    found = [*families(whole, whole), *families(beside, beside + 1)[2:]]
    return tuple(family for family in found if family.tp)


def tps_of(target: str, most: int) -> tuple[int, ...]:
    """Every T up to `most` on which a target can run, as far as its name tells (model/shard.py
    divides heads and inner width by T); every T at all where it tells nothing."""
    try:
        shape = resolve_model(target)
    except ConfigError:
        return tuple(range(1, most + 1))
    widths = shape.num_heads, shape.num_kv_heads, shape.ffn
    return tuple(t for t in range(1, most + 1) if not any(width % t for width in widths))


def _rank(use: Use) -> tuple[float, int]:
    return -float(f"{use.tok_per_s:.5g}"), use.tp + use.num_drafts
