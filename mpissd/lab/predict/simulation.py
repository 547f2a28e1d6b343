"""Simulates how long decoding rounds take, from the durations of forwards and of host work.

In each round the draft sends tokens; the target verifies them and returns the outcome: the number
of accepted tokens and the bonus token (the target's own next token). Meanwhile the draft of SSD
drafts on for several likely outcomes (branches), and between two draft steps polls whether the real
one has arrived. A running step is always finished. The times of a round:

    sent    the draft sends its tokens
    keys    sent + glue (scoring forward over these tokens) + keys: branches can grow from now on
    asked   sent + link + verification + rank 0's work + link: the outcome is at the draft
    seen    the draft's first poll at or after `asked`

With --cache=lead the draft sends branches to rank 0 once they are whole. If they arrive before
the outcome, and all sequences hit, rank 0 goes on without an answer. Distributions of sampled
tokens follow the tokens, and arrive before the target judges.

Many configurations are simulated at once, each as several independent chains of rounds. `expect`
returns long-run means, for which all configurations use the same random numbers. `follow` predicts
the rounds of a run from its recorded outcomes. Arrays have the shapes [G, R] for G configurations
and R chains, or [G, R, b] for the b sequences of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.engine.comm.wire import Kind
from mpissd.engine.job import Job
from mpissd.engine.law.acceptance import HitLaw
from mpissd.engine.law.fanout import key_chances
from mpissd.engine.law.tree import positional
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts
from mpissd.lab.predict.link import Link

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LAW_SEQUENCE = 1 << 29  # number of the first random stream, unlike those of a run's requests
_BURN_IN = 8  # number of first rounds of a chain that the means leave out
_SETTLED = 4  # After this number of rounds, rounds without branches all take the same time.
_PRECISE = 256, 64, 32  # what to simulate: sequences in all chains, fewest chains, rounds of each
_QUICK = 64, 16, 16  # numbers of sequences, chains and rounds that suffice to rank configurations
_AT_ONCE = 1 << 17  # most sequences to simulate at once, so that arrays fit in CPU caches
_hit_probabilities = lru_cache(maxsize=1024)(HitLaw.hit_probabilities)


@dataclass(frozen=True)
class Grid:
    """G configurations of one batch size b, as arrays for the simulation, with all durations in s.

    lookahead, backup_lookahead [G]: K, and the number of tokens drafted after a cache miss. steps,
    backup_steps [G]: forwards that draft so many tokens. fast [G]: whether a lookup drafts after a
    miss. inline [G]: whether rank 0 drafts itself, or nothing drafts. pushes [G]: whether rank 0
    has a cache of its own. messages_s [G, 3]: seconds of a message with an outcome, with drafted
    tokens, and with branches. lanes_s [G, U+1]: seconds of a draft step of 0, 1, … U units. units
    [G]: for how many units a sequence counts: K if one forward drafts all K tokens, else 1; if
    catches_up [G], one more for each token just accepted.
    hazards [G, K]: acceptance rate of each position, given that the ones before were accepted;
    hazards_fast: the same for tokens of a lookup. p_hit [G, 2, 2, K+1]: P(cache hit | k accepted),
    indexed by whether the tokens came from a hit, whether all were accepted, and k.

    Tables [G, L, b+1], indexed by the number of sequences still decoded (L = b+1; L = 1 if none
    ends) and of cache hits among them: verify_s, seconds of a verification; keys_s, seconds from
    sending tokens to the first step of branches; step_s, seconds of a step of all branches;
    most_steps, the largest number of such steps (0 without branches); proposals_s, seconds of the
    distributions after the tokens (−∞: none are sent).
    """

    batch_size: int
    host: HostCosts
    lookahead: Ints
    backup_lookahead: Ints
    steps: Ints
    backup_steps: Ints
    units: Ints
    catches_up: Mask
    fast: Mask
    inline: Mask
    pushes: Mask
    hazards: Floats
    hazards_fast: Floats
    p_hit: Floats
    verify_s: Floats
    keys_s: Floats
    step_s: Floats
    most_steps: Ints
    proposals_s: Floats
    messages_s: Floats
    lanes_s: Floats

    def __len__(self) -> int:
        return len(self.lookahead)

    @classmethod
    def of(
        cls,
        jobs: Sequence[Job],
        device: DeviceCosts,
        host: HostCosts,
        link: Link | None = None,
        *,
        ends: bool = False,
    ) -> Grid:
        """Makes the arrays from jobs that have one batch size and the same durations of forwards
        and host work; AR has K = 0. link: leads to the draft rank (None: it is on rank 0's host).
        ends: whether some sequences of a batch may end before others."""
        batch = jobs[0].config.batch_size
        lookahead = np.array([job.lookahead for job in jobs], np.int64)
        steps = np.array([job.num_forwards(job.lookahead) for job in jobs], np.int64)
        units = np.array([job.step_rows for job in jobs], np.int64)
        catches_up = np.array([job.catches_up for job in jobs])
        counts = np.arange(batch + 1)
        live = counts[:, None] if ends else np.full((1, 1), batch)
        won = np.minimum(counts, live)  # [L, b+1]
        missed = live - won
        tokens = _column(job.num_nodes for job in jobs)
        served = _column(job.shape.ends[job.backup_lookahead] for job in jobs)
        # Forwards are compiled for these row counts, in addition to the powers of two.
        exact = [(batch, job.verify_rows, *filter(None, [job.prefill_rows])) for job in jobs]
        compiled = _rows_of(exact)
        rows = won * (tokens + 1) + missed * (served + 1)
        verify_s = device.verify(padded(rows, compiled), compiled.max(axis=1)[:, None, None])
        keys_s = np.zeros(rows.shape)
        step_s = np.ones(rows.shape)
        most_steps = np.zeros(rows.shape, np.int64)
        each = np.arange(1 + batch * int((units + catches_up * lookahead).max()))
        lanes_s = np.zeros((len(jobs), len(each)))
        if lookahead.any() and device.draft is not None:
            pairs = zip(jobs, exact, strict=True)
            compiled = _rows_of(
                [() if job.draft is None else (*rows, job.grown_rows) for job, rows in pairs]
            )
            largest = compiled.max(axis=1)[:, None, None]
            sequences = np.broadcast_to(each, (len(jobs), 1, len(each)))
            lanes_s = device.draft_s(padded(sequences, compiled), largest)[:, 0] + host.step
            after_hit = _column(sum(job.fan_out) for job in jobs)
            after_miss = _column(sum(job.fan_out_miss) for job in jobs)
            branches = won * after_hit + missed * after_miss
            grown = np.maximum(branches, 1) * units[:, None, None]
            step_s = device.draft_s(padded(grown, compiled), largest)
            step_s += host.step - host.joined
            for n, job in enumerate(jobs):
                if job.shape.num_lanes and not job.masks:  # tree: a step's rows differ by level
                    levels = [n] * job.lookahead
                    width = np.array([len(nodes) for nodes in job.shape.inner])[:, None, None]
                    for table, of_level in ((lanes_s, sequences[n]), (step_s, grown[n])):
                        rows = padded(width * of_level, compiled[levels])
                        mean = device.draft_s(rows, largest[levels]).mean(axis=0)
                        table[n] = mean.reshape(table[n].shape) + host.step
            candidates = _column(job.widest + 1 for job in jobs)
            glue_rows = padded(live * (tokens + 1) + 0 * won, compiled)
            glue_s = device.glue_s(glue_rows, candidates, largest) + host.glue
            keys_s = np.where(branches > 0, glue_s + host.keys + host.keys_lane * branches, 0.0)
            most_steps = np.where(branches > 0, steps[:, None, None], 0)
        longest = int(lookahead.max())
        messages_s = np.full((len(jobs), 3), host.link)
        proposals_s = np.full(verify_s.shape, -np.inf)
        if link is not None:
            for n, job in enumerate(jobs):
                messages_s[n] += link.added_s(job, Kind.OUTCOME, Kind.SPECULATION, Kind.BRANCHES)
                if link.draws(job) and not job.inline:
                    drawn = 0 if job.config.backup == "fast" else served[n]
                    each_s = 4 * job.target.vocab_size / link.bytes_per_s
                    proposals_s[n] = each_s * (won * tokens[n] + missed * drawn)
        return cls(
            batch_size=batch,
            host=host,
            lookahead=lookahead,
            backup_lookahead=np.array([job.backup_lookahead for job in jobs], np.int64),
            steps=steps,
            backup_steps=np.array([job.num_forwards(job.backup_lookahead) for job in jobs]),
            units=units,
            catches_up=catches_up,
            fast=np.array([job.config.backup == "fast" for job in jobs]),
            inline=np.array([job.inline for job in jobs]) | (lookahead == 0),
            pushes=np.array([job.config.cache == "lead" and bool(job.fan_out) for job in jobs]),
            hazards=_widened([job.rates(Source.CACHE) for job in jobs], longest),
            hazards_fast=_widened([job.rates(Source.FAST) for job in jobs], longest),
            p_hit=_widened([_hit_chances(job) for job in jobs], longest + 1),
            verify_s=verify_s,
            keys_s=keys_s,
            step_s=step_s,
            most_steps=most_steps,
            proposals_s=proposals_s,
            messages_s=messages_s,
            lanes_s=lanes_s,
        )

    def take(self, chosen: Ints) -> Grid:
        """Returns a grid of the configurations with the indices `chosen`, in that order."""
        arrays: Any = {k: v[chosen] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **arrays)

    @property
    def grows(self) -> Mask:
        """Whether each configuration drafts during the verification, as SSD does, bool [G]."""
        return np.asarray(self.most_steps.any(axis=(1, 2)))

    @property
    def is_varied(self) -> Mask:
        """Whether a configuration's rounds differ in duration even in a full batch, bool [G]."""
        return self.grows | self.catches_up


def _hit_chances(job: Job) -> Floats:
    """Returns the probability that the speculation cache holds drafts for the target's next token,
    [2, 2, K+1]. The indices: whether the round's tokens came from a cache hit, whether all were
    accepted, and k, the number of accepted ones."""
    if not job.fan_out:
        return np.zeros((2, 2, job.lookahead + 1))
    if job.layout is not None:
        return _level_chances(job)
    table = _hit_probabilities(job.hit_law, job.widest)
    return np.stack([table[:, list(fans)] for fans in (job.fan_out_miss, job.fan_out)])


def _level_chances(job: Job) -> Floats:
    """Returns what _hit_chances does for a draft tree, where k is the level at which the path of
    accepted tokens ends; whether all were accepted has no effect. The mean over a level's nodes is
    exact, because later rounds do not depend on the node."""
    tree = job.shape
    hazards = job.acceptance[Source.CACHE].hazards
    reached = np.bincount(tree.depths, tree.chances(positional(hazards, job.hit_law, tree.width)))
    ends = reached - np.append(reached[1:], 0.0)
    parts = []
    for fans in (job.fan_out_miss, job.fan_out):
        keys = key_chances(tree, hazards, job.hit_law, max(fans))
        kept = np.bincount(tree.depths, [chances[n] for chances, n in zip(keys, fans, strict=True)])
        parts.append([np.divide(kept, ends, out=np.zeros_like(kept), where=ends > 0)] * 2)
    return np.array(parts)


def _column(values: Iterable[int]) -> Ints:
    """Returns one integer for each of the G configurations as an array [G, 1, 1]."""
    return np.array([*values], np.int64)[:, None, None]


def _rows_of(lists: Sequence[tuple[int, ...]]) -> Ints:
    """Returns all configurations' row counts, [G, n]. Shorter lists repeat their last element."""
    longest = max(map(len, lists))
    return np.array([(*rows, *(rows[-1:] or (1,)) * (longest - len(rows))) for rows in lists])


def _widened(parts: Any, width: int) -> Floats:
    """Stacks G arrays into one array [G, …, width]; shorter last axes are filled with 0."""
    arrays = [np.asarray(part, np.float64) for part in parts]
    out = np.zeros((len(arrays), *arrays[0].shape[:-1], width))
    for row, array in zip(out, arrays, strict=True):
        row[..., : array.shape[-1]] = array
    return out


def padded(rows: Ints, compiled: Ints) -> Ints:
    """Returns, for each row count in `rows` [G, …], the smallest compiled row count that is at
    least as large, to which the forward is padded. compiled: each configuration's own compiled row
    counts, [G, n]; the powers of two below the largest of these are compiled as well."""
    rows = np.asarray(rows)
    columns = compiled.T.reshape(compiled.shape[1], -1, *(1,) * (rows.ndim - 1))
    powers = 2 ** np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)
    largest = columns.max(axis=0)
    held = np.where(powers < largest, powers, largest)
    for column in columns:
        held = np.where((column >= rows) & (column < held), column, held)
    return np.asarray(np.maximum(held, rows), np.int64)


class LawDraws:
    """Draws the numbers of accepted tokens and the cache hits of rounds from each configuration's
    probabilities of acceptance and of cache hits. All configurations use the same uniform random
    numbers. In each round, the numbers of the R independent chains of rounds are stratified (one in
    each R-th of [0, 1)), so that means vary less."""

    def __init__(self, grid: Grid, chains: int) -> None:
        self.chains = chains
        self._batch = grid.batch_size
        self._number = 0
        self._fast = grid.fast[:, None, None]
        self._reached, self._kind = _distinct(grid.hazards)
        self._reached_fast, self._kind_fast = _distinct(grid.hazards_fast)
        self._p_hit = grid.p_hit.ravel()
        self._width = grid.p_hit.shape[-1]
        self._first = np.arange(len(grid))[:, None, None] * 4 * self._width

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences are decoded in round `number`, bool [G, R, b]: all in `live`,
        which the round before decoded, because random draws never end a sequence."""
        return live

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Draws k, the number of accepted tokens of each sequence in a round, int [G, R, b]. hit:
        whether its tokens came from a cache hit. num_draft: the number of its drafted tokens."""
        uniform = self._next()[None, :, :, None]
        free = (uniform < self._reached).sum(axis=3)[self._kind]
        if self._fast.any():
            other = (uniform < self._reached_fast).sum(axis=3)[self._kind_fast]
            free = np.where(hit | ~self._fast, free, other)
        return np.asarray(np.minimum(free, num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Draws for each sequence whether the next cache lookup is a hit, bool [G, R, b]. hit:
        whether this round's tokens came from a cache hit. accepted: how many of them the target
        accepted. end: whether it accepted all."""
        at = self._first + (2 * hit + end) * self._width + accepted
        return np.asarray(self._next() < self._p_hit[at])

    def _next(self) -> Floats:
        """Returns the next uniform random numbers in [0, 1), one a chain and sequence, [R, b]."""
        self._number += 1
        return _spread(self.chains, self._batch, self._number)


def _distinct(hazards: Floats) -> tuple[Floats, Ints]:
    """Finds equal rows among the configurations' acceptance rates `hazards`, so that each is
    computed once. Returns P(k ≥ i accepted tokens) for i = 1 … K of each distinct row, [n, 1, 1,
    K], and the index of each configuration's row among these, [G]."""
    rows, kind = np.unique(hazards, axis=0, return_inverse=True)
    reached = np.cumprod(rows, axis=1, dtype=np.float64)
    return reached[:, None, None, :], np.asarray(kind.reshape(-1), np.int64)


@lru_cache(maxsize=512)
def _spread(chains: int, batch: int, number: int) -> Floats:
    """Returns the uniform random numbers of draw `number`, [R, b]; a column has exactly one number
    in each of the R equal parts of [0, 1)."""
    random = np.random.Generator(np.random.Philox(key=[0, _LAW_SEQUENCE + number]))
    order = random.permuted(np.tile(np.arange(chains)[:, None], batch), axis=0)
    return np.asarray((order + random.random((chains, batch))) / chains)


class RecordedDraws:
    """Gives the simulation the accepted tokens and cache hits that a run recorded, in place of
    random ones. sequences: int64 [n, 8], from RoundRecords.sequences."""

    chains = 1

    def __init__(self, job: Job, sequences: NDArray[np.int64]) -> None:
        rounds = sequences[:, 0]
        place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
        self.num_rounds = int(rounds.max()) + 1
        self._number = 0
        shape = self.num_rounds + 1, 1, 1, job.config.batch_size  # The last round is empty.
        self._live = np.zeros(shape, np.bool_)
        self._hit = np.zeros(shape, np.bool_)
        self._accepted = np.zeros(shape, np.int64)
        self._live[rounds, 0, 0, place] = True
        self._hit[rounds, 0, 0, place] = sequences[:, 6] > 0
        self._accepted[rounds, 0, 0, place] = sequences[:, 3]

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns the recorded number of accepted tokens of each sequence in the current round, int
        [1, 1, b], at most num_draft. `hit` is ignored."""
        return np.asarray(np.minimum(self._accepted[self._number], num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns the recorded result (hit or miss) of each cache lookup, bool [1, 1, b]."""
        return np.asarray(self._hit[self._number + 1])

    def live(self, number: int, live: Mask) -> Mask:
        """Makes `number` the current round; returns which sequences were decoded in that round of
        the recorded run, bool [1, 1, b]. The argument `live` is ignored."""
        self._number = number
        return np.asarray(self._live[number])


class Rounds:
    """The state of the simulation between two rounds: for each configuration and chain the time,
    the sequences that are still decoded, and which of these will hit the speculation cache."""

    def __init__(self, grid: Grid, draws: LawDraws | RecordedDraws) -> None:
        self._grid = grid
        self._draws = draws
        self._host = grid.host
        inline_s = grid.host.draft_s + grid.host.draft_record
        self._inline_s = np.where(grid.lookahead == 0, 0.0, inline_s)[:, None]
        batch = grid.batch_size
        shape = len(grid), draws.chains, batch
        numbers = np.arange(len(grid))[:, None]
        self._first = numbers * grid.verify_s[0].size
        self._first_step = numbers * grid.lanes_s.shape[1]
        self._accepted = np.zeros(shape, np.int64)
        self.live: Mask = np.ones(shape, np.bool_)
        self._hit: Mask = np.zeros(shape, np.bool_)  # whether the next lookup will hit the cache
        self._clock = np.zeros(shape[:2])  # s at which rank 0 has the last acceptance results
        # The simulation begins as if all sequences had hit the cache in the round before.
        full = np.full(shape[:2], batch)
        self._grown = self._place(full, full)  # index of the running growth in the grid's tables
        self._outcome_s, self._answer_s, self._branches_s = grid.messages_s.T[:, :, None]
        self._sent = -self._host.lead_s - self._answer_s - grid.verify_s.ravel()[self._grown]

    def _place(self, live: Ints, won: Ints) -> Ints:
        """Returns, for each chain, the index into the grid's flattened tables for `live` decoded
        sequences of which `won` hit the cache, [G, R]."""
        grid = self._grid
        offset = live * (grid.batch_size + 1) if grid.verify_s.shape[1] > 1 else 0
        return np.asarray(self._first + won + offset, np.int64)

    def advance(self, number: int) -> dict[str, NDArray[Any]]:
        """Simulates round `number`, which lasts from one acceptance result at rank 0 to the next.
        Returns {name: values}: tokens (emitted), round_s (duration), hit_rate (whether each
        sequence hit the cache) and wait_s (rank 0's wait for draft tokens)."""
        grid = self._grid
        draws = self._draws
        self.live = draws.live(number, self.live)
        hit = self._hit & self.live
        won = hit.sum(axis=2)
        live = self.live.sum(axis=2)
        place = self._place(live, won)
        host = self._host
        ready = self._clock + host.ask_s
        inline = grid.inline[:, None]
        steps = np.zeros(ready.shape, np.int64)
        if inline.all():
            seen = ready + self._drafting_s(won, live, steps) + self._inline_s
        else:
            # The draft polls between steps: it sees acceptance results when the running step ends.
            asked = self._clock + (host.lead_send + self._outcome_s)
            step_s = grid.step_s.ravel()[self._grown]
            free = self._sent + grid.keys_s.ravel()[self._grown]
            grown_s = asked - free
            with np.errstate(divide="ignore", invalid="ignore"):
                begun = np.ceil(np.where(grown_s > 0, grown_s / step_s, 0.0))
            steps = np.minimum(begun, grid.most_steps.ravel()[self._grown]).astype(np.int64)
            is_whole = (steps > 0) & (steps == grid.most_steps.ravel()[self._grown])
            free = free + steps * step_s
            pushed = grid.pushes[:, None] & is_whole
            free += np.where(pushed, host.draft_send, 0.0)
            come = np.where(pushed & (won == live), free + self._branches_s, np.inf)
            noticed = np.maximum(free + host.draft_record, asked)
            drafting_s = self._drafting_s(won, live, steps)
            self._sent = noticed + drafting_s + (host.draft_read + host.draft_s + host.draft_send)
            self._grown = place
            seen = np.maximum(ready, np.minimum(come, self._sent + self._answer_s))
            if inline.any():
                seen = np.where(inline, ready + drafting_s + self._inline_s, seen)
        num_draft = np.where(
            hit, grid.lookahead[:, None, None], grid.backup_lookahead[:, None, None]
        )
        proposed = self._sent + self._answer_s + grid.proposals_s.ravel()[place]
        judging_s = host.lead_sample + host.lead_record
        over = seen + grid.verify_s.ravel()[place] + host.lead_s
        over = np.maximum(over, proposed + judging_s)
        self._accepted = accepted = draws.accepted(hit, num_draft)
        self._hit = draws.hits(hit, accepted, accepted == num_draft)
        round_s = np.where(self.live.any(axis=2), over - self._clock, 0.0)
        self._clock = over
        tokens = np.where(self.live, accepted + 1, 0).sum(axis=2)
        return {"tokens": tokens, "round_s": round_s, "hit_rate": hit, "wait_s": seen - ready}

    def _drafting_s(self, won: Ints, live: Ints, steps: Ints) -> Floats:
        """Returns the seconds of the draft steps from the arrival of acceptance results until the
        next draft tokens are complete, [G, R]. won: number of cache hits. live: number of decoded
        sequences. steps: tokens that the branches of the hits already have. Hits and misses are
        drafted in the same forwards until one of the two groups has all its tokens; the other group
        then continues alone."""
        grid = self._grid
        lanes_s = grid.lanes_s.ravel()
        missed = live - won
        finish = np.where(won > 0, grid.steps[:, None] - steps, 0)
        backup = np.where(grid.fast, 0, grid.backup_steps)[:, None] * (missed > 0)
        shared = np.minimum(finish, backup)
        units = grid.units[:, None]
        stored = (self._accepted * self.live).sum(axis=2) * grid.catches_up[:, None]
        shared_s = shared * lanes_s[self._first_step + live * units]
        finish_s = (finish - shared) * lanes_s[self._first_step + won * units]
        backup_s = (backup - shared) * lanes_s[self._first_step + missed * units + stored]
        return np.asarray(shared_s + (finish_s + backup_s), np.float64)


@dataclass(frozen=True)
class Expected:
    """Long-run means of G configurations, each [G]: tokens/s; seconds and emitted tokens of a
    round; hit rate of cache lookups; and seconds that rank 0 waits for draft tokens in a round."""

    tok_per_s: Floats
    round_s: Floats
    tokens: Floats
    hit_rate: Floats
    wait_s: Floats


def expected(job: Job, device: DeviceCosts, host: HostCosts, link: Link | None = None) -> Expected:
    """Returns the long-run means of one job, in arrays of one element. Jobs that differ only in
    seed or number of rounds have the same means, which are computed once. link: as in Grid.of."""
    grid = Grid.of([job], device, host, link)
    key = tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in vars(grid).values())
    if key not in _KNOWN:
        _KNOWN[key] = expect(grid)
    return _KNOWN[key]


_KNOWN: dict[tuple[Any, ...], Expected] = {}  # cached results of `expected`


def expect(grid: Grid, *, quick: bool = False) -> Expected:
    """Returns the long-run means of each configuration, which do not depend on the others in the
    grid. Configurations that grow branches (SSD) are simulated: at batch size 1 for 8,192 rounds
    (quick: 1,024). For others all rounds take the same time, and the means are exact."""
    columns = {field.name: np.zeros(len(grid)) for field in fields(Expected)}
    summed = [name for name in columns if name != "tok_per_s"]
    sequences, least, num_rounds = _QUICK if quick else _PRECISE
    chains = max(least, sequences // grid.batch_size)
    at_once = max(1, _AT_ONCE // max(sequences, least * grid.batch_size))
    growing = np.flatnonzero(grid.is_varied)
    for first in range(0, len(growing), at_once):
        chosen = growing[first : first + at_once]
        part = grid.take(chosen)
        rounds = Rounds(part, LawDraws(part, chains))
        for number in range(_BURN_IN + num_rounds):
            of_round = rounds.advance(number)
            if number >= _BURN_IN:
                for name in summed:
                    columns[name][chosen] += of_round[name].reshape(len(part), -1).sum(axis=1)
        for name in summed:
            columns[name][chosen] /= chains * num_rounds
        columns["hit_rate"][chosen] /= grid.batch_size
    # Where rounds do not differ in duration, only token counts are random, with a known mean.
    exact = np.flatnonzero(~grid.is_varied)
    if len(exact):
        part = grid.take(exact)
        rounds = Rounds(part, LawDraws(part, 1))
        for number in range(_SETTLED):
            of_round = rounds.advance(number)
        served = np.arange(part.hazards.shape[1]) < part.backup_lookahead[:, None]
        hazards = np.where(part.fast[:, None], part.hazards_fast, part.hazards)
        tokens = 1 + np.cumprod(np.where(served, hazards, 0.0), axis=1).sum(axis=1)
        columns["tokens"][exact] = grid.batch_size * tokens
        for name in ("round_s", "wait_s"):
            columns[name][exact] = of_round[name][:, 0]
    with np.errstate(divide="ignore"):  # The rate is infinite if rounds take no time.
        columns["tok_per_s"] = columns["tokens"] / columns["round_s"]
    return Expected(**columns)


def follow(job: Job, device: DeviceCosts, host: HostCosts, sequences: NDArray[np.int64]) -> Floats:
    """Returns the predicted seconds of each round of a finished run, [rounds], given the numbers of
    accepted tokens and the cache hits that it recorded. sequences: these records, int64 [n, 8], a
    row for each round of each sequence, from RoundRecords.sequences."""
    draws = RecordedDraws(job, sequences)
    rounds = Rounds(Grid.of([job], device, host, ends=True), draws)
    seconds = (rounds.advance(number)["round_s"][0, 0] for number in range(draws.num_rounds))
    return np.fromiter(seconds, np.float64, draws.num_rounds)


def is_predictable(job: Job) -> bool:
    """Returns whether long-run means of this job can be predicted. Its acceptance must be drawn
    from a given model, and a forward of the draft must yield one token a sequence."""
    has_steps = job.draft is None or job.draft.num_tokens == 1
    return job.workload.is_imposed and has_steps


def is_followable(job: Job) -> bool:
    """Returns whether the duration of each round of this job can be predicted from recorded
    accepted tokens and cache hits, for which jobs need no acceptance model."""
    has_steps = job.draft is None or (job.draft.head is None and job.draft.num_tokens == 1)
    reports = job.workload.reports_outcomes and job.dynamic is None
    return is_predictable(job) or (reports and has_steps)


def predict_row(
    job: Job, device: DeviceCosts, host: HostCosts, link: Link | None = None
) -> dict[str, Any]:
    """Returns the predicted long-run means of a job, under the keys that a result row has for them.
    These are added: round_us.mean, the mean round; exposed_us, rank 0's mean wait for draft tokens;
    T_p, the time of growing branches divided by that of the target's forward. Raises ConfigError if
    acceptance is not drawn from a given model."""
    if not is_predictable(job):
        raise ConfigError(
            "no prediction for what is sampled (markov), recorded (replay), or drafts several "
            "tokens a forward: allowed: gemm"
        )
    means = expected(job, device, host, link)
    grid = Grid.of([job], device, host, link)
    rate = float(means.tok_per_s[0])
    is_known = math.isfinite(rate)
    target = float(grid.verify_s[0, -1, -1])
    units = job.config.batch_size * int(grid.units[0])
    draft = int(grid.steps[0]) * float(grid.lanes_s[0, units]) if job.lookahead else None
    growth = None
    if grid.grows[0]:
        growth = float(grid.keys_s[0, -1, -1] + grid.steps[0] * grid.step_s[0, -1, -1])
    return {
        "mode": job.config.mode,
        "expected_tok_per_s": rate if is_known else None,
        "tok_per_s_per_gpu": rate / job.world_size if is_known else None,
        "round_us": {"mean": float(means.round_s[0]) * 1e6},
        "acceptance_length": float(means.tokens[0]) / job.config.batch_size,
        "hit_rate": None if growth is None else float(means.hit_rate[0]),
        "t_target_s": target,
        "t_draft_s": draft,
        "t_growth_s": growth,
        "T_SD": draft / target if draft is not None and target else None,
        "T_p": growth / target if growth is not None and target else None,
        "exposed_us": float(means.wait_s[0]) * 1e6,
    }
