"""Simulates targets that share a draft, forward by forward [docs/pools.md].

A *frame* of the draft is the host work of the groups that have some, in turn, and one forward that
carries the next turn of every group: steps that answer an outcome, rows of a glue (scoring
forward), growth lanes. An outcome that arrives while a forward runs waits for its end. A target's
own round is simulated as in lab.predict.simulation, which this reproduces with one target.

Outcomes on their way wait in a heap, and the draft's forwards come one after another. Growth is not
counted lane by lane: all that grow take part in every forward, so the number of forwards since a
group began gives its progress. A round of a target takes some 20 µs of Python.
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from dataclasses import dataclass, field

from mpissd.lab.pools.durations import Pool
from mpissd.lab.pools.fates import Drawn, Fates, Laws, Replayed
from mpissd.lab.pools.tally import Simulated, Tally

_BURN_IN = 8  # rounds a target before those that count


@dataclass
class Target:
    """One target of the pool between two of its rounds.

    hits: of the outcome that is on its way. clock: when its lead has that outcome. steps: growth
    steps that the last growth had taken. finish, backup: turns that its late hits and its misses
    still need. began: forwards before the first step of its growth; -1: nothing grows. lanes: of
    its growth. glues: its glue is due. left: rounds that it still decodes, beyond any by default.
    round_s: seconds of those that it has decoded.
    """

    fates: Fates
    hits: list[bool]
    clock: float
    steps: int = 0
    finish: int = 0
    backup: int = 0
    began: int = -1
    lanes: int = 0
    glues: bool = False
    left: int = sys.maxsize
    round_s: list[float] = field(default_factory=list)

    @property
    def won(self) -> int:
        """The number of sequences whose outcomes hit."""
        return sum(self.hits)

    @property
    def answer_lanes(self) -> int:
        """The lanes with which its answer takes part in the next forward."""
        won = self.won
        return won * (self.finish > 0) + (len(self.hits) - won) * (self.backup > 0)


def simulate(pool: Pool, num_rounds: int, seed: int = 0) -> Simulated:
    """Simulates num_rounds rounds a target, on average, after a burn-in of 8.

    The same pool and seed give the same numbers.
    """
    laws, most = Laws.of(pool.job), num_rounds + _BURN_IN
    spread = pool.verify_s[-1] / pool.targets  # between the first outcomes of two targets
    draft = _Draft(
        pool,
        [
            Target(Drawn(laws, pool.batch, n, 2 * most, seed), [False] * pool.batch, n * spread)
            for n in range(pool.targets)
        ],
    )
    draft.frames_until(_BURN_IN * pool.targets)
    draft.tally = Tally(start=draft.now)
    draft.frames_until(num_rounds * pool.targets)
    return Simulated.of(draft.tally, draft.now, pool)


def replay(pool: Pool, num_rounds: int) -> tuple[Simulated, list[list[float]]]:
    """Predicts a run of num_rounds rounds a target from its own draws; all begin at once.

    Returns its means, which end with the last round of the last target, and the seconds of each
    target's rounds.
    """
    targets = [
        Target(Replayed(pool.job, n, num_rounds), [False] * pool.batch, 0.0, left=num_rounds)
        for n in range(pool.targets)
    ]
    draft = _Draft(pool, targets)
    draft.frames_until(num_rounds * pool.targets)
    end = max(target.clock for target in targets)
    return Simulated.of(draft.tally, end, pool), [target.round_s for target in targets]


class _Draft:
    """The shared draft's clock, and which targets take part in its next forward."""

    def __init__(self, pool: Pool, targets: list[Target]) -> None:
        """Takes targets whose first outcomes come at their clocks."""
        self._pool, self._host, self._targets = pool, pool.host, targets
        job = pool.job
        self._most, self._served = job.lookahead, (job.backup_lookahead, job.lookahead)
        self._backup = job.backup_lookahead if job.config.backup == "jit" else 0
        self._branches = sum(job.fan_out_miss or ()), sum(job.fan_out or ())
        self.tally = Tally()
        self.now = self._idle_since = 0.0
        self._number = 0  # of the next forward
        travel_s = pool.host.lead_send + pool.host.link
        self._asked = [(target.clock + travel_s, n) for n, target in enumerate(targets)]
        self._held: list[int] = []  # targets whose outcomes arrived before their glues
        self._answering: list[int] = []
        self._glueing: list[int] = []
        self._growing: deque[tuple[int, int]] = deque()  # (target, began), oldest first
        self._growing_lanes = self._num_growing = 0

    def frames_until(self, rounds: int) -> None:
        """Runs frames until the tally has this many rounds."""
        while len(self.tally.waits) < rounds:
            self._take()
            if self._answering or self._glueing or self._growing_lanes:
                self._forward()
            else:
                self._sleep()

    def _sleep(self) -> None:
        """Waits for the next outcome."""
        until = self._asked[0][0]
        nap = self._host.nap if until - self._idle_since > self._host.patience else 0.0
        self.now = max(self.now, until + nap)

    def _take(self) -> None:
        """Does the host work of every outcome that has arrived; answers those that are ready."""
        asked = self._asked
        while asked and asked[0][0] <= self.now:
            number = heapq.heappop(asked)[1]
            if self._targets[number].glues:
                self._held.append(number)
            else:
                self._outcome(number, self._targets[number])

    def _outcome(self, number: int, target: Target) -> None:
        """Looks an outcome up: ends the growth, and sets the steps that the answer needs."""
        steps = target.steps = self._end_growth(target)
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

    def _end_growth(self, target: Target) -> int:
        """Ends a target's growth; returns the steps that it has taken, at most K."""
        if target.began < 0:
            return 0
        steps = min(self._most, self._number - target.began)
        if steps < self._most:
            self._leave(target)
        target.began = -1
        return steps

    def _leave(self, target: Target) -> None:
        """Takes a target's lanes out of the growth."""
        self._growing_lanes -= target.lanes
        self._num_growing -= 1
        self.now += self._host.draft_record

    def _send(self, number: int, target: Target) -> None:
        """Sends a speculation, and follows its target to the next outcome."""
        host, won = self._host, target.won
        self.now += host.draft_send
        missed = len(target.hits) - won
        served = self._served
        ready, arrived = target.clock + host.ask_s, self.now + host.link
        seen = max(ready, arrived + (host.nap if arrived - ready > host.patience else 0.0))
        verify_s = self._pool.verify_s[won * (served[1] + 1) + missed * (served[0] + 1)]
        tokens, hits = target.fates.next(target.hits, served)
        self.tally.note(tokens, won, seen - ready)
        if self._branches[1]:
            target.glues = True
            target.lanes = won * self._branches[1] + missed * self._branches[0]
            self._glueing.append(number)
        over = seen + verify_s + host.lead_s
        target.round_s.append(over - target.clock)
        target.hits, target.clock = hits, over
        target.left -= 1
        heapq.heappush(self._asked, (target.clock + host.lead_send + host.link, number))

    def _forward(self) -> None:
        """Runs one forward with every group's next turn, and its consequences."""
        glueing, answering = self._glueing, self._answering
        rows = self._growing_lanes + len(glueing) * self._pool.job.verify_rows
        rows += sum(self._targets[n].answer_lanes for n in answering)
        seconds = self._pool.glue_s(rows) if glueing else self._pool.step_s(rows)
        seats = len(glueing) + len(answering) + self._num_growing
        self.tally.note_forward(seconds, rows, seats)
        steps = answering or self._num_growing
        self.now += seconds + (self._host.step if steps else self._host.glue)
        self._number += 1
        self._complete()
        self._glueing, self._answering = [], []
        for number in glueing:
            self._begin_growth(number, self._targets[number])
        for number in answering:
            self._advance(number, self._targets[number])
        for number in self._held:
            heapq.heappush(self._asked, (self.now, number))
        self._held = []
        self._idle_since = self.now

    def _advance(self, number: int, target: Target) -> None:
        """Counts one turn of an answer; sends it when it is complete."""
        target.finish, target.backup = max(0, target.finish - 1), max(0, target.backup - 1)
        if target.finish or target.backup:
            self._answering.append(number)
        else:
            self._send(number, target)

    def _begin_growth(self, number: int, target: Target) -> None:
        """Makes the keys after a glue; the lanes grow from the next forward on."""
        self.now += self._pool.keys_s(target.lanes)
        target.glues, target.began = False, self._number
        self._growing.append((number, target.began))
        self._growing_lanes += target.lanes
        self._num_growing += 1

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
