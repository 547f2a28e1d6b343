"""Schedules requests: a queue, the pages of the KV cache, and which requests end, wait or join.

The scheduler reads no clock and knows no model. Its caller asks `turn` between two rounds which
sequences leave and join, and passes it each round's result by `take`; `step` does both for a run.

Order. Requests are admitted in the order in which they arrived: the queue waits for the first one,
so that no request waits for ever. If pages run out, the sequence that arrived last is preempted:
its pages go back, and it is computed again later from its prompt and the tokens that it emitted. As
forwards are batch-invariant, bit for bit, its tokens stay the same (temperature 0).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from mpissd.common.errors import ConfigError
from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Logprob, Request
from mpissd.engine.round.target import RoundResult, TargetLoop

UNLIMITED = 1 << 62
_ORDER = attrgetter("arrived_s", "request_id")


class Endings:
    """Ends sequences at a stop token, or when they have no room for more tokens. A subclass may
    remember each sequence's tokens, so each run of the decoding loops needs a new object."""

    def __init__(self, *stop_tokens: int, room: Callable[[int], int] | None = None) -> None:
        """room: returns the tokens that a request may emit, by its id (None: any number)."""
        self._stop = frozenset(stop_tokens)
        self._room = room

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        """Returns how many of a round's `tokens` the sequence keeps if it ends with them, or None
        if it goes on; before: the number of its earlier tokens."""
        kept = self._stopped(request_id, tokens)
        left = len(tokens) + 1 if self._room is None else self._room(request_id) - before
        if left > len(tokens):
            return kept
        return left if kept is None else min(kept, left)

    def _stopped(self, request_id: int, tokens: Sequence[int]) -> int | None:
        """Returns the number of tokens up to and including a stop token, or None without one."""
        for n, token in enumerate(tokens, 1):
            if token in self._stop:
                return n
        return None


@dataclass(frozen=True)
class Capacity:
    """The capacity of the ranks, by default limited only in the number of sequences.

    sequences: the most that run at once. context: the most tokens of a sequence, its prompt
    included. ahead: positions that a round may write after the last token. page: positions of a
    page of the KV cache. pages: of the cache.
    """

    sequences: int
    context: int = UNLIMITED
    ahead: int = 0
    page: int = 1
    pages: int = UNLIMITED

    def pages_of(self, tokens: int) -> int:
        """Returns the pages that a sequence of `tokens` tokens needs for its next round."""
        return -(-(tokens + self.ahead) // self.page)


@dataclass
class Task:
    """A request and its progress. Times are seconds of the caller's clock.

    request: as it arrived. max_tokens: tokens that it may emit. deadline_s: the time at which it
    ends (None: never). cached: tokens of its prompt that the cache had. forced: tokens that its
    grammar forced.
    """

    request: Request
    max_tokens: int = UNLIMITED
    arrived_s: float = 0.0
    deadline_s: float | None = None
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
        return len(self.request.prompt) + len(self.tokens)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    def count(self, drafted: int, accepted: int, hit: int, *, is_judged: bool) -> None:
        """Counts a round: its drafted and accepted tokens, and whether the cache was hit.

        is_judged: whether drafts that were not accepted were rejected, or their judgement was lost.
        """
        self.rounds += 1
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += is_judged and accepted < drafted
        self.hits += hit

    def emit(self, tokens: Sequence[int], forced: int) -> None:
        """Takes a round's tokens, of which a grammar forced some."""
        self.tokens += tokens
        self.forced += forced

    def preempt(self) -> None:
        """Begins a new epoch: the sequence will be computed again."""
        self.epoch += 1

    def reuse(self, count: int) -> None:
        """Notes that other sequences have stored `count` tokens of the prompt."""
        if not self.epoch:
            self.cached = count

    def limit(self, most: int) -> None:
        """Lets the request emit at most so many tokens."""
        self.max_tokens = min(self.max_tokens, most)

    def admitted(self) -> Request:
        """Returns the sequence to admit, with the tokens that it emitted before a preemption."""
        prompt = (*self.request.prompt, *self.tokens)
        if not prompt:
            return self.request
        answered = len(self.tokens)
        resumed = replace(self.request, prompt=prompt, first_token=prompt[-1], answered=answered)
        return replace(resumed, epoch=self.epoch)


class Emitted(NamedTuple):
    """The tokens of a request from one round, or of one that ended between two rounds none.

    ended: "stop", "length", "cancelled" or "deadline" if it is over. accepted: how many of the
    round's tokens were drafted, by `source`; the others are the target's own. logprobs: of tokens.
    stop: where the endings end the sequence, counted in all of its tokens, or None.
    """

    task: Task
    ended: str | None
    tokens: Sequence[int] = ()
    accepted: int = 0
    source: int = 0
    logprobs: list[Logprob] | None = None
    stop: int | None = None


class Turn(NamedTuple):
    """Changes before the next round."""

    ended: list[Emitted]
    leave: list[int]
    join: list[Request]


class Scheduler:
    """The requests of a server, or the prompts of a run: those that wait, in order, and those that
    run."""

    def __init__(self, room: Capacity, endings: Endings | None = None) -> None:
        """endings: end sequences; None: only their limits do."""
        self.room = room
        self._endings = endings
        self._waiting: list[Task] = []  # in order of _ORDER
        self._running: dict[int, Task] = {}
        self._leaving: list[int] = []  # running in the last round, released before the next one
        self._ended: list[Emitted] = []
        self._can_end = endings is not None  # or a request is limited
        self._deadlines: list[tuple[float, int]] = []  # rising (time, request id), until it ends
        self.num_preempted = self.num_rounds = 0

    @property
    def num_waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> Collection[Task]:
        """The requests that hold pages, in the order in which they were admitted."""
        return self._running.values()

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
        room = self.room
        count = len(task.request.prompt)
        if not 0 < count < room.context:
            raise ConfigError(
                f"prompt of {count} tokens: allowed: 1..{room.context - 1}, since the model's "
                f"context has {room.context}"
            )
        if task.max_tokens < 1:
            raise ConfigError(f"max_tokens={task.max_tokens}: allowed: 1 or more")
        task.limit(room.context - count)
        if room.pages_of(count + task.max_tokens) > room.pages:
            most = room.pages * room.page - room.ahead
            raise ConfigError(
                f"{count} tokens and max_tokens={task.max_tokens}: allowed: {most} together, which "
                "is what the KV cache holds"
            )
        self.queue(task)

    def queue(self, task: Task) -> None:
        """Takes a request that the ranks have room for, with a prompt or without."""
        insort(self._waiting, task, key=_ORDER)
        self._can_end = self._can_end or task.max_tokens < UNLIMITED
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
        self._ended.append(Emitted(task, reason))

    def _forget_deadline(self, task: Task) -> None:
        if task.deadline_s is not None:
            del self._deadlines[bisect_left(self._deadlines, (task.deadline_s, task.request_id))]

    def turn(self, now: float = 0.0) -> Turn:
        """Returns which requests end, leave and join before the next round, at time `now`."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.cancel(self._deadlines[0][1], "deadline")
        room = self.room
        join = list[Request]()
        before = self.num_preempted
        while self.free_pages < 0:
            # The sequence that arrived last goes back until the others have the pages that they
            # need. The first one always stays: the pool holds at least one whole sequence.
            last = max(self._running.values(), key=_ORDER)
            del self._running[last.request_id]
            self._leaving.append(last.request_id)
            last.preempt()
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
                join.append(task.admitted())
        turn = Turn(self._ended, self._leaving, join)
        self._ended = []
        self._leaving = []
        return turn

    def take(self, result: RoundResult) -> list[Emitted]:
        """Counts a round; returns the tokens of each request that still runs."""
        self.num_rounds += 1
        for request_id, count in result.adopted.items():
            if (task := self._running.get(request_id)) is not None:
                task.reuse(count)
        speculation = result.speculation
        rows = zip(result.outcome.rows.tolist(), speculation.rows.tolist(), strict=True)
        emitted = list[Emitted]()
        for row, ((request_id, epoch, _, accepted, bonus), drafted) in enumerate(rows):
            task = self._running.get(request_id)
            if task is None or task.epoch != epoch:  # cancelled in this round
                continue
            source, hit, count = drafted[:3]
            task.count(count, accepted, hit, is_judged=not speculation.is_lost)
            tokens = [*drafted[3 : 3 + accepted], bonus, *result.forced.get(row, ())]
            before = len(task.tokens)
            kept = None
            if self._endings is not None:
                kept = self._endings.kept(request_id, before, tokens)
            stop = None if kept is None else before + kept
            reason = None if kept is None else "stop"
            left = task.max_tokens - before
            if left <= len(tokens) and (kept is None or left < kept):
                kept = left
                reason = "length"
            tokens = tokens[:kept]
            task.emit(tokens, max(0, len(tokens) - accepted - 1))
            if reason is not None:
                del self._running[request_id]
                self._leaving.append(request_id)
                self._forget_deadline(task)
            logprobs = result.logprobs.get(row)
            shown = None if logprobs is None else logprobs[: len(tokens)]
            emitted.append(Emitted(task, reason, tokens, accepted, source, shown, stop))
        return emitted

    def step(self, loop: TargetLoop, records: RoundRecords) -> RoundResult:
        """Decodes one round of a run's prompts, and adds it to the records: sequences that have
        ended leave the loop, and the next ones join it."""
        result = loop.step()
        if self._can_end:
            for emitted in self.take(result):
                if emitted.stop is not None:
                    records.ends[emitted.task.request_id] = emitted.stop
            if self._leaving:
                turn = self.turn()
                loop.finish(turn.leave)
                loop.admit(turn.join)
        records.add(result.t_target_s, result.speculation, result.outcome)
        return result
