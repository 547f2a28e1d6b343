"""Schedules requests: decides which requests wait, join and end, by the free pages of the KV cache.

The scheduler reads no clock and knows no model. The caller passes each round's result to `take`,
and asks `turn` between two rounds which sequences leave and join. `step` does both for a run.

Requests are admitted in the order of their arrival. While the first request of the queue does not
fit, all wait, so that none waits for ever. If pages run out, the sequence that arrived last is
preempted: it loses its pages, and is computed again later from its prompt and the tokens that it
emitted. The tokens stay the same at temperature 0, because forwards are batch-invariant, bit for
bit.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple

from mpissd.common.errors import ConfigError
from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Logprob, Request
from mpissd.engine.round.target import RoundResult, TargetLoop

UNLIMITED = 1 << 62  # a number of tokens or pages that is never reached
_ORDER = attrgetter("arrived_s", "request_id")


class Endings:
    """Decides where sequences end: at a stop token, or when there is no room for more tokens.

    Each run needs a new object, because a subclass may remember the tokens of sequences.
    """

    def __init__(self, *stop_tokens: int, room: Callable[[int], int] | None = None) -> None:
        """stop_tokens: the ids that end a sequence. room: maps a request id to the number of tokens
        that the request may emit (None: any number)."""
        self._stop = frozenset(stop_tokens)
        self._room = room

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        """Returns how many of a round's `tokens` a sequence keeps if it ends in this round, or None
        if it goes on. before: the number of its earlier tokens."""
        kept = self._stopped(request_id, tokens)
        left = len(tokens) + 1 if self._room is None else self._room(request_id) - before
        if left > len(tokens):
            return kept
        return left if kept is None else min(kept, left)

    def _stopped(self, request_id: int, tokens: Sequence[int]) -> int | None:
        """Returns the number of tokens up to and including a stop token, or None without one."""
        return stopped(tokens, self._stop)


def stopped(tokens: Sequence[int], stops: Collection[int]) -> int | None:
    """Returns the number of tokens up to and including the first one in `stops`, or None."""
    return next((n for n, token in enumerate(tokens, 1) if token in stops), None)


@dataclass(frozen=True)
class Capacity:
    """How many sequences and tokens the ranks have room for; by default the tokens are unlimited.

    sequences: the most sequences that run at once. context: the most tokens of a sequence with its
    prompt. ahead: how many KV positions a round may write after a sequence's last token. page: the
    number of positions in a page of the KV cache. pages: the number of pages.
    """

    sequences: int
    context: int = UNLIMITED
    ahead: int = 0
    page: int = 1
    pages: int = UNLIMITED

    def pages_of(self, tokens: int) -> int:
        """Returns how many KV pages a sequence of `tokens` tokens needs for its next round."""
        return -(-(tokens + self.ahead) // self.page)


@dataclass
class Task:
    """A request and its progress. Times are seconds of the caller's clock.

    request: the request as it arrived. max_tokens: the most tokens of its answer. deadline_s: the
    time when it ends at the latest (None: never). tokens: its answer so far. epoch: how often it
    was preempted. drafted, accepted: how many tokens were drafted and accepted. rejected: in how
    many rounds a drafted token was rejected. hits: in how many rounds the speculation cache held
    the draft. cached: how many prompt tokens other sequences had stored in the KV cache. forced:
    how many tokens its grammar forced. steps: {number of accepted tokens: rounds with drafts}.
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
    steps: Counter[int] = field(default_factory=Counter)

    @property
    def length(self) -> int:
        """The number of committed tokens, the prompt included."""
        return len(self.request.prompt) + len(self.tokens)

    @property
    def request_id(self) -> int:
        """The request's id."""
        return self.request.request_id

    def count(self, drafted: int, accepted: int, hit: int, *, is_judged: bool) -> None:
        """Counts one round of the request. drafted, accepted: its numbers of drafted and accepted
        tokens. hit: 1 if the speculation cache was hit, else 0. is_judged: False if the drafted
        tokens could not be verified, because their distributions were lost with the draft rank."""
        self.rounds += 1
        self.steps[accepted] += drafted > 0
        self.drafted += drafted
        self.accepted += accepted
        self.rejected += is_judged and accepted < drafted
        self.hits += hit

    def admitted(self) -> Request:
        """Returns the request as it is passed to the loop. After a preemption its prompt is
        followed by the tokens that it had emitted, which are computed again as a prompt."""
        prompt = (*self.request.prompt, *self.tokens)
        if not prompt:
            return self.request
        answered = len(self.tokens)
        resumed = replace(self.request, prompt=prompt, first_token=prompt[-1], answered=answered)
        return replace(resumed, epoch=self.epoch)


class Emitted(NamedTuple):
    """The tokens that a request emitted in one round; none if it ended between two rounds.

    task: the request. ended: why the request is over: "stop", "length", "cancelled" or "deadline";
    None if it goes on. accepted: how many of the tokens, the first ones, were drafted. source: what
    drafted them (rounds.Source). logprobs: the tokens' log-probabilities. stop: the number of the
    answer's tokens up to its end, if a stop token or a limit of `Endings` ends it; else None.
    """

    task: Task
    ended: str | None
    tokens: Sequence[int] = ()
    accepted: int = 0
    source: int = 0
    logprobs: list[Logprob] | None = None
    stop: int | None = None


class Turn(NamedTuple):
    """The changes before the next round. ended: the requests that ended since the last turn. leave:
    the ids of sequences that leave the batch. join: the requests that join it."""

    ended: list[Emitted]
    leave: list[int]
    join: list[Request]


class Scheduler:
    """Holds the requests of a server, or the prompts of a run: a queue of those that wait, and
    those that run. Decides which of them join and leave the batch."""

    def __init__(self, room: Capacity, endings: Endings | None = None) -> None:
        """room: how many sequences and tokens fit. endings: decides where sequences end (None: a
        sequence ends only by max_tokens, a deadline or a cancellation)."""
        self.room = room
        self._endings = endings
        self._waiting: list[Task] = []  # in order of _ORDER
        self._running: dict[int, Task] = {}
        self._leaving: list[int] = []  # ids of sequences that leave before the next round
        self._ended: list[Emitted] = []
        self._can_end = endings is not None  # False: no request can end, so `step` skips `take`
        self._deadlines: list[tuple[float, int]] = []  # (time, request id) of each, rising by time
        self.num_preempted = self.num_rounds = 0

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> Collection[Task]:
        """The requests that hold KV pages, in the order in which they were admitted."""
        return self._running.values()

    @property
    def free_pages(self) -> int:
        """The number of KV pages that running requests leave free; negative if they need more."""
        pages_of = self.room.pages_of
        return self.room.pages - sum(pages_of(task.length) for task in self._running.values())

    def tasks(self, ids: Iterable[int]) -> list[Task]:
        """Returns those of the requests with these ids that run, in the order of `ids`."""
        return [self._running[n] for n in ids if n in self._running]

    def submit(self, task: Task) -> None:
        """Queues a request; raises ConfigError if its prompt and max_tokens can never fit."""
        room = self.room
        count = len(task.request.prompt)
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
        self.queue(task)

    def queue(self, task: Task) -> None:
        """Queues a request, with a prompt or without, which must fit (`submit` checks that)."""
        insort(self._waiting, task, key=_ORDER)
        self._can_end = self._can_end or task.max_tokens < UNLIMITED
        if task.deadline_s is not None:
            insort(self._deadlines, (task.deadline_s, task.request_id))

    def cancel(self, request_id: int, reason: str = "cancelled") -> None:
        """Ends a waiting or running request; does nothing for another id. reason: "cancelled" or
        "deadline", which `turn` reports in Emitted.ended."""
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
        """Decides at time `now` which requests end, leave and join before the next round."""
        while self._deadlines and self._deadlines[0][0] <= now:
            self.cancel(self._deadlines[0][1], "deadline")
        room = self.room
        join = list[Request]()
        before = self.num_preempted
        while self.free_pages < 0:
            # The sequence that arrived last goes back to the queue until enough pages are free.
            # One sequence always remains, because the pages suffice for any single sequence.
            last = max(self._running.values(), key=_ORDER)
            del self._running[last.request_id]
            self._leaving.append(last.request_id)
            last.epoch += 1
            insort(self._waiting, last, key=_ORDER)
            self.num_preempted += 1
        if self.num_preempted == before:
            while self._waiting and len(self._running) < room.sequences:
                task = self._waiting[0]
                # One page for each running sequence stays free, so that a new one is not preempted.
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
        """Adds a round's result to the requests that ran in it, and returns what each emitted."""
        self.num_rounds += 1
        for request_id, count in result.adopted.items():
            task = self._running.get(request_id)
            if task is not None and not task.epoch:  # after a preemption they may be its own
                task.cached = count
        speculation = result.speculation
        rows = zip(result.outcome.rows.tolist(), speculation.rows.tolist(), strict=True)
        emitted = list[Emitted]()
        for row, ((request_id, epoch, _, accepted, bonus), drafted) in enumerate(rows):
            task = self._running.get(request_id)
            if task is None or task.epoch != epoch:  # ended during the round
                continue
            source, hit, count = drafted[:3]
            task.count(count, accepted, hit, is_judged=not speculation.is_lost)
            tokens = [*drafted[3 : 3 + accepted], bonus, *result.forced.get(row, ())]
            before = len(task.tokens)
            kept = None
            if (stops := task.request.sampling.stop_ids) is not None:
                kept = stopped(tokens, stops)
            elif self._endings is not None:
                kept = self._endings.kept(request_id, before, tokens)
            stop = None if kept is None else before + kept
            reason = None if kept is None else "stop"
            left = task.max_tokens - before
            if left <= len(tokens) and (kept is None or left < kept):
                kept = left
                reason = "length"
            tokens = tokens[:kept]
            task.tokens += tokens
            task.forced += max(0, len(tokens) - accepted - 1)
            if reason is not None:
                del self._running[request_id]
                self._leaving.append(request_id)
                self._forget_deadline(task)
            logprobs = result.logprobs.get(row)
            shown = None if logprobs is None else logprobs[: len(tokens)]
            emitted.append(Emitted(task, reason, tokens, accepted, source, shown, stop))
        return emitted

    def step(self, loop: TargetLoop, records: RoundRecords) -> RoundResult:
        """Decodes one round of a run by `loop`, adds it to `records`, and returns it. Then
        sequences that have ended leave the loop, and the next prompts join it."""
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
