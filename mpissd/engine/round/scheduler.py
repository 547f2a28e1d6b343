"""Schedules requests: a queue, the pages of the KV cache, and who ends, waits or joins.

The scheduler is a pure object: it reads no clock and knows no model. Its caller asks `turn` between
two rounds which sequences leave and join, and passes it each round's result by `take`.

Order. Requests are admitted in the order in which they arrived: the queue waits for the first one,
so that no request waits for ever. If pages run out, the sequence that arrived last is preempted:
its pages go back, and it is computed again later from its prompt and the tokens that it emitted. As
forwards are batch-invariant, bit for bit, its tokens stay the same (temperature 0).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Logprob, Request, Source
from mpissd.engine.round.target import RoundResult

_ORDER = attrgetter("arrived_s", "request_id")


@dataclass(frozen=True)
class Room:
    """Capacity of the ranks.

    sequences: sequences that run at once. context: tokens of a sequence, its prompt included.
    ahead: positions that a round may write after the last token. page: positions of a page. pages:
    of the pool.
    """

    sequences: int
    context: int
    ahead: int
    page: int
    pages: int

    def pages_of(self, tokens: int) -> int:
        """Returns the pages that a sequence of so many tokens needs for its next round."""
        return -(-(tokens + self.ahead) // self.page)


@dataclass
class Task:
    """One request and its progress. Times are seconds of the caller's clock.

    asked: the request as it arrived. max_tokens: tokens that it may emit. deadline_s: the time at
    which it ends (None: never). stop_ids: tokens that end it. cached: tokens of its prompt reused
    from the cache. forced: tokens by its grammar.
    """

    asked: Request
    max_tokens: int
    arrived_s: float = 0.0
    deadline_s: float | None = None
    stop_ids: frozenset[int] = frozenset()
    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    drafted: int = 0
    accepted: int = 0
    rejected: int = 0
    hits: int = 0
    rounds: int = 0
    cached: int = 0
    forced: int = 0

    @property
    def length(self) -> int:
        """Committed tokens, the prompt included."""
        return len(self.asked.prompt) + len(self.tokens)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.asked.request_id

    def request(self) -> Request:
        """Returns the sequence to admit, with the tokens that it emitted before a preemption."""
        known = (*self.asked.prompt, *self.tokens)
        seen = replace(self.asked, prompt=known, first_token=known[-1])
        return replace(seen, epoch=self.epoch, answered=len(self.tokens))


class Emitted(NamedTuple):
    """The tokens of a request from one round, or of one that ended between two rounds none.

    ended: "stop", "length", "cancelled" or "deadline" if it is over. sources: by token, NONE for
    the target's own.
    """

    task: Task
    ended: str | None
    tokens: list[int]
    sources: list[Source]
    logprobs: list[Logprob] | None


class Turn(NamedTuple):
    """Changes before the next round."""

    ended: list[Emitted]
    leave: list[int]
    join: list[Request]


class Scheduler:
    """The requests of a server: those that wait, in order, and those that run."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._waiting: list[Task] = []  # in order of _ORDER
        self._running: dict[int, Task] = {}
        self._leaving: list[int] = []  # running in the last round, released before the next one
        self._ended: list[Emitted] = []
        self._deadlines: list[tuple[float, int]] = []  # rising (time, request id), until it ends
        self.num_preempted = self.num_rounds = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> list[Task]:
        """The requests that hold pages, in the order in which they were admitted."""
        return list(self._running.values())

    @property
    def free_pages(self) -> int:
        """Number of pages that are not reserved."""
        pages_of = self.room.pages_of
        return self.room.pages - sum(pages_of(task.length) for task in self._running.values())

    def tasks(self, ids: Iterable[int]) -> list[Task]:
        """Returns the running requests among these ids, in their order."""
        return [self._running[n] for n in ids if n in self._running]

    def submit(self, task: Task) -> None:
        """Takes a request; raises ConfigError for one that can never be decoded."""
        room, count = self.room, len(task.asked.prompt)
        if not 0 < count < room.context:
            raise ConfigError(
                f"prompt of {count} tokens: allowed: 1..{room.context - 1}, since the model's "
                f"context has {room.context}"
            )
        if task.max_tokens < 1:
            raise ConfigError(f"max_tokens={task.max_tokens}: allowed: 1 or more")
        task.max_tokens = min(task.max_tokens, room.context - count)
        if room.pages_of(count + task.max_tokens) > room.pages:
            most = room.pages * room.page - room.ahead
            raise ConfigError(
                f"{count} tokens and max_tokens={task.max_tokens}: allowed: {most} together, which "
                "is what the KV cache holds"
            )
        insort(self._waiting, task, key=_ORDER)
        if task.deadline_s is not None:
            insort(self._deadlines, (task.deadline_s, task.request_id))

    def cancel(self, request_id: int, reason: str = "cancelled") -> None:
        """Ends a request; one that is over or unknown is ignored."""
        task = self._running.pop(request_id, None)
        if task is not None:
            self._leaving.append(request_id)
        else:
            task = next((t for t in self._waiting if t.request_id == request_id), None)
            if task is None:
                return
            self._waiting.remove(task)
        self._forget_deadline(task)
        self._ended.append(Emitted(task, reason, [], [], None))

    def _forget_deadline(self, task: Task) -> None:
        if task.deadline_s is not None:
            del self._deadlines[bisect_left(self._deadlines, (task.deadline_s, task.request_id))]

    def turn(self, now: float) -> Turn:
        """Returns which requests end, leave and join before the next round, at time `now`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.cancel(self._deadlines[0][1], "deadline")
        room, join, before = self.room, list[Request](), self.num_preempted
        while self.free_pages < 0:
            # The sequence that arrived last goes back until the others have the pages that they
            # need. The first one always stays: the pool holds at least one whole sequence.
            last = max(self._running.values(), key=_ORDER)
            del self._running[last.request_id]
            self._leaving.append(last.request_id)
            last.epoch += 1
            insort(self._waiting, last, key=_ORDER)
            self.num_preempted += 1
        if self.num_preempted == before:
            while self._waiting and len(self._running) < room.sequences:
                task = self._waiting[0]
                # Each running sequence may need a page soon; taking it from a new one would be
                # wasted work.
                spare = self.free_pages - len(self._running)
                if self._running and room.pages_of(task.length) > spare:
                    break
                self._running[task.request_id] = self._waiting.pop(0)
                join.append(task.request())
        turn = Turn(self._ended, self._leaving, join)
        self._ended, self._leaving = [], []
        return turn

    def take(self, result: RoundResult) -> list[Emitted]:
        """Counts a round; returns the tokens of each request that still runs."""
        self.num_rounds += 1
        for request_id, count in result.adopted.items():
            if (one := self._running.get(request_id)) and not one.epoch:
                one.cached = count
        drafted, outcome = result.speculation, result.outcome
        rows = zip(outcome.rows.tolist(), drafted.rows.tolist(), strict=True)
        given = list[Emitted]()
        for row, ((request_id, epoch, _, accepted, bonus), served) in enumerate(rows):
            task = self._running.get(request_id)
            if task is None or task.epoch != epoch:  # cancelled in this round
                continue
            source, hit, count = served[:3]
            task.rounds += 1
            task.drafted += count
            task.accepted += accepted
            task.rejected += accepted < count and not drafted.is_lost  # lost: not judged
            task.hits += hit
            tokens = [*served[3 : 3 + accepted], bonus, *result.forced.get(row, ())]
            tokens = tokens[: task.max_tokens - len(task.tokens)]
            sources = [*[Source(source)] * accepted, *[Source.NONE] * len(tokens)]
            logprobs, reason = result.logprobs.get(row), None
            if len(task.tokens) + len(tokens) == task.max_tokens:
                reason = "length"
            for n, token in enumerate(tokens, 1):
                if token in task.stop_ids:
                    tokens, reason = tokens[:n], "stop"
                    break
            task.tokens += tokens
            task.forced += max(0, len(tokens) - accepted - 1)
            if reason is not None:
                del self._running[request_id]
                self._leaving.append(request_id)
                self._forget_deadline(task)
            kept = slice(len(tokens))
            shown = None if logprobs is None else logprobs[kept]
            given.append(Emitted(task, reason, tokens, sources[kept], shown))
        return given
