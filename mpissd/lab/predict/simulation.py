"""The one model of a round: an event simulation of the loops of `decode` [THEORY, "one round"].

Many configurations advance at once, each as several independent chains of rounds. The events of a
round, in the order in which the loops add up their durations:

    sent    the draft starts SPECULATION r                       (THEORY: R)
    keys    sent + glue + keys                                   (K: the cache can answer)
    asked   sent + link + verification + lead's work + link      (a: OUTCOME r is at the draft)
    seen    the first poll >= asked; polls come between growth steps, which are never cut short (Q)

`expect` returns long-run means, which `plan` searches; all configurations read the same draws, and
equal ones have equal means. `replay` predicts a run from its own draws, and `follow` from the
outcomes that it had. Shapes: [G, R] for G configurations and R chains, [G, R, b] for sequences.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.engine.spec.hits import HitLaw
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LAW_SEQUENCE = 1 << 29  # sequence id of LawDraws' streams; no request of a run has such a large id
_BURN_IN = 8  # first rounds of a chain, which do not count
_SETTLED = 4  # rounds after which rounds without growth are all equal
_PRECISE = 256, 64, 32  # sequences of all chains, but at least so many chains; rounds
_QUICK = 64, 16, 16  # the same, to rank many configurations
_AT_ONCE = 1 << 17  # sequences of all configurations that are simulated at once, to stay in caches
# Properties of HostCosts, in a Grid's order.
_HOST = "ask_s lead_s send_s link reply_s inline_s draft_record nap patience".split()
_FOLD = 4096  # rounds stored as separate arrays take twelve times the memory of one array


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


class Draws(ABC):
    """The source of rounds' accepted tokens and hits."""

    chains: int

    @abstractmethod
    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns k, how many of num_draft tokens each sequence's round accepts, [G, R, b].

        hit: whether a branch of the cache drafted them, or a backup.
        """

    @abstractmethod
    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the outcomes of this round are keys of the cache, [G, R, b].

        end: whether all served tokens were accepted.
        """

    def bonus(self, accepted: Ints) -> Ints:
        """Returns the bonus tokens t*, [G, R, b]; 0 if unknown."""
        return np.zeros_like(accepted)

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences round `number` decodes, of those that have not ended."""
        return live


class NoHits(Draws):
    """Rounds whose durations do not depend on what is accepted."""

    chains = 1

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        return np.zeros_like(num_draft)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        return np.zeros_like(hit)


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
        uniform = self._spread()[None, :, :, None]
        free = (uniform < self._reached).sum(axis=3)[self._kind]
        if self._fast.any():
            other = (uniform < self._reached_fast).sum(axis=3)[self._kind_fast]
            free = np.where(hit | ~self._fast, free, other)
        return np.asarray(np.minimum(free, num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        at = self._first + (2 * hit + end) * self._width + accepted
        return np.asarray(self._spread() < self._p_hit[at])

    def _spread(self) -> Floats:
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


class ReplayDraws(Draws):
    """The draws of one run (one configuration, one chain): its seed, sequences and positions."""

    chains = 1

    def __init__(self, job: Job, num_rounds: int, seed: int | None = None) -> None:
        seed = job.config.seed if seed is None else seed
        lookahead, batch = job.lookahead, job.config.batch_size
        # A sequence starts with length 1 and grows by at most K+1 a round.
        count = 2 + (num_rounds + 1) * (lookahead + 1)

        def table(purpose: Purpose) -> Floats:
            return np.array([uniforms(seed, purpose, s, 0, count) for s in range(batch)])

        self._true = (table(Purpose.TOKEN) * job.target.vocab_size).astype(np.int64)
        self._coins = table(Purpose.ACCEPT)
        uniform, law = table(Purpose.RANK), job.hit_law
        self._ranks = np.array([law.ranks(uniform, end) for end in law.ends])
        nothing = (0,) * (lookahead + 1)
        self._lists = np.array([job.fan_out_miss or nothing, job.fan_out or nothing])
        backup = Source[job.config.backup.upper()] if lookahead else Source.NONE
        sources = (backup, Source.CACHE) if lookahead else ()
        self._hazards = np.array([job.acceptance[source].hazards for source in sources])
        self._ahead, self._rows = np.arange(lookahead), np.arange(batch)
        self._length = np.ones((1, 1, batch), np.int64)

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns the leading i <= k' with U(accept) < a_i, by their drafter's acceptance rates."""
        if not len(self._ahead):
            return np.zeros_like(num_draft)
        coins = self._coins[self._rows[:, None], self._length[..., None] + self._ahead]
        good = coins < self._hazards[hit.astype(np.int64)]
        good &= self._ahead < num_draft[..., None]
        return np.asarray(np.logical_and.accumulate(good, axis=-1).sum(axis=-1), np.int64)

    def bonus(self, accepted: Ints) -> Ints:
        return np.asarray(self._true[self._rows, self._length + accepted])

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        law, at = np.minimum(end, len(self._ranks) - 1), self._length + accepted
        kept = self._lists[hit.astype(np.int64), accepted]
        self._length = at + 1
        return np.asarray(self._ranks[law, self._rows, at] <= kept)


class RecordedDraws(Draws):
    """A run's recorded outcomes, round by round: the rows of RoundRecords.sequences, [n, 8].

    A round's sequences are identified only by their place in it; times depend on no more.
    """

    chains = 1

    def __init__(self, job: Job, sequences: NDArray[np.int64]) -> None:
        rounds = sequences[:, 0]
        place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
        self.num_rounds, self._number = int(rounds.max()) + 1, 0
        shape = self.num_rounds + 1, 1, 1, job.config.batch_size  # and an empty round at the end
        self._live, self._hit = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        self._accepted, self._bonus = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        at = rounds, 0, 0, place
        self._live[at] = True
        self._accepted[at], self._bonus[at] = sequences[:, 3], sequences[:, 4]
        self._hit[at] = sequences[:, 6] > 0

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        return np.asarray(np.minimum(self._accepted[self._number], num_draft), np.int64)

    def bonus(self, accepted: Ints) -> Ints:
        return np.asarray(self._bonus[self._number])

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the next round's lookups hit; a new sequence's first one never does."""
        return np.asarray(self._hit[self._number + 1])

    def live(self, number: int, live: Mask) -> Mask:
        self._number = number
        return np.asarray(self._live[number])


class Rounds:
    """The clocks and sequences of all chains between two rounds.

    num_tokens: tokens after which a sequence ends (None: it lives on).
    """

    def __init__(self, grid: Grid, draws: Draws, num_tokens: int | None = None) -> None:
        self._grid, self._draws, self._num_tokens = grid, draws, num_tokens
        hosts = grid.host.T[:, :, None]  # each [G, 1]
        self._ask_s, self._lead_s, self._send_s, self._link_s, self._reply_s = hosts[:5]
        self._inline_s, self._record_s, self._nap_s, self._patience_s = hosts[5:]
        count, batch = len(grid), grid.batch_size
        shape = count, draws.chains, batch
        self._ends = grid.verify_s.shape[1] > 1
        self._first = np.arange(count)[:, None] * grid.verify_s[0].size
        self._lane = np.arange(count)[:, None] * (batch + 1)
        self.live: Mask = np.ones(shape, np.bool_)
        self._fresh = True  # before the first outcome; the first round is a forced miss
        self._hit: Mask = np.zeros(shape, np.bool_)  # whether outcome r-1 is a key of the cache
        self._emitted = np.zeros(shape, np.int64)
        self._clock = np.zeros(shape[:2])  # the time at which the lead has outcome r-1
        # A run's warm-up has run full rounds of hits on throw-away sequences before the first.
        full = np.full(shape[:2], batch)
        self._grown = self._place(full, full)  # of the answer whose branches grow
        self._sent = -self._lead_s - self._link_s - grid.verify_s.ravel()[self._grown]

    def _place(self, live: Ints, won: Ints) -> Ints:
        """Returns indices into the flattened tables of durations, [G, R]."""
        offset = live * (self._grid.batch_size + 1) if self._ends else 0
        return np.asarray(self._first + won + offset, np.int64)

    def advance(self, number: int) -> dict[str, NDArray[Any]]:
        """Simulates OUTCOME r-1 → SPECULATION r → verification → outcome r; returns its fields."""
        grid = self._grid
        self.live = self._draws.live(number, self.live)
        hit = self._hit & self.live
        won, live = hit.sum(axis=2), self.live.sum(axis=2)
        place = self._place(live, won)
        ready = self._clock + self._ask_s
        seen, steps = self._answer(ready, won, live, place)
        num_draft = np.where(
            hit, grid.lookahead[:, None, None], grid.backup_lookahead[:, None, None]
        )
        over = seen + grid.verify_s.ravel()[place] + self._lead_s
        accepted = self._draws.accepted(hit, num_draft)
        bonus = self._draws.bonus(accepted)
        fresh, self._fresh = self._fresh, False
        self._hit = self._draws.hits(hit, accepted, accepted == num_draft)
        round_s = np.where(self.live.any(axis=2), over - self._clock, 0.0)
        self._clock = over
        return {
            "live": self.live,
            "counted": self.live & (not fresh),
            "hit": hit,
            "num_draft": num_draft,
            "accepted": accepted,
            "bonus": bonus,
            "steps": steps,
            "wait_s": seen - ready,
            "round_s": round_s,
            "tokens": self._commit(accepted),
        }

    def _commit(self, accepted: Ints) -> Ints:
        """Adds a round's tokens to the sequences; returns those that count, [G, R]."""
        count = np.where(self.live, accepted + 1, 0)
        if self._num_tokens is not None:
            count = np.minimum(count, self._num_tokens - self._emitted)
            self._emitted += count
            self.live = self._emitted < self._num_tokens
        return np.asarray(count.sum(axis=2), np.int64)

    def _answer(self, ready: Floats, won: Ints, live: Ints, place: Ints) -> tuple[Floats, Ints]:
        """Returns (when the lead has SPECULATION r, growth steps by the time it was asked)."""
        inline = self._grid.inline[:, None]
        steps = np.zeros(ready.shape, np.int64)
        if inline.all():
            return ready + self._drafting_s(won, live, steps) + self._inline_s, steps
        noticed, steps = self._poll(self._clock + self._send_s)
        drafting_s = self._drafting_s(won, live, steps)
        self._sent, self._grown = noticed + drafting_s + self._reply_s, place
        arrived = self._sent + self._link_s
        seen = np.maximum(ready, arrived + self._found_after_s(arrived - ready))
        if inline.any():
            seen = np.where(inline, ready + drafting_s + self._inline_s, seen)
        return seen, steps

    def _poll(self, asked: Floats) -> tuple[Floats, Ints]:
        """Returns (when the draft sees the outcome, growth steps taken by then), each [G, R]."""
        grid, grown = self._grid, self._grown
        step_s, free = grid.step_s.ravel()[grown], self._sent + grid.keys_s.ravel()[grown]
        steps = steps_seen(asked - free, step_s, grid.most_steps.ravel()[grown])
        free = free + steps * step_s + self._record_s
        return np.maximum(free, asked + self._found_after_s(asked - free)), steps

    def _found_after_s(self, waited: Floats) -> Floats:
        """Returns the delay from a message's arrival until a rank that waited so long finds it.

        A rank that begins to wait after the arrival (waited ≤ 0) finds it at once: 0.
        """
        if not self._nap_s.any():
            return np.zeros(1)
        napped = (waited > self._patience_s) & (waited > 0)
        return np.where(napped, self._nap_s, 0.0)

    def _drafting_s(self, won: Ints, live: Ints, steps: Ints) -> Floats:
        """Returns the seconds of draft steps between an outcome and its answer, [G, R].

        Hits are finished and misses drafted in shared forwards: one carries all that are still
        short of tokens, then the group that needs more steps goes on.
        """
        grid, lanes_s = self._grid, self._grid.lanes_s.ravel()
        missed = live - won
        finish = np.where(won > 0, grid.lookahead[:, None] - steps, 0)
        backup = np.where(grid.fast, 0, grid.backup_lookahead)[:, None] * (missed > 0)
        shared, lane = np.minimum(finish, backup), self._lane
        apart = (finish - shared) * lanes_s[lane + won] + (backup - shared) * lanes_s[lane + missed]
        return np.asarray(shared * lanes_s[lane + live] + apart, np.float64)


def steps_seen(waited: Floats, step_s: Floats, most: Ints) -> Ints:
    """Returns the growth steps taken when an outcome is seen that arrives `waited` s after growth
    began.

    A step that has begun is finished; `most` steps end the growth.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.ceil(np.where(waited > 0, waited / step_s, 0.0))
    return np.asarray(np.minimum(steps, most), np.int64)


@dataclass(frozen=True)
class Expected:
    """Long-run means of configurations, [G]; tokens and times are of all b sequences together."""

    tok_per_s: Floats
    round_s: Floats
    tokens: Floats  # In a round.
    hit_rate: Floats
    wait_s: Floats  # The lead's wait for its speculation.


def expected(job: Job, device: DeviceCosts, host: HostCosts) -> Expected:
    """Returns the means of one job, [1]."""
    return expect(Grid.of([Config.of(job)], device, host))


def expect(grid: Grid, *, quick: bool = False) -> Expected:
    """Returns the means of every configuration, which do not depend on the others in the grid.

    At b = 1 they are of 8,192 rounds that grow branches (quick: of 1,024). Without growth all
    rounds last as long, and the means are exact.
    """
    columns = {f.name: np.zeros(len(grid)) for f in fields(Expected)}
    grows, (sequences, least, _) = grid.grows, _QUICK if quick else _PRECISE
    at_once = max(1, _AT_ONCE // max(sequences, least * grid.batch_size))
    growing, alone = np.flatnonzero(grows), np.flatnonzero(~grows)
    parts = [growing[n : n + at_once] for n in range(0, len(growing), at_once)]
    for chosen in (*parts, alone):
        if len(chosen):
            means = _simulated if len(chosen) and grows[chosen[0]] else _exact
            for name, values in means(grid.take(chosen), quick).items():
                columns[name][chosen] = values
    with np.errstate(divide="ignore"):  # inf if a round takes no time
        columns["tok_per_s"] = columns["tokens"] / columns["round_s"]
    return Expected(**columns)


def _simulated(grid: Grid, quick: bool) -> dict[str, Floats]:
    sequences, least, num_rounds = _QUICK if quick else _PRECISE
    chains = max(least, sequences // grid.batch_size)
    rounds = Rounds(grid, LawDraws(grid, chains))
    sums = {name: np.zeros(len(grid)) for name in ("tokens", "round_s", "hit", "wait_s")}
    for number in range(_BURN_IN + num_rounds):
        of_round = rounds.advance(number)
        if number >= _BURN_IN:
            for name, total in sums.items():
                total += of_round[name].reshape(len(grid), -1).sum(axis=1)
    means = {name: total / (chains * num_rounds) for name, total in sums.items()}
    means["hit_rate"] = means.pop("hit") / grid.batch_size
    return means


def _exact(grid: Grid, quick: bool) -> dict[str, Floats]:
    """Returns the means of rounds that grow nothing, of which only the tokens are random."""
    rounds = Rounds(grid, NoHits())
    for number in range(_SETTLED):
        of_round = rounds.advance(number)
    served = np.arange(grid.hazards.shape[1]) < grid.backup_lookahead[:, None]
    hazards = np.where(grid.fast[:, None], grid.hazards_fast, grid.hazards)
    tokens = 1 + np.cumprod(np.where(served, hazards, 0.0), axis=1).sum(axis=1)
    times = {name: of_round[name][:, 0] for name in ("round_s", "wait_s")}
    return {"tokens": grid.batch_size * tokens, "hit_rate": np.zeros(len(grid)), **times}


@dataclass(frozen=True)
class Prediction:
    """The rounds of one job, [rounds, R] (sequences: [rounds, R, b]); times in seconds.

    counted: live, and not a forced first miss. wait_s: the lead's wait for its speculation (the
    ledger's draft wait, the exposed draft time). steps: growth steps taken when each outcome was
    seen. t_target_s: of b(K+1) rows. t_growth_s: glue, keys and K growth steps; t_draft_s: K
    sequential steps; each None if there is none.
    """

    round_s: Floats
    wait_s: Floats
    tokens: Ints
    steps: Ints
    live: Mask
    counted: Mask
    hit: Mask
    num_draft: Ints
    accepted: Ints
    bonus: Ints
    backup: Source
    t_target_s: float
    t_draft_s: float | None
    t_growth_s: float | None

    @property
    def num_rounds(self) -> int:
        """The number of rounds of each chain."""
        return len(self.round_s)

    @property
    def tok_per_s(self) -> float:
        """Tokens over wall time, all chains together; inf if rounds take no time."""
        wall = float(self.round_s.sum())
        return float(self.tokens.sum()) / wall if wall else math.inf

    def tok_per_s_noise(self, num_rounds: int) -> float:
        """Returns the standard deviation of tok_per_s of one run with num_rounds rounds.

        It is the chains' (ratio of sums, first order); nan for one chain.
        """
        tokens, wall = self.tokens.sum(axis=0), self.round_s.sum(axis=0)
        if len(wall) < 2:
            return math.nan
        spread = float(np.std(tokens - self.tok_per_s * wall, ddof=1) / wall.mean())
        return spread * math.sqrt(self.num_rounds / num_rounds)

    @property
    def hit_rate(self) -> float | None:
        """The share of outcomes that were keys, without forced misses; None if no key was asked
        for."""
        asked = int(self.counted.sum())
        if self.t_growth_s is None or not asked:
            return None
        return float((self.hit & self.counted).sum() / asked)

    @property
    def times(self) -> dict[str, Any]:
        """The keys of a row that are the job's, whatever was drawn; None without such a part."""
        target, draft, growth = self.t_target_s, self.t_draft_s, self.t_growth_s
        return {
            "t_target_s": target,
            "t_draft_s": draft,
            "t_growth_s": growth,
            "T_SD": draft / target if draft is not None and target else None,
            "T_p": growth / target if growth is not None and target else None,
            "exposed_us": float(self.wait_s.mean()) * 1e6,
        }

    def round_us(self) -> dict[str, float | int]:
        """Returns {mean, p50, p90, p99, n} of all chains' round durations in µs, as in a result
        row."""
        us = self.round_s.ravel() * 1e6
        p50, p90, p99 = np.percentile(us, [50, 90, 99])
        mean = float(us.mean())
        return {"mean": mean, "p50": float(p50), "p90": float(p90), "p99": float(p99), "n": us.size}

    def sequences(self) -> NDArray[np.int64]:
        """The first chain's rows as RoundRecords.sequences() has them, [n, 8].

        The columns are round, id, epoch, k, t*, source, hit and num_draft.
        """
        rounds, ids = np.nonzero(self.live[:, 0])
        chosen = rounds, 0, ids
        hit = self.hit[chosen]
        source = np.where(hit, int(Source.CACHE), int(self.backup))
        columns: list[Any] = [rounds, ids, np.zeros_like(ids)]
        columns += [self.accepted[chosen], self.bonus[chosen], source, hit, self.num_draft[chosen]]
        return np.column_stack(columns).astype(np.int64)


def replay(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    num_rounds: int | None = None,
    seed: int | None = None,
) -> Prediction:
    """Predicts the run itself: the same seed gives the same k, t* and hits."""
    limit = num_rounds or job.config.max_rounds or job.config.num_tokens
    assert limit is not None, "neither rounds nor tokens end this run"
    grid = Grid.of([Config.of(job)], device, host, ends=True)
    draws = ReplayDraws(job, limit, seed)
    return _kept(job, grid, draws, limit, num_tokens=job.config.num_tokens)


def follow(
    job: Job, device: DeviceCosts, host: HostCosts, sequences: NDArray[np.int64]
) -> Prediction:
    """Predicts how long a run's rounds took, given their outcomes (RoundRecords.sequences)."""
    draws = RecordedDraws(job, sequences)
    grid = Grid.of([Config.of(job)], device, host, ends=True)
    return _kept(job, grid, draws, draws.num_rounds)


def sampled(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    *,
    chains: int = 64,
    num_rounds: int = 32,
    seed: int = 0,
) -> Prediction:
    """Returns fresh rounds under the job's imposed models, to estimate the luck of a run."""
    grid = Grid.of([Config.of(job)], device, host)
    return _kept(job, grid, LawDraws(grid, chains, seed), num_rounds, burn_in=_BURN_IN)


def _kept(
    job: Job,
    grid: Grid,
    draws: Draws,
    num_rounds: int,
    *,
    burn_in: int = 0,
    num_tokens: int | None = None,
) -> Prediction:
    """Simulates one job for every chain of `draws`, and keeps its rounds after the first ones."""
    rounds = Rounds(grid, draws, num_tokens)
    recent: list[dict[str, NDArray[Any]]] = []
    folded: list[dict[str, NDArray[Any]]] = []
    for number in range(burn_in + num_rounds):
        of_round = rounds.advance(number)
        if number >= burn_in:
            recent.append({name: value[0] for name, value in of_round.items()})
        if len(recent) == _FOLD:
            folded.append(_stacked(recent, np.array))
            recent = []
        if not rounds.live.any():
            break
    folded += [_stacked(recent, np.array)] if recent else []
    growth_s = float(grid.keys_s[0, -1, -1] + job.lookahead * grid.step_s[0, -1, -1])
    return Prediction(
        **_stacked(folded, np.concatenate),
        backup=Source[job.config.backup.upper()] if job.lookahead else Source.NONE,
        t_target_s=float(grid.verify_s[0, -1, -1]),
        t_draft_s=job.lookahead * float(grid.lanes_s[0, -1]) if job.lookahead else None,
        t_growth_s=growth_s if grid.grows[0] else None,
    )


def _stacked(parts: Sequence[dict[str, NDArray[Any]]], how: Any) -> dict[str, Any]:
    return {name: how([part[name] for part in parts]) for name in parts[0]}
