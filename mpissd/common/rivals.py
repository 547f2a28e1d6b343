"""The uses of G GPUs that a method must beat: one definition for `plan`, `compare` and figures.

A *use* is a mode on T target ranks and D draft ranks with its tok/s at its own best K. On G GPUs
SSD (T + D = G) must beat, for the same sequences:

    AR T, SD inline T, lookup T, suffix T    no draft GPU
    SD T D                                   a draft GPU of its own

T is every number of ranks that a target can be divided into, evenly or not (tps_of). A lookup and a
suffix automaton draft without a model. If acceptance is imposed, both have the acceptance that
SSD's own lookup backup may assume (acceptance_fast, .3 by default), so they are one use; for text
or a recording, both must be measured.

If the throughput of a use that would fit is unknown, the comparison gives no verdict: that use is
named, and no use is called the best.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model

LOOKUPS = ("lookup", "suffix")
WORTH = 1.05  # the least gain that counts as one: a smaller one is not worth a rank
TREE = "tree"  # SD whose drafts are trees: a use if it is measured, or if `plan` weighs it


@dataclass(frozen=True, order=True)
class Family:
    """Key of the uses that share mode, T and D and differ in K.

    mode: ar, sd, ssd, or a kind of lookup (SD whose drafts are looked up), such as LOOKUPS.
    """

    mode: str
    tp: int
    num_drafts: int

    @property
    def gpus(self) -> int:
        """The number of GPUs, T + D."""
        return self.tp + self.num_drafts

    @property
    def name(self) -> str:
        """The name without T and D: AR, SD inline, lookup, SD."""
        if self.mode not in ("ar", "sd", "ssd"):
            return self.mode
        return self.mode.upper() + " inline" * (self.mode == "sd" and not self.num_drafts)

    def __str__(self) -> str:
        """Returns the name in tables and messages: AR T=2, SD inline T=2, SD T=1 D=1."""
        return f"{self.name} T={self.tp}" + f" D={self.num_drafts}" * bool(self.num_drafts)


def widest(
    gpus: int, tps: Collection[int], lookups: Sequence[str] = LOOKUPS[:1]
) -> tuple[Family, ...]:
    """Returns the families that rows must hold before one use is called the best.

    These are AR, SD inline, lookups, SD and SSD, each on the largest T that fits. lookups: lookups
    that count as uses, one if acceptance is imposed and two for text. A smaller T reads more bytes
    a rank; such rows count if they exist, but are not required.
    """
    whole, less = (max((t for t in tps if t <= gpus - d), default=0) for d in (0, 1))
    possible = [Family(mode, whole, 0) for mode in ("ar", "sd", *lookups)]
    possible += [Family(mode, less, 1) for mode in ("sd", "ssd")]
    return tuple(family for family in possible if family.tp)


def tps_of(target: str, most: int) -> tuple[int, ...]:
    """Returns every T up to `most` into which a target can be divided, judged by its name.

    Whole transformers divide their heads and columns unevenly where they must (70B on three GPUs);
    each rank needs a KV head. For an unknown name every T is returned.
    """
    try:
        heads = resolve_model(target).num_kv_heads
    except ConfigError:
        heads = most
    return tuple(range(1, min(most, heads) + 1))


def between(tp: int, low: tuple[int, float], high: tuple[int, float]) -> float:
    """Returns the seconds of a forward on T ranks by (T, seconds) below and above.

    It takes a + c/T, as if all shares were of equal size.
    """
    (few, slow), (many, fast) = low, high
    return fast + (1 / tp - 1 / many) / (1 / few - 1 / many) * (slow - fast)
