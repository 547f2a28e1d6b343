"""Drives the target loop on the lead while requests join and leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Control, Request
from mpissd.common.trace import LeadPhase, Ledger, NullLedger
from mpissd.engine.decode.goodput import NOTHING, Backlog, ForwardTimes, Goodput, Way
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.decode.scheduler import Emitted, Scheduler, Task, Turn
from mpissd.engine.workload.text.stops import SOURCES
from mpissd.serve.protocol import Cancel, End, Message, RefusedRequest, Stats, Stop, Submit, Tokens

_STATS_S = 0.1
_KEPT = 3  # rounds that reuse a choice while the numbers of sequences stay the same


class Mail(Protocol):
    """The source of requests and sink of answers."""

    is_closed: bool

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        """Returns the messages that have arrived; waits at most wait_s seconds for the first."""

    def put(self, message: Message) -> None:
        """Keeps a message until it is sent."""

    def flush(self) -> None:
        """Sends the queued messages, without blocking."""


class Rounds(Protocol):
    """The lead's loop: a TargetLoop, or one in virtual time.

    live_ids: the sequences that the next round verifies. unstored: tokens of opened prompts that
    are still to be stored. most_rows: rows of the largest forward.
    draft_lost_round: the first round without the draft, or None.
    """

    control: Control
    ledger: Ledger
    meanwhile: Callable[[], None] | None

    @property
    def live_ids(self) -> list[int]: ...
    @property
    def unstored(self) -> int: ...
    @property
    def most_rows(self) -> int: ...
    @property
    def draft_lost_round(self) -> int | None: ...

    def open(self, requests: Sequence[Request]) -> None:
        """Starts to store these prompts; their sequences join once that is done."""

    def finish(self, request_ids: Sequence[int]) -> None:
        """Releases these sequences."""

    def step(self) -> RoundResult:
        """Decodes one round."""


class Driver:
    """Receives requests from the front, has the loop decode them, and sends their tokens.

    It reads messages between two rounds and sends while the target verifies. clock: returns seconds
    for arrivals and deadlines.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        mail: Mail,
        *,
        stop_ids: frozenset[int] = frozenset(),
        vocab: int | None = None,
        samples: bool = True,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """vocab: token ids are below it. samples: whether requests may ask for a temperature."""
        self.scheduler, self._mail, self._clock = scheduler, mail, clock
        self._stop_ids, self._vocab, self._samples = stop_ids, vocab, samples
        self.times = ForwardTimes()
        self.goodput: Goodput | None = None  # chooses each round's way; None: it stays the same
        self._live: list[int] = []  # the sequences for which it has chosen
        # The numbers of live and storing sequences of the last choice, and the rounds since.
        self._chosen, self._kept = (0, 0), 0
        self._modes: dict[int, str] = {}  # by request, for those that asked for a mode
        self._loop: Rounds | None = None
        self.is_over = False  # the front has left, or asked for the end
        self.mode, self.lookahead, self.draft_lost = "", 0, False
        self._stats_sent_s = -_STATS_S
        self._turn = Turn([], [], [])  # changes before the next round
        # Handled while the next round verifies: messages to send, results for the controller.
        self._unsent: list[Emitted] = []
        self._unseen: tuple[Way, RoundResult, float] | None = None

    def wait(self, wait_s: float) -> bool:
        """Waits for a request; returns whether one runs now.

        `drive` then decodes at least one round, because it reads no messages before: other ranks
        take a pass without a round as the job's end.
        """
        self._read(wait_s)
        self._take_turn()
        if not self._has_round:
            self._send_answers()
            self._send_stats()
            self._mail.flush()
        return self._has_round

    def drive(self, loop: Rounds) -> None:
        """Decodes until nothing is left, or the front has left."""
        loop.ledger = NullLedger(LeadPhase)
        self._loop = loop
        loop.meanwhile = self._meanwhile
        self._change(loop)
        while self._has_round:
            emitted = self.scheduler.take(self._round(loop))  # `_meanwhile` runs inside
            self._unsent += emitted
            self.draft_lost = self.draft_lost or loop.draft_lost_round is not None
            self._read()
            self._take_turn()
            self._change(loop)
        loop.meanwhile = None
        self._meanwhile()

    def finish(self) -> None:
        """Ends every request, and sends their ends."""
        self.scheduler.cancel_all()
        self._take_turn()
        self._send_answers()
        self._mail.flush()

    @property
    def _has_round(self) -> bool:
        return bool(self.scheduler.running) and not self.is_over

    def _take_turn(self) -> None:
        self._turn = self.scheduler.turn(self._clock())
        self._unsent += self._turn.ended

    def _change(self, loop: Rounds) -> None:
        if self._turn.leave:
            loop.finish(self._turn.leave)
        if self._turn.join:
            loop.open(self._turn.join)

    def _round(self, loop: Rounds) -> RoundResult:
        """Decodes one round in the way with the highest expected goodput."""
        live = loop.live_ids
        way = self._way(live)
        fill, rows = 0, len(live) * (way.lookahead + 1)
        if loop.unstored:
            fill = self.times.prefill_rows(rows, loop.most_rows, way.lookahead)
        is_free = self.goodput is None
        loop.control = Control(prefill_rows=fill) if is_free else Control(*way, fill)
        start = self._clock()
        result = loop.step()
        if live:
            self.times.add(result.num_rows, result.t_target_s)
            if result.stored_s:
                self.times.drafted(way.lookahead, result.wait_s)
        if self.goodput is not None and not self.draft_lost:
            self._unseen = way, result, self._clock() - start
        return result

    def _way(self, live: list[int]) -> Way:
        """Returns how the next round is decoded.

        If the batch is the same as in the last round, the controller has chosen while the target
        verified.
        """
        if self.goodput is None or self.draft_lost:
            return Way(0 if self.draft_lost else self.lookahead)
        way = self._way_asked(live)
        if way is not None:
            self._live = []
        elif live != self._live:
            self._live = live
            self._choose(self.goodput)
        way = way or self.goodput.way
        self.mode = way.mode
        return way

    def _way_asked(self, live: list[int]) -> Way | None:
        """Returns the way of the mode that all live requests ask for, or None."""
        modes = {self._modes.get(request_id) for request_id in live} if self._modes else {None}
        mode = modes.pop() if len(modes) == 1 else None
        if mode is None:
            return None
        return Way(0 if mode == "ar" else self.lookahead, None if mode == "ssd" else 0)

    def _read(self, wait_s: float = 0.0) -> None:
        for message in self._mail.take(wait_s):
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel):
                self.scheduler.cancel(message.id)
            elif isinstance(message, Stop):
                self.is_over = True
        self.is_over = self.is_over or self._mail.is_closed

    def _submit(self, asked: Submit) -> None:
        try:
            self.scheduler.submit(self._task(asked))
        except ConfigError as error:
            self._mail.put(RefusedRequest(asked.id, 400, str(error)))
            return
        if asked.mode is not None and self.goodput is not None:
            self._modes[asked.id] = asked.mode

    def _task(self, asked: Submit) -> Task:
        """Returns the task of a request; raises ConfigError for values out of range."""
        prompt, now = tuple(asked.prompt), self._clock()
        if prompt and self._vocab is not None and not 0 <= min(prompt) <= max(prompt) < self._vocab:
            tokens = f"{min(prompt)}..{max(prompt)}"
            raise ConfigError(f"prompt: tokens {tokens}: allowed: 0..{self._vocab - 1}")
        if not 0 <= asked.temperature < float("inf") or not 0 < asked.top_p <= 1:
            raise ConfigError(
                f"temperature={asked.temperature}, top_p={asked.top_p}: allowed: 0 or more, and "
                "above 0 to 1"
            )
        if asked.temperature and not self._samples:
            raise ConfigError(f"temperature={asked.temperature}: allowed: 0, without sampling")
        if asked.seed is not None and not 0 <= asked.seed < 1 << 64:
            raise ConfigError(f"seed={asked.seed}: allowed: 0..{2**64 - 1}")
        return Task(
            asked.id,
            prompt,
            asked.max_tokens,
            arrived_s=now,
            deadline_s=None if asked.deadline_s is None else now + asked.deadline_s,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
            logprobs=asked.logprobs,
            stop_ids=self._stop_ids,
        )

    def _send_answers(self) -> None:
        """Sends new tokens and ends, in order."""
        for one in self._unsent:
            task = one.task
            if one.tokens:
                sources = [SOURCES[source] for source in one.sources]
                self._mail.put(
                    Tokens(task.request_id, one.tokens, sources, one.logprobs, task.hits)
                )
            if one.ended is not None:
                self._end(task, one.ended)
        self._unsent = []

    def _end(self, task: Task, reason: str) -> None:
        self._modes.pop(task.request_id, None)
        counts = task.drafted, task.accepted, task.hits, task.rounds, task.cached
        self._mail.put(End(task.request_id, reason, *counts))

    def _meanwhile(self) -> None:
        """Does the work that can overlap with the target's verification."""
        self._send_answers()
        self._send_stats()
        self._mail.flush()
        if self.goodput is None:
            return
        if self._unseen is not None:
            self.goodput.observe(*self._unseen)
            self._unseen = None
        if self._live:
            self._choose(self.goodput)

    def _choose(self, goodput: Goodput) -> None:
        """Chooses the next round's way for the live sequences; the others that run wait for it.

        If the target computes on the lead's own core, choosing lengthens the round. A choice
        therefore holds for a few rounds, unless it was a trial.
        """
        tasks, loop = self.scheduler.tasks(self._live), self._loop
        storing = len(self.scheduler.running) - len(tasks)
        if loop is None:
            goodput.choose(tasks)
            return
        chosen = len(tasks), storing
        if chosen == self._chosen and self._kept < _KEPT and not goodput.is_trying:
            self._kept += 1
            return
        self._chosen, self._kept = chosen, 0
        waiting = Backlog(storing, loop.unstored, loop.most_rows) if storing else NOTHING
        goodput.choose(tasks, waiting)

    def _send_stats(self) -> None:
        now = self._clock()
        if now - self._stats_sent_s < _STATS_S:
            return
        self._stats_sent_s, scheduler = now, self.scheduler
        self._mail.put(
            Stats(
                running=len(scheduler.running),
                waiting=scheduler.num_waiting,
                free_pages=scheduler.free_pages,
                pages=scheduler.room.pages,
                mode="ar" if self.draft_lost else self.mode,
                lookahead=self.lookahead if self.goodput is None else self.goodput.way.lookahead,
                draft="lost" if self.draft_lost else "present",
                preempted=scheduler.num_preempted,
                rounds=scheduler.num_rounds,
                tokens=scheduler.num_tokens,
            )
        )
