"""AR and inline SD whose rounds the device decides itself, so that it never waits for the host.

The loop is that of target.py. Its target launches a whole round, drafting included, and the next
round before this one is over (ChainedForwards). The host reads the outcome after the device has
acted on it. A round begins on the host if it admits sequences, if it has fewer than the job, or
shortly before a sequence or the cache ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import FaultError
from mpissd.common.rounds import Batch, Event, Ints, Outcome, Source, Speculation
from mpissd.common.trace import DraftPhase
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.speculator import InlineSpeculator, NoSpeculator, Speculator
from mpissd.engine.job import Job
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.chained import ChainedForwards
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.stages import NOBODY, NOT_FINITE
from mpissd.engine.workload.rollout import Rollout
from mpissd.engine.workload.steps import Steps
from mpissd.engine.workload.workers import Admissions, DraftWorker, Proposals, TargetWorker

_KEPT = 4096  # the last rounds whose idle time is kept
Limit = Callable[[int], int | None]


def chained_forwards(
    job: Job, target: TargetWorker | None, draft: DraftWorker | None
) -> ChainedForwards | None:
    """Returns the programs of chained rounds, or None if the host must decide."""
    if target is None or job.tp > 1 or job.serving is not None or job.config.drafts:
        return None
    if job.lookahead and (
        draft is None or job.config.backup != "jit" or job.backup_lookahead != job.lookahead
    ):
        return None
    workers = [worker for worker in (draft, target) if worker is not None]
    steppers = [worker.stepper for worker in workers if worker.chains]
    known = [one for one in steppers if isinstance(one, Stepper)]
    if len(known) < len(workers):
        return None
    if not all(isinstance(s.stack, TransformerStack) and s.backend.chains for s in known):
        return None
    drafts = known[0] if job.lookahead else None
    return ChainedForwards(drafts, known[-1], job.config.batch_size, job.lookahead)


class ChainedDrafter(Drafter):
    """A drafter whose forwards the chained target launches in chained rounds."""

    is_chained = False  # whether this round is one
    rollout: Rollout  # of a chained round

    def _finish(self, rollouts: Sequence[Rollout]) -> Steps[None]:
        if not self.is_chained:
            yield from super()._finish(rollouts)
            return
        (self.rollout,) = rollouts
        self.rollout.steps = self._policy.lookahead

    def complete(self, speculation: Speculation, draft_s: float) -> None:
        """Ends a chained round, whose tokens `speculation` holds now.

        draft_s: device time of its draft forwards, in seconds.
        """
        self.ledger.mark(DraftPhase.WAIT)
        self._rows.draft_s = draft_s
        self.hear(speculation)
        self.close_round(speculation)


class _Dropping:
    """Waits for rounds that were launched ahead and are not used."""

    def __init__(self, forwards: ChainedForwards, waiter: Waiter) -> None:
        self._forwards, self._waiter = forwards, waiter

    def ask(self, outcome: Outcome) -> None:
        if (outcome.events != Event.COMMIT).any():
            self.drop()

    def begin(self, count: int) -> bool:
        """Begins a round of `count` sequences; returns whether it is chained."""
        self._forwards.is_on = count == self._forwards.sheet.sequences
        return self._forwards.is_on

    def drop(self) -> None:
        """Waits for the round that was launched ahead and is not used."""
        for program in self._forwards.dropped():
            program.wait(self._waiter)


class ChainedNobody(NoSpeculator):
    """The speculator of AR with a ChainedTarget."""

    def __init__(self, rounds: _Dropping) -> None:
        super().__init__()
        self._rounds = rounds

    def ask(self, outcome: Outcome) -> None:
        self._rounds.ask(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        self._rounds.begin(count)
        return super().answer(round_, count)

    def stop(self, outcome: Outcome) -> None:
        self._rounds.drop()


class ChainedSpeculator(InlineSpeculator):
    """The speculator of inline SD with a ChainedTarget: tokens reach the host after the verdict."""

    def __init__(self, drafter: ChainedDrafter, rounds: _Dropping) -> None:
        super().__init__(drafter)
        self._chained, self._rounds = drafter, rounds

    def ask(self, outcome: Outcome) -> None:
        self._rounds.ask(outcome)
        super().ask(outcome)

    def answer(self, round_: int, count: int) -> Speculation:
        self._chained.is_chained = self._rounds.begin(count)
        if not self._chained.is_chained:
            return super().answer(round_, count)
        assert self._outcome is not None, "answer() before ask()"
        self._chained.ledger.restart()
        return self._chained.answer(self._outcome)

    def stop(self, outcome: Outcome) -> None:
        self._rounds.drop()


class ChainedTarget(TargetWorker):
    """A target worker that launches whole rounds, and the next one ahead."""

    def __init__(
        self,
        worker: TargetWorker,
        drafter: ChainedDrafter | None,
        forwards: ChainedForwards,
        limit: Limit,
    ) -> None:
        """Wraps `worker`; limit: the tokens with which a request ends at the latest."""
        self._worker, self._drafter, self._forwards = worker, drafter, forwards
        self._limit = limit
        self.stepper, self.placement = worker.stepper, worker.placement
        self.idle_s: deque[float] = deque(maxlen=_KEPT)  # of rounds that were launched ahead
        self._batch: Batch
        self._speculation: Speculation
        self._known: tuple[Ints, Ints] | None = None
        self._told: Ints
        self._was_ahead = False

    def enter(self, batch: Batch, admissions: Admissions) -> None:
        self._worker.enter(batch, admissions)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._worker.begin_round(batch, admissions)

    def filling(
        self, batch: Batch, rows: Sequence[int], spare: int = 0, most: int | None = None
    ) -> Steps[int]:
        return self._worker.filling(batch, rows, spare, most)

    def leave(self) -> None:
        self._worker.leave()

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        self._batch, self._speculation = batch, speculation
        if not self._forwards.is_on:
            self._worker.upload(batch, speculation, fill)
            self.num_rows = self._worker.num_rows
            return
        self.num_rows = speculation.num_rows
        self._was_ahead = self._forwards.is_flying(speculation.round)
        if not self._was_ahead:
            self._forwards.begin(self._state(batch))

    def launch(self) -> None:
        if not self._forwards.is_on:
            self._worker.launch()
            return
        batch, forwards, round_ = self._batch, self._forwards, self._speculation.round
        assert self.placement is not None
        last, ahead = self.placement.last(batch), forwards.lookahead
        if not self._was_ahead:
            forwards.hold(batch.slots, last + ahead)
            forwards.launch(round_, self._forced(self._rollout))
        self.placement.grow(batch, ahead + 1)
        if self._drafter is not None and self._drafter.worker.placement is not None:
            self._drafter.worker.placement.grow(batch, ahead)
        self._known = None if self._worker.reads_forwards else self._judged()
        if self._may_go_on():
            forwards.hold(batch.slots, last + 2 * ahead + 1)
            forwards.launch(round_ + 1, self._forced(self._next_rollout()))

    def wait(self, waiter: Waiter) -> None:
        if not self._forwards.is_on:
            self._worker.wait(waiter)
            return
        forwards, speculation = self._forwards, self._speculation
        forwards.last_of(speculation.round).wait(waiter)
        self._told = forwards.told(speculation.round)
        speculation.tokens[...] = self._told[:, 2:]
        self._worker.served(self._batch, speculation)
        if self._drafter is not None:
            self._drafter.complete(speculation, forwards.draft_s(speculation.round))
        if self._was_ahead:
            self.idle_s.append(forwards.idle_s(speculation.round))

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Returns the device's decision (num_accepted, bonus), both int32 [b]."""
        if not self._forwards.is_on:
            return self._worker.judge(batch, speculation, proposals)
        accepted, bonus = self._told[:, 0], self._told[:, 1]
        if (accepted == NOT_FINITE).any():
            raise FaultError("target: a logit is not finite: its weights are damaged, or overflow")
        if self._known is not None:
            assert all(map(np.array_equal, self._known, (accepted, bonus))), "not what was imposed"
        return accepted, bonus

    def elapsed_s(self) -> float:
        if not self._forwards.is_on:
            return self._worker.elapsed_s()
        return self._forwards.last_of(self._speculation.round).elapsed_s()

    @property
    def _rollout(self) -> Rollout | None:
        """The drafted tokens of this round, if a table may impose them; None for AR."""
        return None if self._drafter is None else self._drafter.rollout

    def _state(self, batch: Batch) -> Ints:
        """Returns the state from which a round begins on the host (Sheet.state)."""
        assert self.placement is not None
        state = np.full((len(batch), 4), NOBODY, np.int64)
        state[:, 0], state[:, 1] = batch.slots, self.placement.last(batch)
        state[:, 2] = batch.last_tokens
        draft = None if self._drafter is None else self._drafter.worker
        if draft is not None and draft.placement is not None:
            for gap in draft.placement.gaps(batch, np.arange(len(batch))):
                assert gap.stop - gap.start == 1, f"the draft lacks {gap}"
                state[batch.slots == gap.slot, 3] = draft.committed(*gap)
        return state.astype(np.int32)

    def _forced(self, rollout: Rollout | None) -> Ints:
        """Returns the tokens that replace the forwards' own (Sheet.forced)."""
        ahead = self._forwards.lookahead
        forced = np.full((len(self._batch), 2 * ahead + 1), NOBODY, np.int32)
        truth = self._worker.truth()
        if truth is not None:
            forced[:, ahead:] = truth
            if rollout is not None:
                forced[:, :ahead] = rollout.tokens
        return forced

    def _judged(self) -> tuple[Ints, Ints]:
        """Returns the outcome that is imposed on this round."""
        known = Speculation.empty(0, len(self._batch), self._forwards.lookahead)
        if self._rollout is not None:
            known.num_draft[...], known.tokens[...] = known.tokens.shape[1], self._rollout.tokens
        return self._worker.judge(self._batch, known, _no_proposals)

    def _may_go_on(self) -> bool:
        """Returns whether the next round may begin before the host knows this one's outcome."""
        assert self.placement is not None and isinstance(self.stepper, Stepper)
        batch, ahead = self._batch, self._forwards.lookahead
        room = self.placement.room(batch, self.stepper.options.capacity)
        if int(room.min()) < 2 * ahead + 1:
            return False
        more = np.ones(len(batch), np.int64) if self._known is None else self._known[0] + 1
        emitted = (batch.lengths - 1 + more).tolist()
        limits = map(self._limit, batch.ids.tolist())
        return all(most is None or n < most for n, most in zip(emitted, limits, strict=True))

    def _next_rollout(self) -> Rollout | None:
        """Returns the tokens imposed on the next round's draft; None: its own tokens count.

        Moves the workers to the next round; the real beginning of that round does so again.
        """
        if self._known is None:
            return None
        batch = self._batch.behind(*self._known)
        self._worker.begin_round(batch, ())
        if self._drafter is None:
            return None
        self._drafter.worker.begin_round(batch, ())
        return self._drafter.worker.restart(batch, range(len(batch)), Source.JIT)


def chained_pair(
    job: Job,
    target: TargetWorker,
    drafter: Drafter | None,
    forwards: ChainedForwards,
    waiter: Waiter,
) -> tuple[ChainedTarget, Speculator]:
    """Returns the target worker and the speculator of a loop whose rounds are chained."""
    limit, rounds = job.workload.longest_answer, _Dropping(forwards, waiter)
    if drafter is None:
        return ChainedTarget(target, None, forwards, limit), ChainedNobody(rounds)
    assert isinstance(drafter, ChainedDrafter), "a drafter that launches its own forwards"
    speculator = ChainedSpeculator(drafter, rounds)
    return ChainedTarget(target, drafter, forwards, limit), speculator


def _no_proposals(row: int, index: int) -> NDArray[np.float32]:
    raise AssertionError("nothing was sampled here")
