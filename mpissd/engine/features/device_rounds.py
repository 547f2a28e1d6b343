"""AR and inline SD whose rounds the device decides itself, so that it never waits for the host.

It runs the loop of round.py. Its target launches a whole round, drafting included, and the next
round before this one is over (ChainedForwards). The host reads the outcome after the device has
acted on it. A round begins on the host if it admits sequences, if its batch is not full, or shortly
before a sequence or the cache ends.

With T target ranks each launches its own programs of a round, once the lead has sent START; the
plans of round.py follow when the round may be over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.rounds import Ints, Source, Speculation
from mpissd.common.trace import DraftPhase
from mpissd.common.wait import Waiter
from mpissd.engine.job import Job
from mpissd.engine.law.tree import Tree
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.chained import NOT_FINITE, ChainedForwards, Index
from mpissd.engine.model.transformer.growing import ChainedGrowth
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.trees import NOBODY
from mpissd.engine.round.draft import Drafter
from mpissd.engine.round.oracle import Proposals, Rollout
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.sequence import Batch, Change

# (round, returns its imposed tokens on the lead, or None if it cannot begin yet): the tokens.
Start = Callable[[int, Callable[[], Ints | None]], Ints | None]


def chained_forwards(
    job: Job,
    target: TargetWorker | None,
    draft: DraftWorker | None,
    leads: Callable[[bool], bool] = bool,
) -> ChainedForwards | None:
    """Returns the programs of chained rounds, or None if the host must decide.

    leads: returns the lead's argument on every target rank. Collective over them.
    """
    if target is None:
        return None
    if not leads(_can_chain(job, target, draft)):
        if job.dynamic is not None:
            raise ConfigError("tree_shape=dynamic where no rounds are chained: allowed: fixed")
        return None
    drafts: Any = draft.stepper if draft is not None and job.lookahead else None
    verifies: Any = target.stepper
    tree = job.tree if job.tree.num_lanes else Tree(range(job.lookahead))
    return ChainedForwards(drafts, verifies, job.config.batch_size, tree, job.dynamic)


def _can_chain(job: Job, target: TargetWorker, draft: DraftWorker | None) -> bool:
    """Returns whether chained rounds are possible with the lead's workers."""
    is_jit = job.config.backup == "jit" and job.backup_lookahead == job.lookahead
    if job.serving or job.config.drafts or (job.lookahead and (draft is None or not is_jit)):
        return False
    is_dynamic = job.dynamic is not None
    return all(_chains(worker, is_dynamic) for worker in (draft, target) if worker is not None)


def _chains(worker: DraftWorker | TargetWorker, anywhere: bool = False) -> bool:
    """Returns whether the device may decide the worker's tokens; anywhere: also a CPU."""
    one = worker.stepper
    if not (worker.oracle.chains and isinstance(one, Stepper)):
        return False
    if not (one.backend.chains or anywhere):
        return False
    is_captured = one.stack.group.capturable or not one.backend.capture
    return isinstance(one.stack, TransformerStack) and is_captured


def chained_growth(job: Job, draft: DraftWorker) -> ChainedGrowth | None:
    """Returns the programs by which a draft rank's device joins the steps of its growth, or None if
    the host must grow."""
    others, stepper = job.serving or job.config.learners or job.tree_lanes, draft.stepper
    if others or not (job.config.drafts and job.fan_out and _chains(draft)):
        return None
    assert isinstance(stepper, Stepper)
    lanes = {job.config.batch_size * sum(fan_out) for fan_out in job.fan_outs.lists}
    return ChainedGrowth(stepper, lanes, job.lookahead)


class ChainedTarget(TargetWorker):
    """A target worker that launches whole rounds, and the next one ahead."""

    def __init__(
        self,
        worker: TargetWorker,
        drafter: Drafter | None,
        forwards: ChainedForwards,
        limit: Callable[[int], int | None],
        waiter: Waiter,
        start: Start = lambda round_, forced: forced(),
    ) -> None:
        """worker: whose forwards and oracle to use. drafter: of inline SD; None in AR and on a
        follower. limit: returns the most tokens that a request may emit. waiter: for rounds that
        were launched ahead and are not used. start: lets all ranks launch a round."""
        super().__init__(worker.stepper, worker.oracle, worker.placement)
        self._drafter, self._forwards = drafter, forwards
        self._limit, self._waiter, self._starting = limit, waiter, start
        if drafter is not None:
            drafter.chained = forwards
        self._batch: Batch
        self._speculation: Speculation
        self._imposed: tuple[Ints, Ints] | None = None  # the outcome of this round, if imposed
        self._decision: Ints  # rows of ChainedForwards.outcome
        self._was_ahead = False

    def enter(self, batch: Batch, change: Change) -> None:
        if any(change):
            self._drop()
        super().enter(batch, change)
        self._forwards.is_on = len(batch) == self._forwards.sheet.sequences

    def leave(self, batch: Batch) -> None:
        self._drop()
        super().leave(batch)

    def _drop(self) -> None:
        for program in self._forwards.dropped():
            program.wait(self._waiter)

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        self._batch, self._speculation = batch, speculation
        if not self._forwards.is_on:
            super().upload(batch, speculation, fill)
            return
        self.num_rows = speculation.num_rows
        self._was_ahead = self._forwards.is_flying(speculation.round)
        if not self._was_ahead:
            self._forwards.begin(self._state(batch))

    def launch(self) -> None:
        if not self._forwards.is_on:
            super().launch()
            return
        batch, forwards, round_ = self._batch, self._forwards, self._speculation.round
        last, ahead = batch.last(), forwards.lookahead
        rollout = None if self._drafter is None else self._drafter.rollout
        if not self._was_ahead:
            self._start(round_, last + ahead, lambda: self._forced(rollout))
        batch.grow(forwards.stored + 1, has_leaves=True)
        if self._drafter is not None and self._drafter.worker.placement is not None:
            self._drafter.batch.grow(forwards.stored, has_leaves=False)
        if forwards.goes_ahead:  # the next round may begin before the host knows this one's outcome
            self._start(round_ + 1, last + 2 * ahead + 1, lambda: self._next_forced(rollout))

    def _start(self, round_: int, last: Index, forced: Callable[[], Ints | None]) -> None:
        """Launches a round if the lead may; last: the last positions that it may write."""
        if (tokens := self._starting(round_, forced)) is not None:
            self._forwards.hold(self._batch.slots, last)
            self._forwards.launch(round_, tokens)

    def _next_forced(self, rollout: Rollout | None) -> Ints | None:
        """Returns the next round's imposed tokens; None: a sequence or the cache ends before.

        Sets the outcome that is imposed on this round.
        """
        batch, forwards = self._batch, self._forwards
        self._imposed, more = None, np.ones(len(batch), np.int64)
        if not self.oracle.reads_forwards:  # the outcome is imposed
            known = Speculation.empty(0, len(batch), forwards.nodes)
            if rollout is not None:
                known.num_draft[...], known.tokens[...] = forwards.nodes, rollout.tokens
            self._imposed = self.oracle.judge(batch, known, _no_proposals)
            more += forwards.tree.depths[self._imposed[0]]
        assert isinstance(self.stepper, Stepper)
        if int(batch.room(self.stepper.options.capacity).min()) < 2 * forwards.lookahead + 1:
            return None
        emitted, limits = (batch.lengths - 1 + more).tolist(), map(self._limit, batch.ids.tolist())
        may = all(most is None or n < most for n, most in zip(emitted, limits, strict=True))
        return self._forced(self._next_rollout()) if may else None

    def wait(self, waiter: Waiter) -> None:
        if not self._forwards.is_on:
            super().wait(waiter)
            return
        forwards, speculation, drafter = self._forwards, self._speculation, self._drafter
        forwards.last_of(speculation.round).wait(waiter)
        self._decision = forwards.outcome(speculation.round)
        speculation.tokens[...] = self._decision[:, 2:]
        self._batch.serve(speculation)
        if drafter is not None:
            drafter.ledger.mark(DraftPhase.WAIT)
            drafter.draft_s = forwards.draft_s(speculation.round)
            if forwards.sheet.dynamic:  # the draft may lack the last accepted token
                self._hold_back(drafter.batch)
            drafter.verification_started(speculation)
            drafter.close_round(speculation)

    def _hold_back(self, draft: Batch) -> None:
        """Notes that the draft stores the accepted tokens without the last one."""
        last, accepted = self._batch.last(), np.maximum(self._decision[:, 0], 0)
        draft.filled[self._batch.slots] = last + accepted

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Returns the device's decision (num_accepted, bonus), both int32 [b]."""
        if not self._forwards.is_on:
            return super().judge(batch, speculation, proposals)
        accepted, bonus = self._decision[:, 0], self._decision[:, 1]
        if (accepted == NOT_FINITE).any():
            raise FaultError("target: a logit is not finite: its weights are damaged, or overflow")
        if self._imposed is not None:
            assert all(map(np.array_equal, self._imposed, (accepted, bonus))), "not as imposed"
        return accepted, bonus

    def elapsed_s(self) -> float:
        if not self._forwards.is_on:
            return super().elapsed_s()
        return self._forwards.last_of(self._speculation.round).elapsed_s()

    def _state(self, batch: Batch) -> Ints:
        """Returns the state from which a round begins on the host (Sheet.state)."""
        state = np.full((len(batch), 4), NOBODY, np.int64)
        state[:, 0], state[:, 1] = batch.slots, batch.last()
        state[:, 2] = batch.last_tokens
        if self._drafter is not None:
            draft = self._drafter.batch
            for gap in draft.gaps(range(len(draft))):
                assert gap.size == 1, f"the draft lacks {gap}"
                state[batch.slots == gap.slot, 3] = draft.committed(gap)
        return state.astype(np.int32)

    def _forced(self, rollout: Rollout | None) -> Ints:
        """Returns the tokens that replace the forwards' own (Sheet.forced)."""
        nodes, ahead = self._forwards.nodes, self._forwards.lookahead
        forced = np.full((len(self._batch), nodes + ahead + 1), NOBODY, np.int32)
        truth = self.oracle.truth()
        if truth is not None:
            forced[:, nodes:] = truth
            if rollout is not None:
                forced[:, :nodes] = rollout.tokens
        return forced

    def _next_rollout(self) -> Rollout | None:
        """Returns the tokens imposed on the next round's draft; None: its own tokens count.

        Moves the oracles to the next round; the real beginning of that round does so again.
        """
        if self._imposed is None:
            return None
        batch = self._batch.after(*self._imposed)
        self.oracle.begin_round(batch, ())
        if self._drafter is None:
            return None
        oracle = self._drafter.worker.oracle
        oracle.begin_round(batch, ())
        return oracle.restart(batch, range(len(batch)), Source.JIT)


def _no_proposals(row: int, index: int) -> NDArray[np.float32]:
    raise AssertionError("nothing was sampled here")
