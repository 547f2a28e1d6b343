"""The one model of a round: an event simulation of the loops of `decode` [THEORY, "one round"].

Many configurations (cells) advance at once, each as several independent chains of rounds. The
events of a round, in the order in which the loops add up their durations:

    sent    the draft starts SPECULATION r                       (THEORY: R)
    keys    sent + glue + keys                                   (K: the cache can answer)
    asked   sent + link + verification + lead's work + link      (a: OUTCOME r is at the draft)
    seen    the first poll >= asked; polls come between growth steps, which are never cut short (Q)

`expect` returns the long-run means of cells, which `plan` searches; `replay` predicts a run from
its own draws, and `follow` from the outcomes that it had. Shapes: [G, R] for G cells and R chains,
[G, R, b] for their sequences.
"""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.job import Job, buckets
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LAW_SEQUENCE = 1 << 29  # sequence id of LawDraws' streams; no request of a run has such a large id
_BURN_IN = 8  # first rounds of a chain, which do not count
_WITHOUT_GROWTH = 1, 8  # the same, and the rounds that count, if no round depends on another
_FEW_CELLS = 256, 64, 32  # sequences of all chains, but at least so many chains; rounds
_MANY_CELLS = 64, 16, 16  # the same; cells share draws, so that few suffice
_MANY = 4  # cells from which on these numbers hold
_FOLD = 4096  # rounds stored as separate arrays take twelve times the memory of one array


@dataclass(frozen=True)
class Cells:
    """G configurations with one draft model and equal K, b and place of the draft.

    branches: ΣF, 0 in SD. p_hits: P(hit | k accepted) if not all, or all, served tokens were
    accepted. hazards: acceptance rates of cached and JIT tokens. *_miss: after a prefix that a
    backup drafted. AR has K = 0.
    """

    lookahead: int
    batch_size: int
    inline: bool
    hazards: Floats  # [G, K]
    hazards_fast: Floats  # [G, K]
    p_hits: Floats  # [G, 2, K+1]
    p_hits_miss: Floats  # [G, 2, K+1]
    branches: Ints  # [G]
    branches_miss: Ints  # [G]
    candidates: Ints  # [G], ids that a glue reads out of each row
    backup_lookahead: Ints  # [G]
    fast: Mask  # [G]

    def __len__(self) -> int:
        return len(self.branches)

    @property
    def draft_rows(self) -> Ints:
        """Rows of the largest draft forward, [G]: the glue's (scoring), or all branches'."""
        lanes = np.maximum(self.branches, self.branches_miss)
        return np.asarray(self.batch_size * np.maximum(self.lookahead + 1, lanes), np.int64)

    @classmethod
    def of(cls, job: Job) -> Cells:
        """Makes the one configuration of a job."""
        nothing = (0,) * (job.lookahead + 1)
        fan_out, fan_out_miss = job.fan_out or nothing, job.fan_out_miss or nothing
        hazards = hazards_fast = np.zeros((1, 0))
        chance = np.zeros((2, 1))
        if job.lookahead:
            chance = job.hit_law.hit_probabilities(job.fan_outs.widest)
            hazards, hazards_fast = (
                np.array([job.acceptance[source].hazards]) for source in (Source.CACHE, Source.FAST)
            )
        return cls(
            lookahead=job.lookahead,
            batch_size=job.config.batch_size,
            inline=job.inline,
            hazards=hazards,
            hazards_fast=hazards_fast,
            p_hits=chance[None, :, fan_out],
            p_hits_miss=chance[None, :, fan_out_miss],
            branches=np.array([sum(fan_out)]),
            branches_miss=np.array([sum(fan_out_miss)]),
            candidates=np.array([job.widest + 1]),
            backup_lookahead=np.array([job.backup_lookahead]),
            fast=np.array([job.config.backup == "fast"]),
        )

    def take(self, chosen: Ints) -> Cells:
        """Returns the configurations with indices `chosen`, in that order."""
        kept = {"lookahead", "batch_size", "inline"}
        arrays = {f.name: getattr(self, f.name)[chosen] for f in fields(self) if f.name not in kept}
        return Cells(self.lookahead, self.batch_size, self.inline, **arrays)


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


class LawDraws(Draws):
    """Fresh draws from the imposed models of cells; all cells read the same draws.

    The draws of a sequence are spread evenly over the chains of a round (one in each R-th of [0,
    1)), so that means come out with less noise than from independent draws.
    """

    def __init__(self, cells: Cells, chains: int, seed: int = 0) -> None:
        self.chains, self._cells, self._seed, self._number = chains, cells, seed, 0
        same = len(cells) > 0 and all(
            (rates == rates[0]).all() for rates in (cells.hazards, cells.hazards_fast)
        )
        rows = slice(0, 1) if same else slice(None)
        self._reached, self._reached_fast = (
            np.cumprod(rates[rows], axis=1, dtype=np.float64)
            for rates in (cells.hazards, cells.hazards_fast)
        )
        chance = np.stack([cells.p_hits_miss, cells.p_hits], axis=1)  # [G, source, end, K+1]
        self._chance, self._first = chance.ravel(), np.arange(len(cells))[:, None, None] * 4

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        uniform = self._spread()[None, :, :, None]

        def leading(reached: NDArray[np.floating[Any]]) -> Ints:
            """Returns k without a limit: how many i have P(k >= i) above the draw."""
            return np.asarray((uniform < reached[:, None, None, :]).sum(axis=3), np.int64)

        free = leading(self._reached)
        fast = self._cells.fast
        if fast.any():
            other = leading(self._reached_fast)
            free = np.where(hit | ~fast[:, None, None], free, other)
        return np.minimum(free, num_draft)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        at = (self._first + 2 * hit + end) * (self._cells.lookahead + 1) + accepted
        return np.asarray(self._spread() < self._chance[at])

    def _spread(self) -> Floats:
        """Returns the next uniforms, [R, b]."""
        self._number += 1
        return _spread(self.chains, self._cells.batch_size, self._seed, self._number)


@lru_cache(maxsize=512)
def _spread(chains: int, batch: int, seed: int, number: int) -> Floats:
    """Returns the n-th uniforms of a seed, [R, b], each column one in every R-th of [0, 1)."""
    random = np.random.Generator(np.random.Philox(key=[seed, _LAW_SEQUENCE + number]))
    order = random.permuted(np.tile(np.arange(chains)[:, None], batch), axis=0)
    return np.asarray((order + random.random((chains, batch))) / chains)


class ReplayDraws(Draws):
    """The draws of one run (one cell, one chain): the same seed, sequences and positions."""

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
    """A run's recorded outcomes, round by round.

    A round's sequences are identified only by their place in it; times depend on no more.
    """

    def __init__(self, job: Job, sequences: NDArray[np.int64], *, apart: bool = False) -> None:
        """Takes the rows of RoundRecords.sequences, [n, 8].

        apart: each sequence of a run with b = 1 becomes a chain of its own, in the order of their
        ids, so that all of them are followed at once.
        """
        batch = job.config.batch_size
        assert not apart or batch == 1, batch
        rounds, chain, place = _apart(sequences) if apart else _together(sequences)
        self.chains, self.num_rounds = int(chain.max()) + 1, int(rounds.max()) + 1
        shape = self.num_rounds + 1, 1, self.chains, batch  # and an empty round after the last one
        at = rounds, np.zeros_like(chain), chain, place
        self._live: Mask = np.zeros(shape, np.bool_)
        self._hit: Mask = np.zeros(shape, np.bool_)
        self._accepted, self._bonus = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._live[at] = True
        self._accepted[at], self._bonus[at] = sequences[:, 3], sequences[:, 4]
        self._hit[at] = sequences[:, 6] > 0
        self._number = 0

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


def _together(sequences: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """Returns (round, chain 0, place in the round) of each row."""
    rounds = sequences[:, 0]
    place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
    return rounds, np.zeros_like(rounds), place


def _apart(sequences: NDArray[np.int64]) -> tuple[Ints, Ints, Ints]:
    """Returns (round since the sequence began, its chain, place 0) of each row."""
    first, chain = np.unique(sequences[:, 1], return_index=True, return_inverse=True)[1:]
    chain = chain.reshape(-1)
    return sequences[:, 0] - sequences[first[chain], 0], chain, np.zeros_like(chain)


class Rounds:
    """The clocks and sequences of all chains between two rounds.

    held: the row counts that the draft computes (None: any), as a job's buckets are; the device's
    kernels are those that the cells' own row counts select.
    """

    def __init__(
        self,
        cells: Cells,
        device: DeviceCosts,
        host: HostCosts,
        draws: Draws,
        held: Sequence[int] | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self.cells, self.host = cells, host
        self._device, self._draws, self._held = device, draws, held
        self._num_tokens = num_tokens
        lookahead, batch = cells.lookahead, cells.batch_size
        shape = len(cells), draws.chains, batch
        full = batch * (lookahead + 1)
        rows = in_buckets(buckets(batch, full), np.arange(full + 1))
        self.verify_s = device.verify_s(rows)
        self.glue_s, self.lanes_s = np.zeros((len(cells), batch + 1)), np.zeros(batch + 1)
        if lookahead and device.draft is not None:
            live = np.arange(batch + 1)
            own = buckets(batch, full) if held is None else held
            self.lanes_s = device.draft_s(in_buckets(own, live)) + host.step
            glues = in_buckets(own, live * (lookahead + 1))
            known = {n: device.glue_s(glues, n) for n in {*cells.candidates.tolist()}}
            self.glue_s = np.array([known[n] for n in cells.candidates.tolist()]) + host.glue
        self._cell = np.arange(len(cells))[:, None]
        self.live: Mask = np.ones(shape, np.bool_)
        self._fresh = True  # before the first outcome; the first round is a forced miss
        self._hit: Mask = np.zeros(shape, np.bool_)  # whether outcome r-1 is a key of the cache
        self._emitted = np.zeros(shape, np.int64)
        self._clock = np.zeros(shape[:2])  # the time at which the lead has outcome r-1
        # A run's warm-up has run full rounds on throw-away sequences before the first round.
        self._sent = np.full(shape[:2], -host.lead_s - host.link - self.verify_s[-1])
        self._growing = np.full(shape[:2], batch)  # sequences that grow since `_sent`
        self._lanes = np.broadcast_to(batch * cells.branches[:, None], shape[:2])

    def advance(self, number: int) -> dict[str, NDArray[Any]]:
        """Simulates OUTCOME r-1 → SPECULATION r → verification → outcome r; returns its fields."""
        self.live = self._draws.live(number, self.live)
        hit = self._hit & self.live
        seen, num_draft, steps = self._answer(hit)
        rows = np.where(self.live, num_draft + 1, 0).sum(axis=2)
        over = seen + self.verify_s[rows] + self.host.lead_s
        accepted = self._draws.accepted(hit, num_draft)
        bonus = self._draws.bonus(accepted)
        fresh, self._fresh = self._fresh, False
        self._hit = self._draws.hits(hit, accepted, accepted == num_draft)
        round_s = np.where(self.live.any(axis=2), over - self._clock, 0.0)
        wait_s = seen - self._clock - self.host.ask_s
        self._clock = over
        return {
            "live": self.live,
            "counted": self.live & (not fresh),
            "hit": hit,
            "num_draft": num_draft,
            "accepted": accepted,
            "bonus": bonus,
            "steps": steps,
            "wait_s": wait_s,
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

    def _answer(self, hit: Mask) -> tuple[Floats, Ints, Ints]:
        """Returns (when the lead has SPECULATION r, its tokens k' [G, R, b], growth steps)."""
        cells, host = self.cells, self.host
        ready = self._clock + host.ask_s
        steps = np.zeros(ready.shape, np.int64)
        if cells.lookahead == 0:
            return ready, np.zeros(hit.shape, np.int64), steps
        won, live = hit.sum(axis=2), self.live.sum(axis=2)
        if cells.inline:
            seen = ready + self._drafting_s(won, live, steps) + host.draft_s + host.draft_record
            return seen, self._num_draft(hit), steps
        noticed, steps = self._poll(self._clock + host.lead_send + host.link)
        self._sent = noticed + self._drafting_s(won, live, steps) + host.reply_s
        self._growing = live
        self._lanes = won * cells.branches[:, None] + (live - won) * cells.branches_miss[:, None]
        arrived = self._sent + host.link
        arrived = arrived + found_after_s(arrived - ready, host)
        return np.maximum(ready, arrived), self._num_draft(hit), steps

    def _poll(self, asked: Floats) -> tuple[Floats, Ints]:
        """Returns (when the draft sees the outcome, growth steps taken by then), each [G, R]."""
        host, lanes, free = self.host, self._lanes, self._sent
        steps = np.zeros(asked.shape, np.int64)
        if self.cells.branches.any() or self.cells.branches_miss.any():
            rows = np.maximum(lanes, 1)
            if self._held is not None:
                rows = np.asarray(self._held)[np.searchsorted(self._held, rows)]
            grows, step_s = lanes > 0, self._device.draft_s(rows) + host.step
            keys = self.glue_s[self._cell, self._growing] + host.keys + host.keys_lane * lanes
            free = free + np.where(grows, keys, 0.0)
            steps = np.where(grows, steps_seen(asked - free, step_s, self.cells.lookahead), 0)
            free = free + np.where(grows, steps * step_s, 0.0)
        free = free + host.draft_record
        return np.maximum(free, asked + found_after_s(asked - free, host)), steps

    def _drafting_s(self, won: Ints, live: Ints, steps: Ints) -> Floats:
        """Returns the seconds of draft steps between an outcome and its answer, [G, R].

        Hits are finished and misses drafted in shared forwards: one carries all that are still
        short of tokens, then the group that needs more steps goes on.
        """
        cells, lanes_s = self.cells, self.lanes_s
        missed = live - won
        finish = np.where(won > 0, cells.lookahead - steps, 0)
        most = np.where(cells.fast, 0, cells.backup_lookahead)[:, None]
        backup = np.where(missed > 0, most, 0)
        shared = np.minimum(finish, backup)
        apart = (finish - shared) * lanes_s[won] + (backup - shared) * lanes_s[missed]
        return np.asarray(shared * lanes_s[live] + apart, np.float64)

    def _num_draft(self, hit: Mask) -> Ints:
        """Returns k' of every sequence: K for hits, K_b for misses."""
        return np.where(hit, self.cells.lookahead, self.cells.backup_lookahead[:, None, None])


def in_buckets(held: Sequence[int], rows: Ints) -> Ints:
    """Returns the smallest bucket that holds each row count."""
    return np.array([held[bisect.bisect_left(held, n)] for n in rows.tolist()], np.int64)


def steps_seen(waited: Floats, step_s: Floats, lookahead: int) -> Ints:
    """Returns the growth steps taken when an outcome is seen that arrives `waited` s after growth
    began.

    A step that has begun is finished; K steps end the growth.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.ceil(np.where(waited > 0, waited / step_s, 0.0))
    return np.asarray(np.minimum(steps, lookahead), np.int64)


def found_after_s(waited: Floats, host: HostCosts) -> Floats:
    """Returns the delay from a message's arrival until a rank that has `waited` seconds finds it.

    A rank that begins to wait after the arrival (waited ≤ 0) finds it at once: 0.
    """
    return np.where(waited > host.patience, host.nap, 0.0) * (waited > 0)


@dataclass(frozen=True)
class Expected:
    """Long-run means of cells, [G]; tokens and times are of all b sequences together."""

    tok_per_s: Floats
    round_s: Floats
    tokens: Floats  # In a round.
    hit_rate: Floats
    wait_s: Floats  # The lead's wait for its speculation.


def expected(job: Job, device: DeviceCosts, host: HostCosts) -> Expected:
    """Returns the means of one job, [1]."""
    return expect(Cells.of(job), device, host)


def expect_ar(batch: int, device: DeviceCosts, host: HostCosts) -> Expected:
    """Returns AR's round of b rows, [1]; nothing in it is random."""
    round_s = host.ask_s + host.lead_s + device.verify.in_job(batch)([batch])
    tokens, none = np.full(1, float(batch)), np.zeros(1)
    return Expected(_rate(tokens, round_s), round_s, tokens, none, none)


def expect(
    cells: Cells, device: DeviceCosts, host: HostCosts, *, precise: bool = False
) -> Expected:
    """Returns the means of every cell, with the kernels that its own row counts select.

    At b = 1 few cells are simulated for 8,192 rounds each, many for 1,024 unless `precise`.
    """
    if not cells.lookahead:
        return expect_ar(cells.batch_size, device, host)
    widths = cells.batch_size * (cells.lookahead + 1)
    if device.draft is None or device.draft.few is None:
        known = replace(device, verify=device.verify.in_job(widths))
        return _expect(cells, known, host, precise=precise)
    is_few = cells.draft_rows <= device.draft.few_rows
    columns = {f.name: np.zeros(len(cells)) for f in fields(Expected)}
    for chosen in (np.flatnonzero(is_few), np.flatnonzero(~is_few)):
        if len(chosen):
            part = cells.take(chosen)
            known = device.in_job(widths, int(part.draft_rows.max()))
            for name, values in vars(_expect(part, known, host, precise=precise)).items():
                columns[name][chosen] = values
    return Expected(**columns)


def _expect(cells: Cells, device: DeviceCosts, host: HostCosts, *, precise: bool) -> Expected:
    """Returns the means of cells whose forwards use one kernel."""
    few = precise or len(cells) < _MANY
    sequences, least, num_rounds = _FEW_CELLS if few else _MANY_CELLS
    chains, skipped = max(least, sequences // cells.batch_size), _BURN_IN
    if not (cells.branches.any() or cells.branches_miss.any()):
        skipped, num_rounds = _WITHOUT_GROWTH
    rounds = Rounds(cells, device, host, LawDraws(cells, chains))
    sums = {name: np.zeros(len(cells)) for name in ("tokens", "round_s", "hit", "wait_s")}
    for number in range(skipped + num_rounds):
        of_round = rounds.advance(number)
        if number >= skipped:
            for name, total in sums.items():
                total += of_round[name].reshape(len(cells), -1).sum(axis=1)
    count = chains * num_rounds
    tokens, round_s, hits, wait_s = (total / count for total in sums.values())
    return Expected(_rate(tokens, round_s), round_s, tokens, hits / cells.batch_size, wait_s)


def _rate(tokens: Floats, round_s: Floats) -> Floats:
    """Returns tok/s; inf if a round takes no time."""
    with np.errstate(divide="ignore"):
        return np.asarray(tokens / round_s, np.float64)


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
    def tok_per_s_error(self) -> float:
        """Standard error of tok_per_s, from the spread of the chains; nan for one chain."""
        return self.tok_per_s_noise(self.num_rounds) / math.sqrt(self.round_s.shape[1])

    @property
    def hit_rate(self) -> float | None:
        """The share of outcomes that were keys, without forced misses; None if no key was asked
        for."""
        asked = int(self.counted.sum())
        if self.t_growth_s is None or not asked:
            return None
        return float((self.hit & self.counted).sum() / asked)

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a sequence and round, including the bonus token."""
        return float(self.accepted[self.live].mean() + 1)

    @property
    def exposed_s(self) -> float:
        """The lead's mean wait for its speculation in a round."""
        return float(self.wait_s.mean())

    @property
    def T_p(self) -> float | None:
        """Growth time over verification time [THEORY: (G − R)/t_T]."""
        if self.t_growth_s is None or not self.t_target_s:
            return None
        return self.t_growth_s / self.t_target_s

    def round_us(self) -> dict[str, float | int]:
        """Returns {mean, p50, p90, p99, n} of all chains' round durations in µs, as in a result
        row."""
        us = self.round_s.ravel() * 1e6
        p50, p90, p99 = np.percentile(us, [50, 90, 99])
        mean = float(us.mean())
        return {"mean": mean, "p50": float(p50), "p90": float(p90), "p99": float(p99), "n": us.size}

    def sequences(self, chain: int = 0) -> NDArray[np.int64]:
        """Returns one chain's rows as RoundRecords.sequences() has them, [n, 8].

        The columns are round, id, epoch, k, t*, source, hit and num_draft.
        """
        rounds, ids = np.nonzero(self.live[:, chain])
        chosen = rounds, np.full_like(ids, chain), ids
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
    draws = ReplayDraws(job, limit, seed)
    return simulate(job, device, host, draws, limit, num_tokens=job.config.num_tokens)


def follow(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    sequences: NDArray[np.int64],
    *,
    apart: bool = False,
) -> Prediction:
    """Predicts how long a run's rounds took, given their outcomes (RoundRecords.sequences).

    apart: as RecordedDraws takes it.
    """
    draws = RecordedDraws(job, sequences, apart=apart)
    return simulate(job, device, host, draws, draws.num_rounds)


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
    draws = LawDraws(Cells.of(job), chains, seed)
    return simulate(job, device, host, draws, num_rounds, burn_in=_BURN_IN)


def simulate(
    job: Job,
    device: DeviceCosts,
    host: HostCosts,
    draws: Draws,
    num_rounds: int,
    *,
    burn_in: int = 0,
    num_tokens: int | None = None,
) -> Prediction:
    """Simulates one job for every chain of `draws`, and keeps its rounds.

    burn_in: first rounds that are not reported. num_tokens: tokens after which a sequence ends.
    """
    held = None if job.draft is None else job.draft_buckets()
    rounds = Rounds(Cells.of(job), device, host, draws, held, num_tokens)
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
    branches, grows = job.config.batch_size * job.fan_outs.branches, job.fan_outs.branches > 0
    drafts_s = job.lookahead * float(rounds.lanes_s[-1])
    growth_s = None
    if grows and held is not None:
        step_s = float(device.draft_s(in_buckets(held, np.array([branches])))[0]) + host.step
        keys_s = host.keys + host.keys_lane * branches
        growth_s = float(rounds.glue_s[0, -1]) + keys_s + job.lookahead * step_s
    return Prediction(
        **_stacked(folded, np.concatenate),
        backup=Source[job.config.backup.upper()] if job.lookahead else Source.NONE,
        t_target_s=float(rounds.verify_s[-1]),
        t_draft_s=drafts_s if job.lookahead else None,
        t_growth_s=growth_s,
    )


def _stacked(parts: Sequence[dict[str, NDArray[Any]]], how: Any) -> dict[str, Any]:
    return {name: how([part[name] for part in parts]) for name in parts[0]}
