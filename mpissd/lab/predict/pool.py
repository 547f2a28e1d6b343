"""Simulates targets that share a draft, forward by forward [docs/pools.md].

A *frame* of the draft is the host work of the groups that have some, in turn, and one forward that
carries the next turn of every group: steps that answer an outcome, rows of a glue (scoring
forward), growth lanes. An outcome that arrives while a forward runs waits for its end. A target's
own round is simulated as in `simulation`, which this reproduces with one target.

Outcomes on their way wait in a heap, and the draft's forwards come one after another. Growth is not
counted lane by lane: all that grow take part in every forward, so the number of forwards since a
group began gives its progress. A round of a target takes some 20 µs of Python.
"""

from __future__ import annotations

import heapq
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, buckets
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, forwards
from mpissd.lab.predict.grid import Outcomes

_BURN_IN = 8  # rounds a target before those that count
_FRESH = 1 << 28  # first sequence of fresh draws; no request of a run has such a large id


@dataclass(frozen=True)
class Pool:
    """G equal targets on one draft: the job of each, and all durations.

    job: with one draft rank, of mode sd or ssd. targets: G. device: the forwards of one target, and
    of a draft whose largest forward has the rows of all G. host: costs of one target and its draft.
    """

    job: Job
    targets: int
    device: DeviceCosts
    host: HostCosts

    @classmethod
    def of(cls, job: Job, targets: int, profile: Profile, host: HostCosts) -> Pool:
        """Makes a pool of modelled forwards; row counts go up to those of all targets."""
        shard, batch = job.draft_shard, job.config.batch_size
        assert shard is not None and job.config.drafts == 1, "a pool shares one draft rank"
        alone = DeviceCosts.from_profile(profile, job)
        rows, options = _buckets_of(job, targets), job.draft_options
        tables = {
            k: forwards(profile, shard, rows, targets * batch, replace(options, top_k=k))
            for k in {1, options.top_k}
        }
        shared = DeviceCosts(alone.verify, tables.pop(1), tuple(sorted(tables.items())))
        return cls(job, targets, shared, host)

    @property
    def batch(self) -> int:
        """b, the sequences of one target."""
        return self.job.config.batch_size

    @cached_property
    def verify_s(self) -> tuple[float, ...]:
        """Seconds of a verification, by its rows, from 0 to b(K+1)."""
        held = self.job.target_buckets()
        rows = [bucket(held, n) for n in range(self.job.verify_rows + 1)]
        return tuple(self.device.verify(rows).tolist())

    @cached_property
    def step_s(self) -> Callable[[int], float]:
        """Seconds of a draft forward without a glue in it, by its rows."""
        held = _buckets_of(self.job, self.targets)
        return lru_cache(None)(lambda n: float(self.device.draft_s(bucket(held, n))))

    @cached_property
    def glue_s(self) -> Callable[[int], float]:
        """Seconds of a draft forward with a glue in it, which reads candidates, by its rows."""
        held, read = _buckets_of(self.job, self.targets), self.job.widest + 1
        return lru_cache(None)(lambda n: float(self.device.glue_s(bucket(held, n), read)))


def _buckets_of(job: Job, targets: int) -> list[int]:
    """Returns the row counts that a draft of G targets computes: one target's, all targets', and
    the powers of two between."""
    batch = job.config.batch_size
    exact = batch, job.verify_rows, batch * max(1, job.num_lanes)
    return buckets(batch, *exact, *(targets * rows for rows in exact))


def bucket(held: Sequence[int], rows: int) -> int:
    """Returns the smallest of these row counts that holds `rows`, or `rows` beyond the last."""
    at = bisect_left(held, rows)
    return held[at] if at < len(held) else rows


@dataclass(frozen=True)
class Simulated:
    """A simulated pool: means of its counted rounds, all G targets together.

    waits: of the leads for their speculations, sorted. busy: share of time in the draft's
    forwards. rows, seats: mean rows and groups of a forward. rounds_s: of each target.
    """

    tok_per_s: float
    round_s: float
    hit_rate: float
    waits: tuple[float, ...]
    busy: float
    rows: float
    seats: float
    rounds_s: tuple[tuple[float, ...], ...]

    @property
    def wait_s(self) -> float:
        """A lead's mean wait for its speculation."""
        return sum(self.waits) / len(self.waits)


def simulate(pool: Pool, num_rounds: int, seed: int = 0) -> Simulated:
    """Simulates num_rounds rounds a target, on average, after a burn-in of 8.

    The same pool and seed give the same numbers.
    """
    spread = pool.verify_s[-1] / pool.targets  # between the first outcomes of two targets
    positions = (num_rounds + _BURN_IN) * 2 * (pool.job.lookahead + 1)
    targets = [
        _Target(_outcomes(pool, _FRESH, n, positions, seed), n * spread)
        for n in range(pool.targets)
    ]
    draft = _Draft(pool, targets)
    draft.frames_until(_BURN_IN * pool.targets)
    draft.restart()
    draft.frames_until(num_rounds * pool.targets)
    return draft.means(draft.now)


def replay(pool: Pool, num_rounds: int) -> Simulated:
    """Predicts a run of num_rounds rounds a target from its own draws; all begin at once.

    The means end with the last round of the last target.
    """
    positions = 2 + (num_rounds + 1) * (pool.job.lookahead + 1)
    targets = [
        _Target(_outcomes(pool, 0, n, positions, pool.job.config.seed), 0.0, left=num_rounds)
        for n in range(pool.targets)
    ]
    draft = _Draft(pool, targets)
    draft.frames_until(num_rounds * pool.targets)
    return draft.means(max(target.clock for target in targets))


def _outcomes(pool: Pool, first: int, target: int, positions: int, seed: int) -> list[Outcomes]:
    start = first + target * pool.batch
    return [Outcomes(pool.job, start + n, positions, seed) for n in range(pool.batch)]


@dataclass
class _Target:
    """One target of the pool between two of its rounds.

    clock: when its lead has the outcome that is on its way. hits: of that outcome. finish, backup:
    turns that its late hits and its misses still need. began: forwards before the first step of its
    growth; -1: nothing grows. lanes: of its growth. glues: its glue is due. left: rounds that it
    still decodes, beyond any by default. round_s: seconds of those that it has decoded.
    """

    outcomes: list[Outcomes]
    clock: float
    left: int = sys.maxsize
    finish: int = 0
    backup: int = 0
    began: int = -1
    lanes: int = 0
    glues: bool = False
    round_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hits, self.lengths = [False] * len(self.outcomes), [1] * len(self.outcomes)

    @property
    def won(self) -> int:
        """The number of sequences whose outcomes hit."""
        return sum(self.hits)

    @property
    def answer_lanes(self) -> int:
        """The lanes with which its answer takes part in the next forward."""
        won = self.won
        return won * (self.finish > 0) + (len(self.hits) - won) * (self.backup > 0)

    def decode(self, served: tuple[int, int], fan_outs: tuple[Sequence[int], ...]) -> int:
        """Decides a round of every sequence; returns the tokens that it commits.

        served, fan_outs: tokens and candidates after a (miss, hit).
        """
        before = sum(self.lengths)
        for n, outcomes in enumerate(self.outcomes):
            hit, at = self.hits[n], self.lengths[n]
            k = outcomes.accepted(at, served[hit], hit)
            self.hits[n] = outcomes.hits(at, k, fan_outs[hit][k], k == served[hit])
            self.lengths[n] = at + k + 1
        return sum(self.lengths) - before


class _Draft:
    """The shared draft's clock, the targets in its next forward, and sums over counted rounds."""

    def __init__(self, pool: Pool, targets: list[_Target]) -> None:
        """Takes targets whose first outcomes come at their clocks."""
        self._pool, self._host, self._targets = pool, pool.host, targets
        job = pool.job
        self._most, self._served = job.lookahead, (job.backup_lookahead, job.lookahead)
        self._backup = job.backup_lookahead if job.config.backup == "jit" else 0
        nothing = (0,) * (job.lookahead + 1)
        self._fan_outs = job.fan_out_miss or nothing, job.fan_out or nothing
        self._branches = sum(self._fan_outs[0]), sum(self._fan_outs[1])
        self.now = self._idle_since = 0.0
        self._number = 0  # of the next forward
        travel_s = pool.host.send_s
        self._asked = [(target.clock + travel_s, n) for n, target in enumerate(targets)]
        self._held: list[int] = []  # targets whose outcomes arrived before their glues
        self._answering: list[int] = []
        self._glueing: list[int] = []
        self._growing: deque[tuple[int, int]] = deque()  # (target, began), oldest first
        self._growing_lanes = self._num_growing = 0
        self.restart()

    def restart(self) -> None:
        """Begins to count."""
        self._start, self._waits = self.now, list[float]()
        self._tokens = self._hits = self._forwards = self._rows = self._seats = 0
        self._forward_s = 0.0

    def means(self, end: float) -> Simulated:
        """Returns the means of what was counted until a time."""
        wall, count, forwards = end - self._start, len(self._waits), max(1, self._forwards)
        return Simulated(
            tok_per_s=self._tokens / wall,
            round_s=wall * self._pool.targets / count,
            hit_rate=self._hits / (count * self._pool.batch),
            waits=tuple(sorted(self._waits)),
            busy=self._forward_s / wall,
            rows=self._rows / forwards,
            seats=self._seats / forwards,
            rounds_s=tuple(tuple(target.round_s) for target in self._targets),
        )

    def frames_until(self, rounds: int) -> None:
        """Runs frames until so many rounds are counted."""
        asked = self._asked
        while len(self._waits) < rounds:
            while asked and asked[0][0] <= self.now:
                number = heapq.heappop(asked)[1]
                if self._targets[number].glues:
                    self._held.append(number)
                else:
                    self._outcome(number, self._targets[number])
            if self._answering or self._glueing or self._growing_lanes:
                self._forward()
            else:  # wait for the next outcome
                until, host = asked[0][0], self._host
                napped = until - self._idle_since > host.patience
                self.now = max(self.now, until + host.nap * napped)

    def _outcome(self, number: int, target: _Target) -> None:
        """Looks an outcome up: ends the growth, and sets the steps that the answer needs."""
        steps = 0
        if target.began >= 0:
            steps = min(self._most, self._number - target.began)
            if steps < self._most:
                self._leave(target)
            target.began = -1
        if not target.left:  # It is the stop message.
            return
        won = target.won
        target.finish = self._most - steps if won else 0
        target.backup = self._backup if won < len(target.hits) else 0
        self.now += self._host.reply_s - self._host.draft_send
        if target.finish or target.backup:
            self._answering.append(number)
        else:
            self._send(number, target)

    def _leave(self, target: _Target) -> None:
        """Takes a target's lanes out of the growth."""
        self._growing_lanes -= target.lanes
        self._num_growing -= 1
        self.now += self._host.draft_record

    def _send(self, number: int, target: _Target) -> None:
        """Sends a speculation, and follows its target to the next outcome."""
        host, won = self._host, target.won
        self.now += host.draft_send
        missed = len(target.hits) - won
        served = self._served
        ready, arrived = target.clock + host.ask_s, self.now + host.link
        seen = max(ready, arrived + host.nap * (arrived - ready > host.patience))
        verify_s = self._pool.verify_s[won * (served[1] + 1) + missed * (served[0] + 1)]
        self._hits += won
        self._waits.append(seen - ready)
        self._tokens += target.decode(served, self._fan_outs)
        if self._branches[1]:
            target.glues = True
            target.lanes = won * self._branches[1] + missed * self._branches[0]
            self._glueing.append(number)
        over = seen + verify_s + host.lead_s
        target.round_s.append(over - target.clock)
        target.clock = over
        target.left -= 1
        heapq.heappush(self._asked, (over + host.send_s, number))

    def _forward(self) -> None:
        """Runs one forward with every group's next turn, and its consequences."""
        glueing, answering, host = self._glueing, self._answering, self._host
        rows = self._growing_lanes + len(glueing) * self._pool.job.verify_rows
        rows += sum(self._targets[n].answer_lanes for n in answering)
        seconds = self._pool.glue_s(rows) if glueing else self._pool.step_s(rows)
        self._forwards += 1
        self._forward_s += seconds
        self._rows += rows
        self._seats += len(glueing) + len(answering) + self._num_growing
        self.now += seconds + (host.step if answering or self._num_growing else host.glue)
        self._number += 1
        self._complete()
        self._glueing, self._answering = [], []
        for number in glueing:  # the keys after a glue; lanes grow from the next forward on
            target = self._targets[number]
            self.now += host.keys + host.keys_lane * target.lanes
            target.glues, target.began = False, self._number
            self._growing.append((number, target.began))
            self._growing_lanes += target.lanes
            self._num_growing += 1
        for number in answering:
            target = self._targets[number]
            target.finish, target.backup = max(0, target.finish - 1), max(0, target.backup - 1)
            if target.finish or target.backup:
                self._answering.append(number)
            else:
                self._send(number, target)
        for number in self._held:
            heapq.heappush(self._asked, (self.now, number))
        self._held = []
        self._idle_since = self.now

    def _complete(self) -> None:
        """Takes out the targets whose growth is complete, and forgets growths that were cut."""
        growing = self._growing
        while growing:
            number, began = growing[0]
            target = self._targets[number]
            if target.began == began:
                if self._number - began < self._most:
                    return
                self._leave(target)
            growing.popleft()
