"""Simulates targets that share a draft, forward by forward [docs/pools.md].

A *frame* of the draft is the host work of each group that has some, in turn, and one forward that
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, buckets
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
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
        """Makes a pool of modelled forwards; row counts go up to the rows of all targets."""
        assert job.config.drafts == 1, "a pool shares one draft rank"
        rows = _buckets_of(job, targets)
        device = DeviceCosts.from_profile(profile, job, draft_rows=rows, targets=targets)
        return cls(job, targets, device, host)

    @property
    def batch(self) -> int:
        """b, the sequences of one target."""
        return self.job.config.batch_size


def _buckets_of(job: Job, targets: int) -> list[int]:
    """Returns the row counts that a draft of G targets computes: one target's, all targets', and
    the powers of two between."""
    batch = job.config.batch_size
    exact = batch, job.verify_rows, job.group_lanes
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
    full = bucket(pool.job.target_buckets(), pool.job.verify_rows)
    spread = float(pool.device.verify(full)) / pool.targets  # between first outcomes of two targets
    positions = (num_rounds + _BURN_IN) * 2 * (pool.job.lookahead + 1)
    draft = _Draft(pool, _FRESH, positions, seed, spread)
    draft.run(_BURN_IN * pool.targets)
    return draft.run(num_rounds * pool.targets)


def replay(pool: Pool, num_rounds: int) -> Simulated:
    """Predicts a run of num_rounds rounds a target from its own draws; all begin at once.

    The means end with the last round of the last target.
    """
    positions = 2 + (num_rounds + 1) * (pool.job.lookahead + 1)
    draft = _Draft(pool, 0, positions, pool.job.config.seed, left=num_rounds)
    return draft.run(num_rounds * pool.targets, to_last_round=True)


@dataclass
class _Target:
    """One target of the pool between two of its rounds.

    clock: when its lead has the outcome that is on its way. hits: of that outcome. finish, backup:
    turns that its late hits and its misses still need. began: forwards before the first step of its
    growth; -1: nothing grows. lanes: of its growth. glues: its glue is due. left: rounds that it
    still decodes. round_s: seconds of those that it has decoded.
    """

    outcomes: list[Outcomes]
    clock: float
    left: int
    finish: int = 0
    backup: int = 0
    began: int = -1
    lanes: int = 0
    glues: bool = False
    won: int = 0  # sequences whose outcomes hit
    round_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hits, self.lengths = [False] * len(self.outcomes), [1] * len(self.outcomes)


class _Draft:
    """The shared draft's clock, the targets in its next forward, and sums over counted rounds."""

    def __init__(
        self,
        pool: Pool,
        first: int,
        positions: int,
        seed: int,
        spread_s: float = 0.0,
        left: int = sys.maxsize,
    ) -> None:
        """Draws the outcomes of sequences from id `first` on, each of so many positions.

        spread_s: between the first outcomes of two targets. left: rounds of each.
        """
        self._pool, self._host, job, batch = pool, pool.host, pool.job, pool.batch
        drawn = [Outcomes(job, first + n, positions, seed) for n in range(pool.targets * batch)]
        self._targets = targets = [
            _Target(drawn[n * batch : (n + 1) * batch], n * spread_s, left)
            for n in range(pool.targets)
        ]
        self._most, self._served = job.lookahead, (job.backup_lookahead, job.lookahead)
        self._backup = job.backup_lookahead if job.config.backup == "jit" else 0
        nothing = (0,) * (job.lookahead + 1)
        self._fan_outs = job.fan_out_miss or nothing, job.fan_out or nothing
        self._branches = sum(self._fan_outs[0]), sum(self._fan_outs[1])
        held, shared, device = job.target_buckets(), _buckets_of(job, pool.targets), pool.device
        rows = [bucket(held, n) for n in range(job.verify_rows + 1)]
        self._verify_s = device.verify(rows).tolist()  # by its rows
        self._step_s = lru_cache(None)(lambda n: float(device.draft_s(bucket(shared, n))))
        # Forwards with a glue in them read out candidates.
        read = job.widest + 1
        self._glue_s = lru_cache(None)(lambda n: float(device.glue_s(bucket(shared, n), read)))
        self._now = self._idle_since = 0.0
        self._number = 0  # number of the next forward
        travel_s = pool.host.send_s
        self._asked = [(target.clock + travel_s, n) for n, target in enumerate(targets)]
        self._held: list[int] = []  # targets whose outcomes arrived before their glues
        self._answering: list[int] = []
        self._glueing: list[int] = []
        self._growing: deque[tuple[int, int]] = deque()  # (target, began), oldest first
        self._growing_lanes = self._num_growing = 0

    def run(self, rounds: int, *, to_last_round: bool = False) -> Simulated:
        """Runs frames until so many more rounds have been decoded; returns their means.

        to_last_round: the means end with the last target's round, not with the draft's frame.
        """
        start, asked, host = self._now, self._asked, self._host
        self._waits, self._forward_s = list[float](), 0.0
        self._tokens = self._hits = self._forwards = self._rows = self._seats = 0
        while len(self._waits) < rounds:
            while asked and asked[0][0] <= self._now:
                number = heapq.heappop(asked)[1]
                if self._targets[number].glues:
                    self._held.append(number)
                else:
                    self._look_up(number, self._targets[number])
            if self._answering or self._glueing or self._growing_lanes:
                self._forward()
            else:  # wait for the next outcome
                until = asked[0][0]
                napped = until - self._idle_since > host.patience
                self._now = max(self._now, until + host.nap * napped)
        end = max(target.clock for target in self._targets) if to_last_round else self._now
        wall, count, forwards = end - start, len(self._waits), max(1, self._forwards)
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

    def _look_up(self, number: int, target: _Target) -> None:
        """Looks an outcome up: ends the growth, and sets the steps that the answer needs."""
        steps = 0
        if target.began >= 0:
            steps = min(self._most, self._number - target.began)
            if steps < self._most:
                self._end_growth(target)
            target.began = -1
        if not target.left:  # It is the stop message.
            return
        target.finish = self._most - steps if target.won else 0
        target.backup = self._backup if target.won < len(target.hits) else 0
        self._now += self._host.reply_s - self._host.draft_send
        if target.finish or target.backup:
            self._answering.append(number)
        else:
            self._send(number, target)

    def _end_growth(self, target: _Target) -> None:
        self._growing_lanes -= target.lanes
        self._num_growing -= 1
        self._now += self._host.draft_record

    def _send(self, number: int, target: _Target) -> None:
        """Sends a speculation, and follows its target to the next outcome."""
        host, won, served = self._host, target.won, self._served
        self._now += host.draft_send
        missed = len(target.hits) - won
        ready, arrived = target.clock + host.ask_s, self._now + host.link
        seen = max(ready, arrived + host.nap * (arrived - ready > host.patience))
        verify_s = self._verify_s[won * (served[1] + 1) + missed * (served[0] + 1)]
        self._hits += won
        self._waits.append(seen - ready)
        if self._branches[1]:
            target.glues = True
            target.lanes = won * self._branches[1] + missed * self._branches[0]
            self._glueing.append(number)
        for n, outcomes in enumerate(target.outcomes):
            hit, at = target.hits[n], target.lengths[n]
            k = outcomes.accepted(at, served[hit], hit)
            target.hits[n] = outcomes.hits(at, k, self._fan_outs[hit][k], k == served[hit])
            target.lengths[n] = at + k + 1
            self._tokens += k + 1
        target.won = sum(target.hits)
        over = seen + verify_s + host.lead_s
        target.round_s.append(over - target.clock)
        target.clock = over
        target.left -= 1
        heapq.heappush(self._asked, (over + host.send_s, number))

    def _forward(self) -> None:
        """Runs one forward with every group's next turn, and its consequences."""
        glueing, answering, host = self._glueing, self._answering, self._host
        rows = self._growing_lanes + len(glueing) * self._pool.job.verify_rows
        for target in (self._targets[n] for n in answering):
            missed = len(target.hits) - target.won
            rows += target.won * (target.finish > 0) + missed * (target.backup > 0)
        seconds = self._glue_s(rows) if glueing else self._step_s(rows)
        self._forwards += 1
        self._forward_s += seconds
        self._rows += rows
        self._seats += len(glueing) + len(answering) + self._num_growing
        self._now += seconds + (host.step if answering or self._num_growing else host.glue)
        self._number += 1
        # Growths that are complete end, and those that were cut are forgotten.
        growing = self._growing
        while growing:
            number, began = growing[0]
            target = self._targets[number]
            if target.began == began:
                if self._number - began < self._most:
                    break
                self._end_growth(target)
            growing.popleft()
        self._glueing, self._answering = [], []
        for number in glueing:  # the keys after a glue; lanes grow from the next forward on
            target = self._targets[number]
            self._now += host.keys + host.keys_lane * target.lanes
            target.glues, target.began = False, self._number
            growing.append((number, target.began))
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
            heapq.heappush(self._asked, (self._now, number))
        self._held = []
        self._idle_since = self._now
