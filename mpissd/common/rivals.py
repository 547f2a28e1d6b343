"""Finds the best other use of G GPUs, by one definition for every comparison of modes.

A *use* is a mode on T target ranks and D draft ranks with its tok/s at its own best K. The others
of SSD are AR, SD inline (D = 0) and SD, at every T and D with T + D <= G; for other modes likewise.
If the throughput of a use that would fit is unknown, the comparison gives no verdict: that use is
named, and no use is called the best.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model


class Use(Protocol):
    """A measured or predicted use: a choice of `plan`, a row, or a point of a figure."""

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
    """Key of the uses that share mode, T and D and differ in K."""

    mode: str
    tp: int
    num_drafts: int

    @classmethod
    def of(cls, use: Use) -> Family:
        """Returns the family of a use."""
        return cls(use.mode, use.tp, use.num_drafts)

    @property
    def gpus(self) -> int:
        """The number of GPUs, T + D."""
        return self.tp + self.num_drafts

    def __str__(self) -> str:
        """Returns the name in tables and messages: AR T=2, SD inline T=2, SD T=1 D=1."""
        inline = " inline" * (self.mode == "sd" and not self.num_drafts)
        drafts = f" D={self.num_drafts}" * bool(self.num_drafts)
        return f"{self.mode.upper()}{inline} T={self.tp}{drafts}"


@dataclass(frozen=True)
class Others(Generic[U]):
    """The fastest use of each other family, fastest first, and the families that are not known.

    judged: the fastest use of each known family. missing: families that would fit, without a rate.
    """

    judged: tuple[U, ...]
    missing: tuple[Family, ...]

    @property
    def fastest(self) -> U | None:
        """The fastest use with a known rate; a missing family may be faster."""
        return self.judged[0] if self.judged else None

    @property
    def best(self) -> U | None:
        """The fastest other use; None if there is none, or if the rate of one is unknown."""
        return None if self.missing else self.fastest

    @property
    def not_known(self) -> str:
        """The missing families in words; "" if there are none."""
        return ", ".join(map(str, self.missing))


def other_uses(mode: str, gpus: int, uses: Iterable[U], wanted: Iterable[Family] = ()) -> Others[U]:
    """Ranks the other uses of `gpus` GPUs than `mode`; wanted: the families that must be judged.

    Of uses that are equal to five digits, the one on fewer GPUs is taken, then the first given.
    """
    fastest: dict[Family, U] = {}
    fits = [use for use in uses if use.mode != mode and use.tp + use.num_drafts <= gpus]
    for use in sorted(fits, key=_rank):
        fastest.setdefault(Family.of(use), use)
    missing = {f for f in wanted if f.mode != mode and f.gpus <= gpus and f not in fastest}
    return Others(tuple(fastest.values()), tuple(sorted(missing)))


def families(tp: int, gpus: int, most_drafts: int = 1) -> tuple[Family, ...]:
    """Returns every family with T target ranks that needs at most `gpus` GPUs."""
    drafts = range(1, 1 + min(most_drafts, gpus - tp))
    alone = (Family("ar", tp, 0), Family("sd", tp, 0)) if tp <= gpus else ()
    return (*alone, *(Family(mode, tp, d) for mode in ("sd", "ssd") for d in drafts))


def widest(gpus: int, tps: Collection[int]) -> tuple[Family, ...]:
    """Returns the families that rows must hold before one use is called the best.

    These are AR, SD inline, SD and SSD, each on the largest T that fits and that the target divides
    by. A smaller T reads more bytes a rank, and a second draft rank takes over only part of the
    first one's work; such rows count if they exist, but are not required.
    """
    whole, beside = (max((t for t in tps if t <= gpus - d), default=0) for d in (0, 1))
    possible = [*families(whole, whole), *families(beside, beside + 1)[2:]]
    return tuple(family for family in possible if family.tp)


def tps_of(target: str, most: int, forward: str = "gemm") -> tuple[int, ...]:
    """Returns every T up to `most` on which a target can run, judged by its name.

    model/shard.py divides heads and inner width by T; a transformer's ranks need a KV head each.
    For an unknown name every T is returned.
    """
    try:
        shape = resolve_model(target)
    except ConfigError:
        return tuple(range(1, most + 1))
    if forward == "transformer":
        return tuple(range(1, min(most, shape.num_kv_heads) + 1))
    widths = shape.num_heads, shape.num_kv_heads, shape.ffn
    return tuple(t for t in range(1, most + 1) if not any(width % t for width in widths))


def _rank(use: Use) -> tuple[float, int]:
    return -float(f"{use.tok_per_s:.5g}"), use.tp + use.num_drafts
