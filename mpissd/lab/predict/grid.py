"""Configurations as the simulation reads them, and the durations of their rounds as arrays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.engine.spec.acceptance import HitLaw
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

# Properties of HostCosts, in a Grid's order.
_HOST = "ask_s lead_s send_s link reply_s inline_s draft_record nap patience".split()


@dataclass(frozen=True)
class Config:
    """What the simulation reads of a configuration. AR has K = 0.

    hazards: acceptance rates of cached and JIT tokens, K of them; hazards_fast: of looked-up ones.
    fan_out, fan_out_miss: F_0..F_K after a hit and after a backup; empty if nothing grows.
    target_rows, draft_rows: the row counts that are compiled besides powers of two.
    """

    lookahead: int
    batch_size: int
    inline: bool
    hazards: tuple[float, ...]
    hazards_fast: tuple[float, ...]
    fan_out: tuple[int, ...]
    fan_out_miss: tuple[int, ...]
    hit_law: HitLaw
    backup_lookahead: int
    fast: bool
    target_rows: tuple[int, ...]
    draft_rows: tuple[int, ...]

    @classmethod
    def of(cls, job: Job) -> Config:
        """Makes the configuration of a job."""
        laws = job.acceptance
        cached, fast = (
            tuple(laws[source].hazards) if job.lookahead else ()
            for source in (Source.CACHE, Source.FAST)
        )
        rows = job.config.batch_size, job.verify_rows, *(job.prefill_rows,) * bool(job.prefill_rows)
        return cls(
            lookahead=job.lookahead,
            batch_size=job.config.batch_size,
            inline=job.inline,
            hazards=cached,
            hazards_fast=fast,
            fan_out=tuple(job.fan_out),
            fan_out_miss=tuple(job.fan_out_miss),
            hit_law=job.hit_law,
            backup_lookahead=job.backup_lookahead,
            fast=job.config.backup == "fast",
            target_rows=rows,
            draft_rows=() if job.draft is None else (*rows, job.group_lanes),
        )

    @property
    def widest(self) -> int:
        """The most candidates of a row."""
        return max((*self.fan_out, *self.fan_out_miss), default=0)

    @property
    def most_rows(self) -> int:
        """The rows of the largest forward."""
        return max(*self.target_rows, *self.draft_rows, 1)

    def hit_chances(self) -> Floats:
        """Returns P(hit | k), [source, end, K+1]: after a backup or a hit; whether k is all."""
        lists = (self.fan_out_miss, self.fan_out)
        if not self.fan_out:
            return np.zeros((2, 2, self.lookahead + 1))
        table = _chances(self.hit_law, self.widest)
        return np.stack([table[:, list(fans)] for fans in lists])


@lru_cache(maxsize=1024)
def _chances(law: HitLaw, widest: int) -> Floats:
    return law.hit_probabilities(widest)


@dataclass(frozen=True)
class Grid:
    """G configurations of one batch size with the durations of their rounds, in seconds.

    Tables are indexed by the numbers of live sequences and of hits among them: [G, L, b+1] with L =
    b+1, or L = 1 if all sequences live on. most_steps: K where branches grow, 0 elsewhere. lanes_s:
    a draft step of 0..b sequences, [G, b+1].
    """

    batch_size: int
    lookahead: Ints  # [G], and so on
    backup_lookahead: Ints
    fast: Mask
    inline: Mask  # or without a draft
    hazards: Floats  # [G, K], 0 beyond a configuration's own K
    hazards_fast: Floats
    p_hit: Floats  # [G, 2, 2, K+1], Config.hit_chances
    verify_s: Floats
    keys_s: Floats
    step_s: Floats
    most_steps: Ints
    lanes_s: Floats
    host: Floats  # [G, 9], of _HOST

    def __len__(self) -> int:
        return len(self.lookahead)

    @classmethod
    def of(
        cls,
        configs: Sequence[Config],
        device: DeviceCosts,
        host: HostCosts,
        *,
        ends: bool = False,
    ) -> Grid:
        """Makes the grid of configurations on the same devices and hosts.

        ends: whether sequences may end before others of their batch.
        """
        batch = configs[0].batch_size
        lookahead, backup = (
            np.array([getattr(c, name) for c in configs], np.int64)
            for name in ("lookahead", "backup_lookahead")
        )
        live = np.arange(batch + 1)[:, None] if ends else np.full((1, 1), batch)
        won = np.minimum(np.arange(batch + 1), live)  # [L, b+1]
        missed = live - won
        k, served = lookahead[:, None, None], backup[:, None, None]
        compiled = _rows_of([c.target_rows for c in configs])
        rows = won * (k + 1) + missed * (served + 1)
        shape = rows.shape
        verify_s = device.verify(padded(rows, compiled), compiled.max(axis=1)[:, None, None])
        keys_s, step_s, most = np.zeros(shape), np.ones(shape), np.zeros(shape, np.int64)
        lanes_s = np.zeros((len(configs), batch + 1))
        if lookahead.any() and device.draft is not None:
            compiled = _rows_of([c.draft_rows for c in configs])
            largest = compiled.max(axis=1)[:, None, None]
            counts = np.broadcast_to(np.arange(batch + 1), (len(configs), 1, batch + 1))
            lanes_s = device.draft_s(padded(counts, compiled), largest)[:, 0] + host.step
            after_hit, after_miss = (
                np.array([sum(getattr(c, name)) for c in configs])[:, None, None]
                for name in ("fan_out", "fan_out_miss")
            )
            lanes = won * after_hit + missed * after_miss
            step_s = device.draft_s(padded(np.maximum(lanes, 1), compiled), largest) + host.step
            candidates = np.array([c.widest + 1 for c in configs])[:, None, None]
            glue_rows = padded(live * (k + 1) + 0 * won, compiled)
            glue_s = device.glue_s(glue_rows, candidates, largest) + host.glue
            keys_s = np.where(lanes > 0, glue_s + host.keys + host.keys_lane * lanes, 0.0)
            most = np.where(lanes > 0, k, 0)
        width = int(lookahead.max())
        hosts = np.tile([getattr(host, name) for name in _HOST], (len(configs), 1))
        hosts[lookahead == 0, _HOST.index("inline_s")] = 0.0
        return cls(
            batch_size=batch,
            lookahead=lookahead,
            backup_lookahead=backup,
            fast=np.array([c.fast for c in configs]),
            inline=np.array([c.inline for c in configs]) | (lookahead == 0),
            hazards=_padded([c.hazards for c in configs], width),
            hazards_fast=_padded([c.hazards_fast for c in configs], width),
            p_hit=_padded([c.hit_chances() for c in configs], width + 1),
            verify_s=verify_s,
            keys_s=keys_s,
            step_s=step_s,
            most_steps=most,
            lanes_s=lanes_s,
            host=hosts,
        )

    @classmethod
    def joined(cls, grids: Sequence[Grid]) -> Grid:
        """Returns one grid of all configurations, in order; all have one batch size."""
        width = max(grid.hazards.shape[1] for grid in grids)
        arrays: dict[str, Any] = {}
        for field in fields(cls)[1:]:
            parts = [getattr(grid, field.name) for grid in grids]
            if field.name in ("hazards", "hazards_fast", "p_hit"):
                longest = width + (field.name == "p_hit")
                parts = [_padded(part, longest) for part in parts]
            arrays[field.name] = np.concatenate(parts)
        return cls(grids[0].batch_size, **arrays)

    def take(self, chosen: Any) -> Grid:
        """Returns the configurations with these indices, in that order."""
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self)[1:]}
        return Grid(self.batch_size, **arrays)

    @property
    def grows(self) -> Mask:
        """Which configurations grow branches, [G]."""
        return np.asarray(self.most_steps.any(axis=(1, 2)))


def _rows_of(lists: Sequence[tuple[int, ...]]) -> Ints:
    """Returns the row counts of configurations as one array, [G, n]; short lists repeat one."""
    longest = max(map(len, lists))
    return np.array([(*rows, *(rows[-1:] or (1,)) * (longest - len(rows))) for rows in lists])


def _padded(parts: Iterable[Any], width: int) -> Floats:
    """Returns arrays as one, [G, …, width], with zeros after the last of each."""
    arrays = [np.asarray(part, np.float64) for part in parts]
    out = np.zeros((len(arrays), *arrays[0].shape[:-1], width))
    for row, array in zip(out, arrays, strict=True):
        row[..., : array.shape[-1]] = array
    return out


def padded(rows: Ints, compiled: Ints) -> Ints:
    """Returns the smallest compiled row count that holds each of `rows` [G, …] (job.buckets).

    compiled: [G, n], those besides the powers of two below the largest.
    """
    rows = np.asarray(rows)
    columns = compiled.T.reshape(compiled.shape[1], -1, *(1,) * (rows.ndim - 1))
    powers = 2 ** np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)
    largest = columns.max(axis=0)
    held = np.where(powers < largest, powers, largest)
    for column in columns:
        held = np.where((column >= rows) & (column < held), column, held)
    return np.asarray(np.maximum(held, rows), np.int64)
