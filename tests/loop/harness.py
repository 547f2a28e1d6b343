"""One scenario, decoded by the real loops without MPI.

Over a queue link between threads, or with the draft in the same thread, which makes the timing
exact. Forwards compute nothing and are remembered.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.real_pairs import ASSUMED, ASSUMED_LAW, MissLaw
from mpissd.common.records import RoundRecords
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Ints, Outcome, Request, Source, Speculation
from mpissd.common.trace import LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import queue_link
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.law.acceptance import AcceptanceLaw, named_hit_law
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.oracle import imposed as gemm
from mpissd.engine.oracle.imposed import DraftStream, ImposedDraft, ImposedTarget, TokenStream
from mpissd.engine.round.draft import Drafter, DraftPolicy, serve
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.speculator import InlineSpeculator, RemoteSpeculator, Speculator
from mpissd.engine.round.target import TargetLoop, follow

_BLOCK = 256


@lru_cache(maxsize=4096)
def _block(seed: int, purpose: Purpose, sequence: int, number: int) -> list[float]:
    return list(uniforms(seed, purpose, sequence, number * _BLOCK, _BLOCK))


class Law:
    """The `gemm` workload's models, position by position, by definition: no tables.

    Y(s,p), the draft's x(s,p,i,source) and the rank of the bonus token.

    hazards: a_1 … a_K by source. p_hit imposes hits, else miss(F) = min(1, floor + A·F^-r), where
    `laws` holds (A, r, floor) after a rejection, and where all served tokens were accepted.
    """

    def __init__(
        self,
        seed: int,
        vocab: int,
        hazards: Mapping[Any, Sequence[float]],
        fan_out: Sequence[int] = (),
        p_hit: float | None = None,
        laws: tuple[MissLaw, MissLaw] = ASSUMED,
    ) -> None:
        self.seed, self.vocab, self.hazards = seed, vocab, hazards
        self.fan_out, self.p_hit = fan_out, p_hit
        self.laws = laws

    def draw(self, purpose: Purpose, sequence: int, position: int) -> float:
        number, offset = divmod(position, _BLOCK)
        return _block(self.seed, purpose, sequence, number)[offset]

    def true(self, sequence: int, position: int) -> int:
        """Y: the token that the target emits."""
        return int(self.vocab * self.draw(Purpose.TOKEN, sequence, position))

    def proposal(self, sequence: int, position: int, place: int, source: int) -> int:
        """x at `place` (from 0) of a round, drafted by `source`."""
        true = self.true(sequence, position)
        if self.draw(Purpose.ACCEPT, sequence, position) < self.hazards[source][place]:
            return true
        other = int((self.vocab - 1) * self.draw(Purpose.WRONG, sequence, position))
        return other + (other >= true)

    def proposals(self, sequence: int, length: int, count: int, source: int) -> list[int]:
        """x_1 … x_count after `length` committed tokens."""
        return [self.proposal(sequence, length + i, i, source) for i in range(count)]

    def judge(self, sequence: int, length: int, drafts: Sequence[int]) -> tuple[int, int]:
        """(k, t*) of a verification."""
        k = 0
        while k < len(drafts) and drafts[k] == self.true(sequence, length + k):
            k += 1
        return k, self.true(sequence, length + k)

    def rank(self, sequence: int, position: int, end: bool = False) -> float:
        """From 1; infinite where no fan-out reaches the bonus token. end: all were accepted."""
        u = self.draw(Purpose.RANK, sequence, position)
        if self.p_hit is not None:
            return 1 if u < self.p_hit else math.inf
        a, r, floor = self.laws[end]
        if u <= floor:
            return math.inf
        return float(max(1, math.ceil((a / (u - floor)) ** (1 / r))))

    def hits(self, sequence: int, length: int, k: int, end: bool = False) -> bool:
        """Whether the outcome (k, t*) of a verification after `length` tokens is a key.

        end: whether all served tokens were accepted.
        """
        return bool(self.fan_out) and self.rank(sequence, length + k, end) <= self.fan_out[k]


WAITER = Waiter(30.0, spin=False)
Forward = tuple[int, list[int]]  # rows, tokens fed


@dataclass(frozen=True)
class Scenario:
    """A decoding case: models, batch and policy; inline: D = 0. heads: tokens of a forward."""

    mode: str = "ssd"
    batch: int = 1
    lookahead: int = 4
    fan_out: tuple[int, ...] | None = None
    rates: tuple[float, ...] | None = None
    fast_rate: float = 0.3
    p_hit: float | None = None
    backup: str = "jit"
    backup_lookahead: int | None = None
    rounds: int | None = 12
    num_tokens: int | None = None
    vocab: int = 4096
    seed: int = 0
    inline: bool = False
    heads: int = 1
    num_followers: int = 0
    pair: tuple[MissLaw, MissLaw] = ASSUMED  # imposes the hits if p_hit is None

    @property
    def K(self) -> int:
        return 0 if self.mode == "ar" else self.lookahead

    @property
    def fans(self) -> tuple[int, ...]:
        if self.mode != "ssd":
            return ()
        return self.fan_out or (3,) * (self.K + 1)

    @property
    def source(self) -> Source:
        return Source[self.backup.upper()]

    @property
    def backup_tokens(self) -> int:
        return self.backup_lookahead or self.K

    def hazards(self) -> dict[Source, tuple[float, ...]]:
        primary = self.rates or (0.8,) * self.K
        return {Source.CACHE: primary, Source.JIT: primary, Source.FAST: (self.fast_rate,) * self.K}

    def law(self) -> Law:
        return Law(self.seed, self.vocab, self.hazards(), self.fans, self.p_hit, self.pair)


class CountingForwards:
    """Forwards that compute nothing and are remembered; `on_wait` is called before each ends."""

    def __init__(self) -> None:
        self.log: list[Forward] = []
        self._next: Forward = 0, []
        self.on_wait: Callable[[], None] = lambda: None
        self.closed = False

    def upload(self, rows: int, tokens: Ints, places: None = None, *, lists: bool = False) -> None:
        assert len(tokens) <= rows, (len(tokens), rows)
        self._next = rows, tokens.tolist()

    def launch(self) -> None:
        self.log.append(self._next)

    def wait(self, waiter: Waiter) -> None:
        self.on_wait()

    def elapsed_s(self) -> float:
        return 0.25

    def close(self) -> None:
        self.closed = True


class QueuePlans:
    """Plans to threads that follow, through real wire buffers."""

    def __init__(self, shape: LinkShape, followers: int) -> None:
        self.shape = shape
        self.queues: list[queue.SimpleQueue[Ints]] = [queue.SimpleQueue() for _ in range(followers)]

    def publish(self, outcome: Outcome, speculation: Speculation, stop: bool = False) -> None:
        buffer = wire.Message(wire.Kind.PLAN, self.shape)
        wire.write_outcome(buffer, outcome, stop, speculation)
        for follower in self.queues:
            follower.put(buffer.array)

    def plan(self, follower: int, round_: int) -> tuple[Outcome, Speculation, bool]:
        buffer = wire.Message(wire.Kind.PLAN, self.shape)
        np.copyto(buffer.array, self.queues[follower].get(timeout=60))
        return wire.read_plan(buffer, round_)


class Rig:
    """Both sides of a scenario, not yet joined."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = s = scenario
        self.target_forwards, self.draft_forwards = CountingForwards(), CountingForwards()
        self.shape = LinkShape(3, s.batch, s.K)
        laws = {source: AcceptanceLaw(rates, "") for source, rates in s.hazards().items()}
        hit_law = named_hit_law(ASSUMED_LAW if s.p_hit is None else f"p_hit:{s.p_hit}")
        stream = DraftStream(s.seed, s.vocab, s.batch, laws, hit_law, max((1, *s.fans)))
        fan_outs = FanOuts(s.fans, s.fans)
        policy = DraftPolicy(s.K, fan_outs, s.source, s.backup_tokens)
        self.draft_worker = DraftWorker(self.draft_forwards, ImposedDraft(stream, s.heads))
        self.drafter = Drafter(self.draft_worker, policy, s.batch, WAITER)

    def target_worker(self, forwards: CountingForwards) -> TargetWorker:
        s = self.scenario
        stream = TokenStream(s.seed, s.vocab, s.batch, s.K, gemm.WINDOW)
        return TargetWorker(forwards, ImposedTarget(stream))

    def loop(self, speculator: Speculator, publish: Any = None) -> TargetLoop:
        worker = self.target_worker(self.target_forwards)
        return TargetLoop(worker, speculator, publish, self.scenario.batch, WAITER)

    def drive(self, loop: TargetLoop) -> RoundRecords:
        s = self.scenario
        return drive(loop, requests(s.batch), s.K, num_tokens=s.num_tokens, rounds=s.rounds)


@dataclass
class Result:
    """The results of a scenario."""

    rig: Rig
    records: RoundRecords
    follower_logs: list[list[Forward]] = field(default_factory=list)

    @property
    def scenario(self) -> Scenario:
        return self.rig.scenario

    @property
    def rows(self) -> NDArray[np.int64]:
        """[n, 8]: round, id, epoch, k, t*, source, hit, num_draft."""
        return self.records.sequences()


def requests(count: int) -> list[Request]:
    return [Request(n, first_token=n) for n in range(count)]


def drive(
    loop: TargetLoop,
    asked: Sequence[Request],
    lookahead: int,
    *,
    num_tokens: int | None = None,
    rounds: int | None = None,
    stop_token: int | None = None,
) -> RoundRecords:
    """Rounds until all sequences have num_tokens or the stop token, or enough rounds ran."""
    records = RoundRecords(lookahead)
    loop.admit(asked)
    loop.ledger.restart()
    most = num_tokens or 10**9
    left = {request.request_id: most for request in asked}
    while left and (rounds is None or len(records) < rounds):
        result = loop.step()
        records.add(result.t_target_s, result.speculation, result.outcome)
        for name, new in result.emitted():
            if stop_token in new:
                records.ends[name] = most - left[name] + new.index(stop_token) + 1
            left[name] -= len(new)
            if left[name] <= 0 or stop_token in new:
                del left[name]
                loop.finish([name])
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
    return records


class Guarded(threading.Thread):
    """A thread whose exception is raised by the join."""

    def __init__(self, work: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._work, self.error = work, None
        self.start()

    error: BaseException | None

    def run(self) -> None:
        try:
            self._work()
        finally:
            self.error = sys.exc_info()[1]

    def finish(self) -> None:
        self.join(60)
        if self.error is not None:
            raise self.error
        assert not self.is_alive(), "a thread does not end"


def run(scenario: Scenario) -> Result:
    """The scenario over a queue link, draft and followers in threads of their own."""
    rig, s = Rig(scenario), scenario
    plans = QueuePlans(rig.shape, s.num_followers)
    forwards = [CountingForwards() for _ in plans.queues]
    threads = [
        Guarded(partial(follow, rig.target_worker(f), partial(plans.plan, n), s.batch, WAITER))
        for n, f in enumerate(forwards)
    ]
    speculator = InlineSpeculator(rig.drafter) if s.inline else Speculator()
    if s.K and not s.inline:
        lead, draft = queue_link(rig.shape, WAITER)
        speculator = RemoteSpeculator(lead)
        threads.append(Guarded(lambda: serve(draft, rig.drafter)))
    loop = rig.loop(speculator, plans.publish if plans.queues else None)
    records = rig.drive(loop)
    loop.stop()
    for thread in threads:
        thread.finish()
    return Result(rig, records, [f.log for f in forwards])


class SteppedSpeculator(Speculator):
    """The draft in this thread: it grows `steps(round)` steps before the next outcome arrives."""

    def __init__(self, rig: Rig, steps: Callable[[int], int]) -> None:
        self._rig, self._steps = rig, steps
        self._asked: Outcome | None = None
        self.grown: list[list[Forward]] = []  # forwards after each answer: glue, growth
        self.answered: list[list[Forward]] = []  # forwards of each answer

    def ask(self, outcome: Outcome) -> None:
        self._asked = outcome

    def answer(self, round_: int, count: int) -> Speculation:
        log, drafter = self._rig.draft_forwards.log, self._rig.drafter
        before = len(log)
        speculation = drafter.answer(self._asked)
        self.answered.append(log[before:])
        before = len(log)
        drafter.start_round(speculation)
        if drafter.begin_growth(speculation):
            for _ in range(self._steps(round_)):
                if drafter.growing:
                    drafter.grow_step()
        self.grown.append(log[before:])
        drafter.log.close_round(speculation.round)
        return speculation

    def stop(self, outcome: Outcome) -> None:
        return None


def run_stepped(scenario: Scenario, steps: int | Sequence[int]) -> tuple[Result, SteppedSpeculator]:
    """The scenario in one thread, with `steps` growth steps a round (or so many in each)."""
    rig = Rig(scenario)
    counts = [steps] if isinstance(steps, int) else list(steps)
    speculator = SteppedSpeculator(rig, lambda round_: counts[round_ % len(counts)])
    loop = rig.loop(speculator)
    records = rig.drive(loop)
    loop.stop()
    return Result(rig, records), speculator


def check_rows(rows: NDArray[np.int64], s: Scenario) -> dict[int, list[int]]:
    """Checks every recorded source, hit, k and t* against the imposed model; returns the tokens."""
    law, emitted = s.law(), dict[int, list[int]]()
    length: dict[tuple[int, int], int] = {}
    last_k: dict[tuple[int, int], tuple[int, bool]] = {}
    for round_, id_, epoch, k, bonus, source, hit, num_draft in rows.tolist():
        key = id_, epoch
        n = length.setdefault(key, 1)
        known = False
        if key in last_k:
            last, was_end = last_k[key]
            known = law.hits(id_, n - last - 1, last, was_end)
        where = f"round {round_} of sequence {id_}"
        assert hit == int(known), where
        if s.mode == "ar":
            want_source, most = Source.NONE, 0
        elif known:
            want_source, most = Source.CACHE, s.K
        else:
            want_source, most = s.source, s.backup_tokens
        assert source == want_source, where
        assert num_draft == most, where
        drafts = law.proposals(id_, n, num_draft, source)
        assert (k, bonus) == law.judge(id_, n, drafts), where
        emitted.setdefault(id_, []).extend([*drafts[:k], bonus])
        length[key], last_k[key] = n + k + 1, (k, k == num_draft)
    return emitted


def check_against_the_law(result: Result) -> None:
    """Checks a result's rounds in the same way, and the tokens that it emitted."""
    assert result.records.tokens() == check_rows(result.rows, result.scenario)
