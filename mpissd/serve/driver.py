"""Runs decoding rounds on the target's rank 0 (the lead) while requests join and leave."""

from collections.abc import Callable
from time import monotonic

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Control, Request
from mpissd.engine.features.goodput import ForwardTimes, Goodput, Way
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.round.scheduler import Emitted, Scheduler, Task, Turn
from mpissd.engine.round.target import RoundObserver, RoundResult, TargetLoop
from mpissd.engine.text.answer import BONUS, SOURCES
from mpissd.serve.protocol import Cancel, End, Line, PromptTokens, Stats, Submit, Tokens

_STATS_S = 0.1
_KEPT = 3  # rounds for which K and fan-out are kept if the number of sequences stays the same


class Driver(RoundObserver):
    """Decodes the requests that the front (the HTTP process) sends. Messages are read between two
    rounds, and sent while the target verifies. times: measured durations of forwards. goodput: the
    controller that chooses K and the fan-out of each round; without one, `mode` and `lookahead`
    hold for all rounds. is_over: whether the front has left."""

    def __init__(
        self,
        scheduler: Scheduler,
        mail: Line,
        mode: str,
        lookahead: int,
        *,
        times: ForwardTimes | None = None,
        goodput: Goodput | None = None,
        shape: Shape = CHAIN,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """mail: the connection to the front. mode, lookahead: the decoding mode and K (a round's
        drafted tokens). shape: the tree of drafts, or CHAIN. clock: returns seconds."""
        self.scheduler, self._mail, self._clock = scheduler, mail, clock
        self.mode, self.lookahead = mode, lookahead
        self._shape = shape
        self.times, self.goodput = times or ForwardTimes(), goodput
        self.draft_lost = self.is_over = False
        self._live: list[int] = []  # ids of the requests for which K and fan-out were chosen last
        self._chosen, self._kept = 0, 0  # number of sequences at the last choice of K; rounds since
        self._started_s = 0.0  # when the last round began
        self._stats_sent_s = -_STATS_S
        self._turn = Turn([], [], [])  # requests that join or leave before the next round
        # Work left for the next forward: tokens to send, and a round for the controller to observe.
        self._unsent: list[Emitted] = []
        self._unseen: tuple[Way, RoundResult, float] | None = None

    def wait(self, wait_s: float) -> bool:
        """Waits up to wait_s seconds for a request; returns whether one runs now. If so, `drive`
        decodes at least one round before another message is read, because a call of `drive` without
        a round tells the other ranks to end the job."""
        self._read(wait_s)
        if not self._has_round:
            self._send()
        return self._has_round

    def drive(self, loop: TargetLoop) -> None:
        """Decodes rounds by `loop` until no request is left, or the front has ended."""
        loop.observers.append(self)
        while True:
            if self._turn.leave:
                loop.finish(self._turn.leave)
            if self._turn.join:
                loop.open(self._turn.join)
            if not self._has_round:
                break
            emitted = self.scheduler.take(self._round(loop))  # calls self.verifying, too
            self._unsent += emitted
            self.draft_lost = self.draft_lost or loop.draft_lost_round is not None
            self._read()
        loop.observers.remove(self)
        self._started_s = self._clock()
        self.verifying()

    @property
    def _has_round(self) -> bool:
        return bool(self.scheduler.running) and not self.is_over

    def _read(self, wait_s: float = 0.0) -> None:
        """Reads the front's messages, and decides which requests join or leave the batch. wait_s:
        the longest wait for a first message."""
        for message in self._mail.take(wait_s):
            if isinstance(message, Submit):
                self._submit(message)
            elif isinstance(message, Cancel):
                self.scheduler.cancel(message.id)
        self.is_over = self.is_over or self._mail.is_closed
        self._turn = self.scheduler.turn(self._clock())
        self._unsent += self._turn.ended

    def _submit(self, asked: Submit) -> None:
        now = self._clock()
        request = Request(asked.id, prompt=tuple(asked.prompt), sampling=asked.sampling)
        deadline_s = None if asked.deadline_s is None else now + asked.deadline_s
        try:
            self.scheduler.submit(Task(request, asked.max_tokens, now, deadline_s))
        except ConfigError as error:
            self._mail.put(End(asked.id, "refused", why=str(error)))

    def _round(self, loop: TargetLoop) -> RoundResult:
        """Decodes one round, with K and fan-out as the mode or the controller says."""
        live, times = loop.live_ids, self.times
        way = self._way(live)
        fill, rows = 0, len(live) * (self._shape.ends[way.lookahead] + 1)
        if loop.unstored:
            fill = times.prefill_rows(rows, loop.most_rows, way.lookahead)
        is_fixed = self.goodput is None
        loop.control = Control(way.lookahead, None if is_fixed else way.width, fill)
        self._started_s = start = self._clock()
        result = loop.step()
        for scored in result.scored:
            self._mail.put(PromptTokens(*scored))
        if live:
            times.add(result.num_rows, result.t_target_s)
            if result.stored_s:
                times.drafted(way.lookahead, result.wait_s)
        if self.goodput is not None and not self.draft_lost:
            self._unseen = way, result, start
        return result

    def _way(self, live: list[int]) -> Way:
        """Returns the K and fan-out (`width`) of the next round. The mode decides if there is no
        controller, or if all requests in `live` ask for the same mode; otherwise the controller
        chose them during the previous round. live: ids of the requests that decode now."""
        if self.goodput is None or self.draft_lost:
            return self._within(Way(0 if self.draft_lost else self.lookahead), live)
        modes = {task.request.sampling.mode for task in self.scheduler.tasks(live)}
        mode = modes.pop() if len(modes) == 1 else None
        if mode is not None:
            self._live = []
            way = Way(0 if mode == "ar" else self.lookahead, None if mode == "ssd" else 0)
        else:
            is_first, self._live = not self._live, live
            if is_first:
                self._choose(self.goodput)
            way = self.goodput.way
        self.mode = way.mode
        return self._within(way, live)

    def _within(self, way: Way, live: list[int]) -> Way:
        """Returns `way`, with K lowered to the largest limit of the `live` requests."""
        limits = [task.request.sampling.lookahead for task in self.scheduler.tasks(live)]
        most = max((self.lookahead if n is None else n for n in limits), default=self.lookahead)
        return way if way.lookahead <= most else Way(most, way.width if most else 0)

    def _choose(self, goodput: Goodput) -> None:
        """Has the controller choose K and fan-out for the sequences that decode now. Choosing takes
        time from the round if the target computes on this core; so a choice is kept for _KEPT
        rounds, unless the controller only tried it out."""
        tasks = self.scheduler.tasks(self._live)
        if len(tasks) == self._chosen and self._kept < _KEPT and not goodput.is_trying:
            self._kept += 1
            return
        self._chosen, self._kept = len(tasks), 0
        goodput.choose(tasks)

    def verifying(self) -> None:
        """Called while the target verifies: sends messages, and has the controller choose K."""
        self._send()
        if self.goodput is None:
            return
        if self._unseen is not None:
            way, result, start = self._unseen
            self.goodput.observe(way, result, self._started_s - start)
            self._unseen = None
        if self._live:
            self._choose(self.goodput)

    def _send(self) -> None:
        """Sends tokens and ends of answers, and ten times a second the scheduler's state."""
        for one in self._unsent:
            task = one.task
            if one.tokens:
                count = len(one.tokens)
                sources = [*[SOURCES[one.source]] * one.accepted, *[BONUS] * count][:count]
                told = Tokens(task.request_id, one.tokens, sources, one.logprobs, task.hits)
                self._mail.put(told)
            if one.ended is not None:
                counts = task.drafted, task.accepted, task.hits, task.rounds, task.cached
                steps = [task.steps[n] for n in range(self.lookahead + 1)]
                end = End(task.request_id, one.ended, *counts, task.forced, steps=steps)
                self._mail.put(end)
        self._unsent = []
        now, scheduler, chosen = self._clock(), self.scheduler, self.goodput
        if now - self._stats_sent_s >= _STATS_S:
            self._stats_sent_s = now
            self._mail.put(
                Stats(
                    running=len(scheduler.running),
                    waiting=scheduler.num_waiting,
                    free_pages=scheduler.free_pages,
                    pages=scheduler.room.pages,
                    mode="ar" if self.draft_lost else self.mode,
                    lookahead=chosen.way.lookahead if chosen else self.lookahead,
                    draft="lost" if self.draft_lost else "present",
                    preempted=scheduler.num_preempted,
                    rounds=scheduler.num_rounds,
                )
            )
        self._mail.flush()
