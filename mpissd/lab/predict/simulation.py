"""The one model of a round: an event simulation of the loops of the target and of the draft.

Many configurations advance at once, each as several independent chains of rounds. The events of a
round, in the order in which the loops add up their durations:

    sent    the draft starts SPECULATION r                       (R)
    keys    sent + glue + keys                                   (K: the cache can answer)
    asked   sent + link + verification + lead's work + link      (a: OUTCOME r is at the draft)
    seen    the first poll >= asked; polls come between growth steps, which are never cut short (Q)

`expect` returns long-run means; all configurations read the same draws, and equal ones have equal
means. `follow` predicts a run's rounds from the outcomes that it had. Shapes: [G, R] for G
configurations and R chains, [G, R, b] for sequences.
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
from mpissd.engine.job import Job
from mpissd.engine.law.acceptance import HitLaw
from mpissd.engine.law.fanout import key_chances
from mpissd.engine.law.tree import positional
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

_LAW_SEQUENCE = 1 << 29  # sequence id of LawDraws' streams; no request of a run has such a large id
_BURN_IN = 8  # first rounds of a chain, which do not count
_SETTLED = 4  # rounds after which rounds without growth are all equal
_PRECISE = 256, 64, 32  # sequences of all chains, but at least so many chains; rounds
_QUICK = 64, 16, 16  # the same, to rank many configurations
_AT_ONCE = 1 << 17  # sequences of all configurations that are simulated at once, to stay in caches
_hit_probabilities = lru_cache(maxsize=1024)(HitLaw.hit_probabilities)


@dataclass(frozen=True)
class Grid:
    """G configurations of one batch size with the durations of their rounds, in seconds. hazards:
    [G, K], 0 beyond a configuration's own K. p_hit: P(hit | k accepted), [G, source, end, K+1],
    with source: after a backup or a hit, and end: whether k is all. The tables from verify_s to
    most_steps are indexed by the numbers of live sequences and of hits among them: [G, L, b+1] with
    L = b+1, or L = 1 if all sequences live on. most_steps: K where branches grow, 0 elsewhere.
    lanes_s: a draft step of 0..b sequences, [G, b+1]. The other arrays are [G]."""

    batch_size: int
    host: HostCosts
    lookahead: Ints
    backup_lookahead: Ints
    fast: Mask
    inline: Mask  # or without a draft
    hazards: Floats
    hazards_fast: Floats
    p_hit: Floats
    verify_s: Floats
    keys_s: Floats
    step_s: Floats
    most_steps: Ints
    lanes_s: Floats

    def __len__(self) -> int:
        return len(self.lookahead)

    @classmethod
    def of(
        cls, jobs: Sequence[Job], device: DeviceCosts, host: HostCosts, *, ends: bool = False
    ) -> Grid:
        """Makes the grid of jobs of one batch size on the same devices and hosts; AR has K = 0.
        ends: whether sequences may end before others of their batch."""
        batch = jobs[0].config.batch_size
        lookahead = np.array([job.lookahead for job in jobs], np.int64)
        counts = np.arange(batch + 1)
        live = counts[:, None] if ends else np.full((1, 1), batch)
        won = np.minimum(counts, live)  # [L, b+1]
        missed = live - won
        tokens = _column(job.num_nodes for job in jobs)
        served = _column(job.tree.ends[job.backup_lookahead] for job in jobs)
        # The row counts that are compiled besides powers of two.
        exact = [(batch, job.verify_rows, *filter(None, [job.prefill_rows])) for job in jobs]
        compiled = _rows_of(exact)
        rows = won * (tokens + 1) + missed * (served + 1)
        verify_s = device.verify(padded(rows, compiled), compiled.max(axis=1)[:, None, None])
        keys_s = np.zeros(rows.shape)
        step_s = np.ones(rows.shape)
        most_steps = np.zeros(rows.shape, np.int64)
        lanes_s = np.zeros((len(jobs), batch + 1))
        if lookahead.any() and device.draft is not None:
            pairs = zip(jobs, exact, strict=True)
            compiled = _rows_of(
                [() if job.draft is None else (*rows, job.grown_rows) for job, rows in pairs]
            )
            largest = compiled.max(axis=1)[:, None, None]
            sequences = np.broadcast_to(counts, (len(jobs), 1, batch + 1))
            lanes_s = device.draft_s(padded(sequences, compiled), largest)[:, 0] + host.step
            after_hit = _column(sum(job.fan_out) for job in jobs)
            after_miss = _column(sum(job.fan_out_miss) for job in jobs)
            branches = won * after_hit + missed * after_miss
            grown = np.maximum(branches, 1)
            step_s = device.draft_s(padded(grown, compiled), largest)
            step_s += host.step - host.joined
            for n, job in enumerate(jobs):
                if job.tree.num_lanes:  # the mean of its levels
                    levels = [n] * job.lookahead
                    width = np.array([len(nodes) for nodes in job.tree.inner])[:, None, None]
                    for table, of_level in ((lanes_s, sequences[n]), (step_s, grown[n])):
                        rows = padded(width * of_level, compiled[levels])
                        mean = device.draft_s(rows, largest[levels]).mean(axis=0)
                        table[n] = mean.reshape(table[n].shape) + host.step
            candidates = _column(job.widest + 1 for job in jobs)
            glue_rows = padded(live * (tokens + 1) + 0 * won, compiled)
            glue_s = device.glue_s(glue_rows, candidates, largest) + host.glue
            keys_s = np.where(branches > 0, glue_s + host.keys + host.keys_lane * branches, 0.0)
            most_steps = np.where(branches > 0, lookahead[:, None, None], 0)
        longest = int(lookahead.max())
        return cls(
            batch_size=batch,
            host=host,
            lookahead=lookahead,
            backup_lookahead=np.array([job.backup_lookahead for job in jobs], np.int64),
            fast=np.array([job.config.backup == "fast" for job in jobs]),
            inline=np.array([job.inline for job in jobs]) | (lookahead == 0),
            hazards=_widened([job.rates(Source.CACHE) for job in jobs], longest),
            hazards_fast=_widened([job.rates(Source.FAST) for job in jobs], longest),
            p_hit=_widened([_hit_chances(job) for job in jobs], longest + 1),
            verify_s=verify_s,
            keys_s=keys_s,
            step_s=step_s,
            most_steps=most_steps,
            lanes_s=lanes_s,
        )

    def take(self, chosen: Ints) -> Grid:
        """Returns the configurations with these indices, in that order."""
        arrays: Any = {k: v[chosen] for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        return replace(self, **arrays)

    @property
    def grows(self) -> Mask:
        """Which configurations grow branches, [G]."""
        return np.asarray(self.most_steps.any(axis=(1, 2)))


def _hit_chances(job: Job) -> Floats:
    """Returns P(the outcome is a key | k tokens were accepted), [source, end, K+1]."""
    if not job.fan_out:
        return np.zeros((2, 2, job.lookahead + 1))
    if job.layout is not None:
        return _level_chances(job)
    table = _hit_probabilities(job.hit_law, job.widest)
    return np.stack([table[:, list(fans)] for fans in (job.fan_out_miss, job.fan_out)])


def _level_chances(job: Job) -> Floats:
    """Returns P(the outcome is a key | the accepted path ends at level d) of trees. The shape is
    [source, end, K+1]. The next round does not depend on which node of the level it is, so that the
    mean over the level's nodes is exact."""
    tree = job.tree
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
    """Returns a value of each configuration, [G, 1, 1]."""
    return np.array([*values], np.int64)[:, None, None]


def _rows_of(lists: Sequence[tuple[int, ...]]) -> Ints:
    """Returns configurations' row counts as one array, [G, n]; short lists repeat their last."""
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
    compiled: [G, n], those besides the powers of two below the largest."""
    rows = np.asarray(rows)
    columns = compiled.T.reshape(compiled.shape[1], -1, *(1,) * (rows.ndim - 1))
    powers = 2 ** np.ceil(np.log2(np.maximum(rows, 1))).astype(np.int64)
    largest = columns.max(axis=0)
    held = np.where(powers < largest, powers, largest)
    for column in columns:
        held = np.where((column >= rows) & (column < held), column, held)
    return np.asarray(np.maximum(held, rows), np.int64)


class LawDraws:
    """Draws the accepted tokens and hits of rounds by the imposed models. All configurations read
    the same uniforms. Those of a sequence are spread evenly over the chains of a round (one in each
    R-th of [0, 1)), so that means come out with less noise than from independent draws."""

    def __init__(self, grid: Grid, chains: int) -> None:
        self.chains = chains
        self._batch = grid.batch_size
        self._number = 0  # of the last uniforms
        self._fast = grid.fast[:, None, None]
        self._reached, self._kind = _distinct(grid.hazards)
        self._reached_fast, self._kind_fast = _distinct(grid.hazards_fast)
        self._p_hit = grid.p_hit.ravel()
        self._width = grid.p_hit.shape[-1]
        self._first = np.arange(len(grid))[:, None, None] * 4 * self._width

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences round `number` decodes, of those that have not ended: all."""
        return live

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns k, how many of num_draft tokens each sequence's round accepts, [G, R, b]. hit:
        whether a branch of the cache drafted them, or a backup."""
        uniform = self._next()[None, :, :, None]
        free = (uniform < self._reached).sum(axis=3)[self._kind]
        if self._fast.any():
            other = (uniform < self._reached_fast).sum(axis=3)[self._kind_fast]
            free = np.where(hit | ~self._fast, free, other)
        return np.asarray(np.minimum(free, num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the outcomes are keys, [G, R, b]; end: whether all was accepted."""
        at = self._first + (2 * hit + end) * self._width + accepted
        return np.asarray(self._next() < self._p_hit[at])

    def _next(self) -> Floats:
        """Returns the next uniforms, [R, b]."""
        self._number += 1
        return _spread(self.chains, self._batch, self._number)


def _distinct(hazards: Floats) -> tuple[Floats, Ints]:
    """Returns P(k >= i) of the distinct rows, [n, 1, 1, K], and which of them each row is, [G]."""
    rows, kind = np.unique(hazards, axis=0, return_inverse=True)
    reached = np.cumprod(rows, axis=1, dtype=np.float64)
    return reached[:, None, None, :], np.asarray(kind.reshape(-1), np.int64)


@lru_cache(maxsize=512)
def _spread(chains: int, batch: int, number: int) -> Floats:
    """Returns the n-th uniforms, [R, b], each column one in every R-th of [0, 1)."""
    random = np.random.Generator(np.random.Philox(key=[0, _LAW_SEQUENCE + number]))
    order = random.permuted(np.tile(np.arange(chains)[:, None], batch), axis=0)
    return np.asarray((order + random.random((chains, batch))) / chains)


class RecordedDraws:
    """A run's recorded outcomes, round by round, in place of LawDraws. sequences: as
    RoundRecords.sequences has them, [n, 8]. A round's sequences are identified by their place in
    it."""

    chains = 1

    def __init__(self, job: Job, sequences: NDArray[np.int64]) -> None:
        rounds = sequences[:, 0]
        place = np.arange(len(rounds)) - np.searchsorted(rounds, rounds)
        self.num_rounds = int(rounds.max()) + 1
        self._number = 0
        shape = self.num_rounds + 1, 1, 1, job.config.batch_size  # and an empty round at the end
        self._live = np.zeros(shape, np.bool_)
        self._hit = np.zeros(shape, np.bool_)
        self._accepted = np.zeros(shape, np.int64)
        self._live[rounds, 0, 0, place] = True
        self._hit[rounds, 0, 0, place] = sequences[:, 6] > 0
        self._accepted[rounds, 0, 0, place] = sequences[:, 3]

    def accepted(self, hit: Mask, num_draft: Ints) -> Ints:
        """Returns how many of num_draft tokens each sequence's round accepted."""
        return np.asarray(np.minimum(self._accepted[self._number], num_draft), np.int64)

    def hits(self, hit: Mask, accepted: Ints, end: Mask) -> Mask:
        """Returns whether the next round's lookups hit; a new sequence's first one never does."""
        return np.asarray(self._hit[self._number + 1])

    def live(self, number: int, live: Mask) -> Mask:
        """Returns which sequences round `number` decoded; the other methods then refer to it."""
        self._number = number
        return np.asarray(self._live[number])


class Rounds:
    """The clocks and sequences of all chains between two rounds."""

    def __init__(self, grid: Grid, draws: LawDraws | RecordedDraws) -> None:
        self._grid = grid
        self._draws = draws
        self._host = grid.host
        inline_s = grid.host.draft_s + grid.host.draft_record  # no message is sent
        self._inline_s = np.where(grid.lookahead == 0, 0.0, inline_s)[:, None]
        batch = grid.batch_size
        shape = len(grid), draws.chains, batch
        numbers = np.arange(len(grid))[:, None]
        self._first = numbers * grid.verify_s[0].size  # of a configuration, in flattened tables
        self._first_step = numbers * (batch + 1)  # in lanes_s
        self.live: Mask = np.ones(shape, np.bool_)
        self._hit: Mask = np.zeros(shape, np.bool_)  # whether outcome r-1 is a key of the cache
        self._clock = np.zeros(shape[:2])  # the time at which the lead has outcome r-1
        # A run's warm-up has run full rounds of hits on throw-away sequences before the first.
        full = np.full(shape[:2], batch)
        self._grown = self._place(full, full)  # place of the answer whose branches grow
        self._sent = -self._host.lead_s - self._host.link - grid.verify_s.ravel()[self._grown]

    def _place(self, live: Ints, won: Ints) -> Ints:
        """Returns indices into the flattened tables of durations, [G, R]."""
        grid = self._grid
        offset = live * (grid.batch_size + 1) if grid.verify_s.shape[1] > 1 else 0
        return np.asarray(self._first + won + offset, np.int64)

    def advance(self, number: int) -> dict[str, NDArray[Any]]:
        """Simulates round r from OUTCOME r-1 to its own outcome. Returns its tokens, seconds, hits
        and the lead's wait, under the names that `Expected` has."""
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
            # The draft polls between growth steps: it sees the outcome when the running one ends.
            asked = self._clock + (host.lead_send + host.link)
            step_s = grid.step_s.ravel()[self._grown]
            free = self._sent + grid.keys_s.ravel()[self._grown]
            grown_s = asked - free
            with np.errstate(divide="ignore", invalid="ignore"):
                begun = np.ceil(np.where(grown_s > 0, grown_s / step_s, 0.0))
            steps = np.minimum(begun, grid.most_steps.ravel()[self._grown]).astype(np.int64)
            free = free + steps * step_s + host.draft_record
            noticed = np.maximum(free, asked)
            drafting_s = self._drafting_s(won, live, steps)
            self._sent = noticed + drafting_s + (host.draft_read + host.draft_s + host.draft_send)
            self._grown = place
            seen = np.maximum(ready, self._sent + host.link)
            if inline.any():
                seen = np.where(inline, ready + drafting_s + self._inline_s, seen)
        num_draft = np.where(
            hit, grid.lookahead[:, None, None], grid.backup_lookahead[:, None, None]
        )
        over = seen + grid.verify_s.ravel()[place] + host.lead_s
        accepted = draws.accepted(hit, num_draft)
        self._hit = draws.hits(hit, accepted, accepted == num_draft)
        round_s = np.where(self.live.any(axis=2), over - self._clock, 0.0)
        self._clock = over
        tokens = np.where(self.live, accepted + 1, 0).sum(axis=2)
        return {"tokens": tokens, "round_s": round_s, "hit_rate": hit, "wait_s": seen - ready}

    def _drafting_s(self, won: Ints, live: Ints, steps: Ints) -> Floats:
        """Returns the seconds of draft steps between OUTCOME and SPECULATION, [G, R]. won, live:
        hits and live sequences, [G, R]. steps: that the branches of hits have grown. Hits are
        finished and misses drafted in shared forwards until one of the two groups has K (or K_b)
        tokens; then the other goes on alone."""
        grid = self._grid
        lanes_s = grid.lanes_s.ravel()
        missed = live - won
        finish = np.where(won > 0, grid.lookahead[:, None] - steps, 0)
        backup = np.where(grid.fast, 0, grid.backup_lookahead)[:, None] * (missed > 0)
        shared = np.minimum(finish, backup)
        shared_s = shared * lanes_s[self._first_step + live]
        finish_s = (finish - shared) * lanes_s[self._first_step + won]
        backup_s = (backup - shared) * lanes_s[self._first_step + missed]
        return np.asarray(shared_s + (finish_s + backup_s), np.float64)


@dataclass(frozen=True)
class Expected:
    """Long-run means of configurations, [G]; tokens and times are of all b sequences together."""

    tok_per_s: Floats
    round_s: Floats
    tokens: Floats  # In a round.
    hit_rate: Floats
    wait_s: Floats  # The lead's wait for its speculation.


def expected(job: Job, device: DeviceCosts, host: HostCosts) -> Expected:
    """Returns the means of one job, [1]; they depend neither on its seed nor on its length."""
    grid = Grid.of([job], device, host)
    key = tuple(v.tobytes() if isinstance(v, np.ndarray) else v for v in vars(grid).values())
    if key not in _KNOWN:
        _KNOWN[key] = expect(grid)
    return _KNOWN[key]


_KNOWN: dict[tuple[Any, ...], Expected] = {}  # rows of many seeds have one grid


def expect(grid: Grid, *, quick: bool = False) -> Expected:
    """Returns the means of every configuration, which do not depend on the others in the grid. At b
    = 1 they are of 8,192 rounds that grow branches (quick: of 1,024). Without growth all rounds
    last as long, and the means are exact."""
    columns = {field.name: np.zeros(len(grid)) for field in fields(Expected)}
    summed = [name for name in columns if name != "tok_per_s"]
    sequences, least, num_rounds = _QUICK if quick else _PRECISE
    chains = max(least, sequences // grid.batch_size)
    at_once = max(1, _AT_ONCE // max(sequences, least * grid.batch_size))
    growing = np.flatnonzero(grid.grows)
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
    # Where nothing grows only the tokens of a round are random.
    exact = np.flatnonzero(~grid.grows)
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
    with np.errstate(divide="ignore"):  # inf if a round takes no time
        columns["tok_per_s"] = columns["tokens"] / columns["round_s"]
    return Expected(**columns)


def follow(job: Job, device: DeviceCosts, host: HostCosts, sequences: NDArray[np.int64]) -> Floats:
    """Predicts the seconds of a run's rounds, [n], given their outcomes. sequences: as
    RoundRecords.sequences() has them, [rows, 8]."""
    draws = RecordedDraws(job, sequences)
    rounds = Rounds(Grid.of([job], device, host, ends=True), draws)
    seconds = (rounds.advance(number)["round_s"][0, 0] for number in range(draws.num_rounds))
    return np.fromiter(seconds, np.float64, draws.num_rounds)


def is_predictable(job: Job) -> bool:
    """Returns whether the imposed models give this job a mean. The job must have imposed tokens,
    and a draft that takes K steps over fan-out lists that are the same in every round."""
    has_steps = job.draft is None or job.draft.num_tokens == 1
    return job.workload.is_imposed and has_steps


def is_followable(job: Job) -> bool:
    """Returns whether the simulation can time this job's rounds from their own outcomes. Of text
    and of replays: acceptance and hits are a pair's own."""
    has_steps = job.draft is None or (job.draft.head is None and job.draft.num_tokens == 1)
    reports = job.workload.reports_outcomes and job.dynamic is None
    return is_predictable(job) or (reports and has_steps)


def predict_row(job: Job, device: DeviceCosts, host: HostCosts) -> dict[str, Any]:
    """Predicts the long-run means of this job's runs, from costs and its imposed models. Keys that
    a result row has mean the same here. The others are round_us.mean, exposed_us (the lead's mean
    wait for its speculation) and T_p. Raises ConfigError for a job without a mean."""
    if not is_predictable(job):
        raise ConfigError(
            "no prediction for what is sampled (markov), recorded (replay), or drafts several "
            "tokens a forward: allowed: gemm"
        )
    means = expected(job, device, host)
    grid = Grid.of([job], device, host)
    rate = float(means.tok_per_s[0])
    is_known = math.isfinite(rate)  # not if rounds take no time
    target = float(grid.verify_s[0, -1, -1])
    draft = job.lookahead * float(grid.lanes_s[0, -1]) if job.lookahead else None
    growth = None
    if grid.grows[0]:
        growth = float(grid.keys_s[0, -1, -1] + job.lookahead * grid.step_s[0, -1, -1])
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
