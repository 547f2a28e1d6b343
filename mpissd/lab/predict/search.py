"""The advisor's search space: every configuration of a mode on T target ranks, as `closed` cells.

A Space lists the K, fan-outs and K_b to try. FULL is the exhaustive grid; the advisor starts from
COARSE, or from ROUGH for large batches.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from mpissd.common.errors import ConfigError
from mpissd.engine.spec.fanout import resolve_fan_out
from mpissd.engine.spec.hits import HitLaw
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts
from mpissd.lab.predict.laws import MOST_LOOKAHEAD, Laws
from mpissd.lab.predict.simulation import Cells, Expected, expect, expect_ar


@dataclass(frozen=True)
class Placement:
    """T target ranks with their forwards.

    label: returns the origin of a derived choice, None if its parts were measured. hosts: the
    host's costs by (mode, D of 0 or 1); None: not known; a missing key: the search's own costs.
    most_rows: of the largest forward whose time is known well enough to advise it (None: any). A
    lookup has the host's costs of SD inline.
    """

    tp: int
    device: DeviceCosts
    num_drafts: tuple[int, ...] = (0, 1)  # The numbers of drafts for which this machine has memory.
    label: Callable[[Choice], str | None] = lambda _: None
    hosts: Mapping[tuple[str, int], HostCosts | None] = field(default_factory=dict)
    most_rows: int | None = None

    def allows(self, rows: int) -> bool:
        """Returns whether forwards of so many rows may be advised."""
        return self.most_rows is None or rows <= self.most_rows

    def host(self, method: tuple[str, int], otherwise: HostCosts) -> HostCosts:
        """Returns the host's costs of a method (mode, D), which must be known."""
        costs = self.hosts.get(_way(method), otherwise)
        assert costs is not None, method
        return costs

    def judges(self, method: tuple[str, int]) -> bool:
        """Returns whether the host's costs of a method (mode, D) are known."""
        return self.hosts.get(_way(method), HostCosts()) is not None


def _way(method: tuple[str, int]) -> tuple[str, int]:
    """Returns the (mode, D) whose host costs a method has."""
    mode, drafts = method
    return ("sd", 0) if mode == LOOKUP else (mode, min(drafts, 1))


LOOKUP = "lookup"  # SD whose drafts are looked up in the sequence itself, without a model


@dataclass(frozen=True)
class Space:
    """The values that are tried of each parameter.

    K_b: shares of K, rounded up (None: every value in 1..K). fast: whether backup=fast.
    """

    lookaheads: tuple[int, ...]
    fan_outs: tuple[str, ...]
    backup_shares: tuple[float, ...] | None = None
    fast: tuple[bool, ...] = (False, True)


def fan_outs(uniform: Iterable[int], budgets: Iterable[int]) -> tuple[str, ...]:
    """Returns uniform:F and geometric:B as --fan_out takes them."""
    return (*(f"uniform:{f}" for f in uniform), *(f"geometric:{b}" for b in budgets))


_BUDGETS = (4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)
FULL = Space(tuple(range(1, 1 + MOST_LOOKAHEAD)), fan_outs(range(1, 11), _BUDGETS))
COARSE = Space(
    (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16),
    fan_outs((1, 2, 3, 5, 9), (8, 16, 32, 64)),
    (0.0, 0.25, 0.5, 1.0),
)
ROUGH = Space(  # For large batches, because a cell's time grows with the sequences that may hit.
    (1, 2, 3, 4, 6, 8, 12, 16),
    fan_outs((1, 3, 9), (8, 24, 64)),
    (0.25, 1.0),
)


@dataclass(frozen=True)
class Choice:
    """One configuration with its expected rates; `derived` is its placement's label for it."""

    mode: str
    tp: int
    num_drafts: int
    batch_size: int
    lookahead: int
    fan_out: str | None
    backup: str
    backup_lookahead: int
    tok_per_s: float
    round_us: float
    hit_rate: float | None
    derived: str | None = None

    @property
    def gpus(self) -> int:
        """The number of GPUs, T + D."""
        return self.tp + self.num_drafts

    @property
    def tok_per_s_per_gpu(self) -> float:
        """Throughput divided by the number of GPUs."""
        return self.tok_per_s / self.gpus

    @property
    def method(self) -> tuple[str, int]:
        """(mode, D), which distinguishes SD inline from SD on a rank of its own."""
        return self.mode, self.num_drafts

    def flags(self) -> dict[str, str]:
        """Returns the flags of `mpissd run` for this choice, except pair and token models."""
        flags = {"mode": self.mode, "num_drafts": str(self.num_drafts)}
        if self.mode == LOOKUP:
            flags |= {"mode": "sd", "backup": "fast"}
        if self.mode != "ar":
            flags["lookahead"] = str(self.lookahead)
        if self.fan_out is not None:
            flags |= {"fan_out": self.fan_out, "backup": self.backup}
            flags["backup_lookahead"] = str(self.backup_lookahead)
        return flags


@dataclass(frozen=True)
class Group:
    """The cells (configurations) of one method on one placement, with their fan-outs."""

    method: tuple[str, int]
    place: Placement
    cells: Cells
    fan_out: tuple[str | None, ...]  # [G]

    def expect(self, host: HostCosts) -> Expected:
        """Computes the expectation of every cell."""
        return expect(self.cells, self.place.device, self.place.host(self.method, host))

    def best(self, host: HostCosts) -> Choice:
        """Returns the fastest cell as a choice."""
        expected = self.expect(host)
        return self.choice(int(expected.tok_per_s.argmax()), expected)

    def choice(self, index: int, expected: Expected) -> Choice:
        """Returns cell `index` as a choice."""
        cells, (mode, drafts) = self.cells, self.method
        return Choice(
            mode=mode,
            tp=self.place.tp,
            num_drafts=drafts,
            batch_size=cells.batch_size,
            lookahead=cells.lookahead,
            fan_out=self.fan_out[index],
            backup="fast" if cells.fast[index] else "jit",  # the drafter after a miss
            backup_lookahead=int(cells.backup_lookahead[index]),
            tok_per_s=float(expected.tok_per_s[index]),
            round_us=float(expected.round_s[index]) * 1e6,
            hit_rate=float(expected.hit_rate[index]) if self.fan_out[index] is not None else None,
        )


def ar_choice(place: Placement, batch: int, host: HostCosts) -> Choice:
    """Returns AR on T ranks as a choice."""
    expected = expect_ar(batch, place.device, place.host(("ar", 0), host))
    rate, round_us = float(expected.tok_per_s[0]), float(expected.round_s[0]) * 1e6
    nothing = None, "jit", 0
    return Choice("ar", place.tp, 0, batch, 0, *nothing, rate, round_us, None)


def sd_groups(
    place: Placement, laws: Laws, batch: int, lookaheads: Iterable[int]
) -> Iterator[Group]:
    """Yields SD groups inline and on a draft rank; every cell drafts all K tokens."""
    for drafts, lookahead in itertools.product(place.num_drafts, lookaheads):
        fits = lookahead <= laws.longest and place.allows(batch * (lookahead + 1))
        if fits and place.judges(("sd", drafts)):
            cells = _cells(laws, lookahead, batch, drafts, [_not_grown(lookahead)])
            yield Group(("sd", drafts), place, cells, (None,))


def lookup_groups(
    place: Placement, laws: Laws, batch: int, lookaheads: Iterable[int]
) -> Iterator[Group]:
    """Yields lookups on T ranks, whose drafts have the acceptance of a fast backup.

    Yields nothing if their acceptance is 0: each round would be one of AR with more rows.
    """
    for lookahead in lookaheads:
        fits = lookahead <= laws.longest and place.allows(batch * (lookahead + 1))
        if fits and place.judges((LOOKUP, 0)) and laws.hazards_fast[lookahead - 1][0]:
            row = replace(_not_grown(lookahead), fast=True)
            yield Group((LOOKUP, 0), place, _cells(laws, lookahead, batch, 0, [row]), (None,))


def ssd_groups(place: Placement, laws: Laws, batch: int, space: Space) -> Iterator[Group]:
    """Yields SSD groups on T + 1 GPUs, one for each K; imposed hits need only one candidate."""
    texts = space.fan_outs if laws.p_hit is None else ("uniform:1",)
    for lookahead in space.lookaheads:
        if 1 not in place.num_drafts or lookahead > laws.longest:
            continue
        if not place.judges(("ssd", 1)):
            continue
        ways = itertools.product(texts, _backups(space, lookahead), space.fast)
        rows = [
            (text, row)
            for text, backup, fast in ways
            if (row := _row(text, laws, lookahead, fast, backup)) is not None
            and place.allows(batch * max(lookahead + 1, sum(row.fan_out), sum(row.fan_out_miss)))
        ]
        if rows:
            cells = _cells(laws, lookahead, batch, 1, [row for _, row in rows])
            yield Group(("ssd", 1), place, cells, tuple(text for text, _ in rows))


def cells_of(choice: Choice, laws: Laws) -> Cells:
    """Returns the one cell of a choice that drafts."""
    way = choice.backup == "fast", choice.backup_lookahead
    row = _row(choice.fan_out, laws, choice.lookahead, *way)
    assert row is not None, choice
    return _cells(laws, choice.lookahead, choice.batch_size, choice.num_drafts, [row])


@dataclass(frozen=True)
class _Row:
    """The values of one cell's arrays: F after a hit and after a miss, K_b, and the backup."""

    fan_out: tuple[int, ...]
    fan_out_miss: tuple[int, ...]
    backup_lookahead: int
    fast: bool = False


def _not_grown(lookahead: int) -> _Row:
    """Returns the row of an SD cell, which keeps no candidate."""
    nothing = (0,) * (lookahead + 1)
    return _Row(nothing, nothing, lookahead)


def _row(text: str | None, laws: Laws, lookahead: int, fast: bool, backup: int) -> _Row | None:
    """Returns a cell's row; SD's without a fan-out, None if the models do not allow the fan-out."""
    if text is None:
        return replace(_not_grown(lookahead), fast=fast)
    hazards, hit = laws.hazards[lookahead - 1], laws.hits[lookahead - 1]
    drafted = (laws.hazards_fast[lookahead - 1] if fast else hazards)[:backup]
    fan_out = _fan_out(text, hazards, lookahead, hit)
    cut = (*drafted, *(0.0,) * (lookahead - backup))
    fan_out_miss = _fan_out(text, cut, backup, hit)
    if fan_out is None or fan_out_miss is None:
        return None
    if max(*fan_out, *fan_out_miss) > laws.most_candidates:
        return None
    return _Row(fan_out, fan_out_miss, backup, fast)


def _backups(space: Space, lookahead: int) -> Sequence[int]:
    if space.backup_shares is None:
        return range(1, lookahead + 1)
    return sorted({max(1, math.ceil(share * lookahead - 1e-9)) for share in space.backup_shares})


def _fan_out(
    text: str, hazards: tuple[float, ...], served: int, hit: HitLaw
) -> tuple[int, ...] | None:
    """Returns F_0..F_K as `run` resolves them after `served` tokens; None if it is impossible."""
    reached = len(hazards)
    if text.startswith("geometric") and not hit.p_hit:
        # Positions after a rate of 0 keep nothing, so they are cut off and the cached result is
        # shared.
        while reached and not hazards[reached - 1]:
            reached -= 1
    resolved = _resolved(text, hazards[:reached], min(served, reached + 1), hit)
    return None if resolved is None else (*resolved, *(0,) * (len(hazards) - reached))


@lru_cache(maxsize=4096)
def _resolved(
    text: str, hazards: tuple[float, ...], served: int, hit: HitLaw
) -> tuple[int, ...] | None:
    try:
        minimum = 1 if hit.p_hit else 0
        powers = hit.powers(len(hazards), served)
        return resolve_fan_out(text, len(hazards), hazards, *powers, minimum=minimum)
    except ConfigError:  # The budget is too small, or no candidate hits.
        return None


def _cells(laws: Laws, lookahead: int, batch: int, drafts: int, rows: Sequence[_Row]) -> Cells:
    fans, fans_miss = (
        np.array([getattr(row, name) for row in rows]) for name in ("fan_out", "fan_out_miss")
    )  # [G, K+1]
    chance = laws.hits[lookahead - 1].hit_probabilities(int(max(fans.max(), fans_miss.max())))
    return Cells(
        lookahead=lookahead,
        batch_size=batch,
        inline=drafts == 0,
        hazards=_repeat(laws.hazards[lookahead - 1], len(rows)),
        hazards_fast=_repeat(laws.hazards_fast[lookahead - 1], len(rows)),
        p_hits=chance[:, fans].swapaxes(0, 1),
        p_hits_miss=chance[:, fans_miss].swapaxes(0, 1),
        branches=fans.sum(axis=1),
        branches_miss=fans_miss.sum(axis=1),
        candidates=1 + np.maximum(fans.max(axis=1), fans_miss.max(axis=1)),
        fast=np.array([row.fast for row in rows]),
        backup_lookahead=np.array([row.backup_lookahead for row in rows]),
    )


def _repeat(hazards: Sequence[float], count: int) -> Floats:
    return np.tile(np.array(hazards, np.float64), (count, 1))
