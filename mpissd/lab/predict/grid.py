"""The durations of many jobs' rounds as arrays, and what decides the accepted tokens and hits of
their rounds: models, or a run's records.

Shapes: [G, R, b] for G jobs, R chains of rounds and their b sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.engine.law.acceptance import HitLaw
from mpissd.engine.law.fanout import key_chances
from mpissd.engine.law.tree import positional
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LAW_SEQUENCE = 1 << 29  # sequence id of LawDraws' streams; no request of a run has such a large id
# Properties of HostCosts, in a Grid's order.
_HOST = "ask_s lead_s send_s link reply_s inline_s draft_record".split()


_hit_probabilities = lru_cache(maxsize=1024)(HitLaw.hit_probabilities)


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
    # P(hit | k), [G, source, end, K+1]: after a backup or a hit; whether k is all.
    p_hit: Floats
    verify_s: Floats
    keys_s: Floats
    step_s: Floats
    most_steps: Ints
    lanes_s: Floats
    host: Floats  # [G, 7], of _HOST

    def __len__(self) -> int:
        return len(self.lookahead)

    @classmethod
    def of(
        cls, jobs: Sequence[Job], device: DeviceCosts, host: HostCosts, *, ends: bool = False
    ) -> Grid:
        """Makes the grid of jobs of one batch size on the same devices and hosts; AR has K = 0.

        ends: whether sequences may end before others of their batch.
        """
        batch = jobs[0].config.batch_size
        lookahead = np.array([job.lookahead for job in jobs], np.int64)
        backup = np.array([job.backup_lookahead for job in jobs], np.int64)
        live = np.arange(batch + 1)[:, None] if ends else np.full((1, 1), batch)
        won = np.minimum(np.arange(batch + 1), live)  # [L, b+1]
        missed = live - won
        k = np.array([job.num_nodes for job in jobs])[:, None, None]  # tokens, of all levels
        served = np.array([job.tree.ends[job.backup_lookahead] for job in jobs])[:, None, None]
        # The row counts that are compiled besides powers of two.
        full = [(batch, job.verify_rows, *filter(None, [job.prefill_rows])) for job in jobs]
        compiled = _rows_of(full)
        rows = won * (k + 1) + missed * (served + 1)
        shape = rows.shape
        verify_s = device.verify(padded(rows, compiled), compiled.max(axis=1)[:, None, None])
        keys_s, step_s, most = np.zeros(shape), np.ones(shape), np.zeros(shape, np.int64)
        lanes_s = np.zeros((len(jobs), batch + 1))
        if lookahead.any() and device.draft is not None:
            compiled = _rows_of(
                [
                    () if job.draft is None else (*rows_of_job, job.grown_rows)
                    for job, rows_of_job in zip(jobs, full, strict=True)
                ]
            )
            largest = compiled.max(axis=1)[:, None, None]
            counts = np.broadcast_to(np.arange(batch + 1), (len(jobs), 1, batch + 1))
            lanes_s = device.draft_s(padded(counts, compiled), largest)[:, 0] + host.step
            after_hit = np.array([sum(job.fan_out) for job in jobs])[:, None, None]
            after_miss = np.array([sum(job.fan_out_miss) for job in jobs])[:, None, None]
            lanes = won * after_hit + missed * after_miss
            step_s = device.draft_s(padded(np.maximum(lanes, 1), compiled), largest)
            step_s += host.step - host.joined
            for n, job in enumerate(jobs):
                if job.tree.num_lanes:  # the mean of its levels
                    at, wide = [n] * job.lookahead, np.array([len(of) for of in job.tree.inner])
                    for table, one in ((lanes_s, counts[n]), (step_s, np.maximum(lanes[n], 1))):
                        rows = padded(wide[:, None, None] * one, compiled[at])
                        mean = device.draft_s(rows, largest[at]).mean(axis=0)
                        table[n] = mean.reshape(table[n].shape) + host.step
            candidates = np.array([job.widest + 1 for job in jobs])[:, None, None]
            glue_rows = padded(live * (k + 1) + 0 * won, compiled)
            glue_s = device.glue_s(glue_rows, candidates, largest) + host.glue
            keys_s = np.where(lanes > 0, glue_s + host.keys + host.keys_lane * lanes, 0.0)
            most = np.where(lanes > 0, lookahead[:, None, None], 0)
        width = int(lookahead.max())
        hosts = np.tile([getattr(host, name) for name in _HOST], (len(jobs), 1))
        hosts[lookahead == 0, _HOST.index("inline_s")] = 0.0

        def hazards(source: Source) -> Floats:
            return _widened([job.rates(source) for job in jobs], width)

        def hit_chances(job: Job) -> Floats:
            if not job.fan_out:
                return np.zeros((2, 2, job.lookahead + 1))
            if job.layout is not None:
                return _level_chances(job)
            table = _hit_probabilities(job.hit_law, job.widest)
            return np.stack([table[:, list(fans)] for fans in (job.fan_out_miss, job.fan_out)])

        return cls(
            batch_size=batch,
            lookahead=lookahead,
            backup_lookahead=backup,
            fast=np.array([job.config.backup == "fast" for job in jobs]),
            inline=np.array([job.inline for job in jobs]) | (lookahead == 0),
            hazards=hazards(Source.CACHE),
            hazards_fast=hazards(Source.FAST),
            p_hit=_widened([hit_chances(job) for job in jobs], width + 1),
            verify_s=verify_s,
            keys_s=keys_s,
            step_s=step_s,
            most_steps=most,
            lanes_s=lanes_s,
            host=hosts,
        )

    def take(self, chosen: Any) -> Grid:
        """Returns the configurations with these indices, in that order."""
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self)[1:]}
        return Grid(self.batch_size, **arrays)

    @property
    def grows(self) -> Mask:
        """Which configurations grow branches, [G]."""
        return np.asarray(self.most_steps.any(axis=(1, 2)))


def _level_chances(job: Job) -> Floats:
    """Returns P(the outcome is a key | the path ends at level d) of trees, [source, end, K+1].

    The next round depends on the node no further, so that the mean over a level's nodes is exact.
    """
    tree, hazards = job.tree, job.acceptance[Source.CACHE].hazards
    reached = np.bincount(tree.depths, tree.chances(positional(hazards, job.hit_law, tree.width)))
    ends = reached - np.append(reached[1:], 0.0)
    parts = []
    for fans in (job.fan_out_miss, job.fan_out):
        keys = key_chances(tree, hazards, job.hit_law, max(fans))
        kept = np.bincount(tree.depths, [of[n] for of, n in zip(keys, fans, strict=True)])
        parts.append([np.divide(kept, ends, out=np.zeros_like(kept), where=ends > 0)] * 2)
    return np.array(parts)


def _rows_of(lists: Sequence[tuple[int, ...]]) -> Ints:
    """Returns the row counts of configurations as one array, [G, n]; short lists repeat one."""
    longest = max(map(len, lists))
    return np.array([(*rows, *(rows[-1:] or (1,)) * (longest - len(rows))) for rows in lists])


def _widened(parts: Any, width: int) -> Floats:
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


class Draws:
    """Decides the accepted tokens and hits of rounds; this class accepts and hits nothing."""

    chains = 1

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns k, how many of num_draft tokens each sequence's round accepts, [G, R, b].

        hit: whether a branch of the cache drafted them, or a backup.
        """
        return np.zeros_like(num_draft)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the outcomes of this round are keys of the cache, [G, R, b].

        end: whether all served tokens were accepted.
        """
        return np.zeros_like(hit)

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences round `number` decodes, of those that have not ended."""
        return live


class LawDraws(Draws):
    """Fresh draws from the imposed models; all configurations read the same uniforms.

    The draws of a sequence are spread evenly over the chains of a round (one in each R-th of [0,
    1)), so that means come out with less noise than from independent draws.
    """

    def __init__(self, grid: Grid, chains: int, seed: int = 0) -> None:
        self.chains, self._batch, self._seed, self._number = chains, grid.batch_size, seed, 0
        self._fast = grid.fast[:, None, None]
        self._reached, self._kind = _distinct(grid.hazards)
        self._reached_fast, self._kind_fast = _distinct(grid.hazards_fast)
        self._p_hit, self._width = grid.p_hit.ravel(), grid.p_hit.shape[-1]
        self._first = np.arange(len(grid))[:, None, None] * 4 * self._width

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        uniform = self._next()[None, :, :, None]
        free = (uniform < self._reached).sum(axis=3)[self._kind]
        if self._fast.any():
            other = (uniform < self._reached_fast).sum(axis=3)[self._kind_fast]
            free = np.where(hit | ~self._fast, free, other)
        return np.asarray(np.minimum(free, num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        at = self._first + (2 * hit + end) * self._width + accepted
        return np.asarray(self._next() < self._p_hit[at])

    def _next(self) -> Floats:
        """Returns the next uniforms, [R, b]."""
        self._number += 1
        return _spread(self.chains, self._batch, self._seed, self._number)


def _distinct(hazards: Floats) -> tuple[Floats, Ints]:
    """Returns P(k >= i) of the distinct rows, [n, 1, 1, K], and which of them each row is, [G]."""
    rows, kind = np.unique(hazards, axis=0, return_inverse=True)
    reached = np.cumprod(rows, axis=1, dtype=np.float64)
    return reached[:, None, None, :], np.asarray(kind.reshape(-1), np.int64)


@lru_cache(maxsize=512)
def _spread(chains: int, batch: int, seed: int, number: int) -> Floats:
    """Returns the n-th uniforms of a seed, [R, b], each column one in every R-th of [0, 1)."""
    random = np.random.Generator(np.random.Philox(key=[seed, _LAW_SEQUENCE + number]))
    order = random.permuted(np.tile(np.arange(chains)[:, None], batch), axis=0)
    return np.asarray((order + random.random((chains, batch))) / chains)


class RecordedDraws(Draws):
    """A run's recorded outcomes, round by round: the rows of RoundRecords.sequences, [n, 8].

    A round's sequences are identified only by their place in it; times depend on no more.
    """

    def __init__(self, job: Job, sequences: NDArray[np.int64]) -> None:
        rounds = sequences[:, 0]
        place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
        self.num_rounds, self._number = int(rounds.max()) + 1, 0
        shape = self.num_rounds + 1, 1, 1, job.config.batch_size  # and an empty round at the end
        self._live, self._hit = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self._accepted = np.zeros(shape, np.int64)
        at = rounds, 0, 0, place
        self._live[at], self._accepted[at] = True, sequences[:, 3]
        self._hit[at] = sequences[:, 6] > 0

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        return np.asarray(np.minimum(self._accepted[self._number], num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the next round's lookups hit; a new sequence's first one never does."""
        return np.asarray(self._hit[self._number + 1])

    def live(self, number: int, live: Mask) -> Mask:
        self._number = number
        return np.asarray(self._live[number])
