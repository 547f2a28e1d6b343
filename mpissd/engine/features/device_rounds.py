"""AR, inline SD and prompt lookups in which the GPU decides whole rounds, so that it never waits
for the host.

The target's loop (round.target) stays the same. Its worker launches the draft and the verification
of a round together, and launches the next round before this one is over; the host reads an outcome
after the GPU has acted on it. The host still begins a round if the batch has new sequences or is
not full, or shortly before a sequence or the KV cache ends.

If several ranks share the target, rank 0's START message tells each of them to launch its part of a
round; the round's drafted tokens and the last outcome are sent later.
"""

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.rounds import Ints, Speculation
from mpissd.common.trace import UNKNOWN, DraftPhase
from mpissd.common.wait import Waiter
from mpissd.engine.job import Job
from mpissd.engine.law.tree import Shape
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.device_rounds import (
    NOT_FINITE,
    Copying,
    DeviceRounds,
    Index,
)
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.trees import NOBODY
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.draft import Drafter
from mpissd.engine.round.oracle import Proposals
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.sequence import Batch, Change
from mpissd.engine.round.speculator import InlineSpeculator, Speculator
from mpissd.engine.trees import TreeBatch

# Maps (round, function) to the result of the function on rank 0, which all target ranks get.
Start = Callable[[int, Callable[[], Ints | None]], Ints | None]


def chained_forwards(
    job: Job,
    target: TargetWorker | None,
    draft: DraftWorker | None,
    leads: Callable[[bool], bool] = bool,
) -> DeviceRounds | None:
    """Returns the compiled forwards of rounds that the GPU decides, or None if the host must
    decide. target, draft: this rank's workers (None: there is none here). leads: sends rank 0's
    argument to all target ranks and returns it. All target ranks call this function together."""
    if target is None:
        return None
    if not leads(_can_chain(job, target, draft)):
        if job.dynamic is not None and not target.knows_trees:
            raise ConfigError("tree_shape=dynamic where no rounds are chained: allowed: fixed")
        return None
    drafts: Any = draft.stepper if draft is not None and job.lookahead else None
    verifies: Any = target.stepper
    shape = Shape(range(job.lookahead)) if job.shape.is_chain else job.shape
    sizes = job.config.batch_size, shape, job.dynamic, job.mask_ids
    if not job.config.is_lookup or draft is None:
        return DeviceRounds(drafts, verifies, *sizes)
    oracle: Any = draft.oracle
    _, longest, filler = oracle.copies
    copying = Copying(longest, NOBODY if filler is None else filler, job.capacity)
    return DeviceRounds(None, verifies, *sizes, copying)


def _can_chain(job: Job, target: TargetWorker, draft: DraftWorker | None) -> bool:
    """Returns whether the GPU can decide whole rounds of these workers, those of rank 0."""
    is_missing = draft is None and job.lookahead > 0
    is_cut = job.backup_lookahead < job.lookahead
    is_apart = job.serving or job.config.drafts or job.config.fast_lookup not in (None, "prompt")
    if is_missing or is_cut or is_apart:
        return False
    is_dynamic = job.dynamic is not None
    workers = (target,) if job.config.is_lookup else (draft, target)
    return all(device_decides(worker, is_dynamic) for worker in workers if worker)


def device_decides(worker: DraftWorker | TargetWorker, anywhere: bool = False) -> bool:
    """Returns whether a device, if `anywhere` also a CPU, can choose tokens without the host."""
    stepper = worker.stepper
    if not (worker.oracle.chains and isinstance(stepper, Stepper)):
        return False
    if not (stepper.backend.chains or anywhere) or stepper.backend.info.kind == "emulated":
        return False
    is_captured = stepper.stack.group.capturable or not stepper.backend.capture
    return isinstance(stepper.stack, TransformerStack) and is_captured


class DeviceSpeculator(InlineSpeculator):
    """The source of drafted tokens in inline SD if the GPU drafts and verifies them in one round
    without the host. branches: the round's drafts; the host knows their tokens only if the tokens
    are imposed (synthetic or recorded)."""

    branches: Branches | None = None

    def __init__(self, drafter: Drafter, forwards: DeviceRounds) -> None:
        super().__init__(drafter)
        self.oracle = drafter.worker.oracle
        self.source = drafter.policy.backup
        self._forwards = forwards

    def answer(self, round_: int, count: int) -> Speculation:
        if not self._forwards.is_on:
            return super().answer(round_, count)
        drafter = self._drafter
        drafter.log.ledger.restart()
        drafter.take(self._outcome)
        part = drafter.restarted(range(count))
        self.branches = part.branches
        self.branches.advance(part.levels - self.branches.steps)
        self.stored_s = drafter.log.stored_s
        speculation = drafter.assembled(round_, [part])
        drafter.log.mark(DraftPhase.SPECULATE)
        return speculation

    def lacking(self) -> list[tuple[int, Ints]]:
        """Returns (slot, tokens) for each sequence of which the draft's KV cache lacks tokens: its
        KV cache slot, and the lacking tokens, which precede the last committed one."""
        batch = self._drafter.batch
        if batch.placement is None:  # a lookup
            return []
        gaps = batch.gaps(range(len(batch)))
        most = self._forwards.sheet.back
        assert all(gap.size <= most for gap in gaps), f"the draft lacks {gaps}"
        return [(gap.slot, batch.committed(gap)) for gap in gaps]

    def launched(self) -> None:
        """Counts the drafted tokens of the launched round as stored in the draft's KV cache."""
        if self._drafter.worker.placement is not None:
            stored = 1 if self._drafter.worker.masks else self._forwards.stored
            _count_stored(self._drafter.batch, stored, has_leaves=False)

    def close(self, speculation: Speculation, accepted: Ints) -> None:
        """Records a finished round. speculation: its drafted tokens. accepted: how many drafted
        tokens of each sequence the target accepted, int32 [b]."""
        drafter = self._drafter
        drafter.log.mark(DraftPhase.WAIT)
        sheet = self._forwards.sheet
        is_model = sheet.copying is None
        drafter.log.draft_s = self._forwards.draft_s(speculation.round) if is_model else UNKNOWN
        if sheet.dynamic and not sheet.masks:  # the draft may lack the last accepted token
            batch = drafter.batch
            batch.filled[batch.slots] = batch.last() + np.maximum(accepted, 0)
        drafter.start_round(speculation)
        drafter.log.close_round(speculation.round)


class DeviceTarget(TargetWorker):
    """A target worker whose GPU decides whole rounds: it launches the draft and the verification of
    a round together, and launches the next round before the current one is over."""

    def __init__(
        self,
        worker: TargetWorker,
        draft: DeviceSpeculator | None,
        forwards: DeviceRounds,
        limit: Callable[[int], int | None],
        waiter: Waiter,
        start: Start = lambda round_, forced: forced(),
    ) -> None:
        """worker: the worker to use if the host must decide a round. draft: the source of drafted
        tokens in inline SD; None in AR, and on target ranks other than rank 0. limit: maps a
        request id to the most tokens of its answer. waiter: waits for rounds that were launched in
        vain. start: lets all target ranks launch a round."""
        super().__init__(worker.stepper, worker.oracle, worker.placement)
        self._draft = draft
        self._forwards = forwards
        self._limit = limit
        self._waiter = waiter
        self._starting = start
        self._batch: Batch
        self._speculation: Speculation
        self._imposed: tuple[Ints, Ints] | None = None  # (accepted, bonus) if tokens are imposed
        self._decision: Ints  # the outcome that the GPU decided, a row a sequence
        self._was_ahead = False

    def enter(self, batch: Batch, change: Change) -> None:
        if any(change):
            self._drop()
        super().enter(batch, change)
        self._forwards.enter(len(batch))

    def leave(self, batch: Batch) -> None:
        self._drop()
        super().leave(batch)

    def _drop(self) -> None:
        for program in self._forwards.dropped():
            program.wait(self._waiter)

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        self._batch = batch
        self._speculation = speculation
        if not self._forwards.is_on:
            super().upload(batch, speculation, fill)
            return
        self.num_rows = speculation.num_rows
        self._was_ahead = self._forwards.is_flying(speculation.round)
        if not self._was_ahead:
            tokens = [sequence.tokens for sequence in batch.sequences]
            self._forwards.begin(self._state(batch), tokens)

    def launch(self) -> None:
        if not self._forwards.is_on:
            super().launch()
            return
        forwards = self._forwards
        round_ = self._speculation.round
        last = self._batch.last()
        ahead = forwards.lookahead
        branches = None if self._draft is None else self._draft.branches
        if not self._was_ahead:
            self._start(round_, last + ahead, lambda: self._forced(branches))
        _count_stored(self._batch, forwards.stored + 1, has_leaves=True)
        if self._draft is not None:
            self._draft.launched()
        if forwards.goes_ahead:  # starts the next round early
            self._start(round_ + 1, last + 2 * ahead + 1, lambda: self._next_forced(branches))

    def _start(self, round_: int, last: Index, forced: Callable[[], Ints | None]) -> None:
        """Launches round `round_` on all target ranks if it can begin. last: the last KV position
        that it may write, of each sequence, [b]. forced: returns the imposed tokens of the round,
        or None if it cannot begin yet."""
        if (tokens := self._starting(round_, forced)) is not None:
            self._forwards.hold(self._batch.slots, last)
            self._forwards.launch(round_, tokens)

    def _next_forced(self, branches: Branches | None) -> Ints | None:
        """Returns the next round's imposed tokens, as `_forced` does, or None if a sequence or the
        KV cache may end before it. Also computes this round's outcome if its tokens are imposed."""
        batch = self._batch
        forwards = self._forwards
        self._imposed = None
        emitted = batch.lengths.copy()  # the least lengths of sequences after this round
        if not self.oracle.reads_forwards:  # imposed tokens: the outcome is known
            drafted = Speculation.empty(0, len(batch), forwards.nodes)
            if branches is not None:
                drafted.num_draft[...] = forwards.nodes
                drafted.tokens[...] = branches.tokens
            self._imposed = self.oracle.judge(batch, drafted, Speculator().proposal)
            emitted += forwards.shape.depths[self._imposed[0]]
        assert isinstance(self.stepper, Stepper)
        if int(_room(batch, self.stepper.options.capacity).min()) < 2 * forwards.lookahead + 1:
            return None
        limits = map(self._limit, batch.ids.tolist())
        if any(limit is not None and n >= limit for n, limit in zip(emitted, limits, strict=True)):
            return None
        return self._forced(self._next_branches())

    def wait(self, waiter: Waiter) -> None:
        if not self._forwards.is_on:
            super().wait(waiter)
            return
        round_ = self._speculation.round
        self._forwards.last_of(round_).wait(waiter)
        self._decision = self._forwards.outcome(round_)
        rows = self._speculation.rows.copy()
        drafted = rows[:, Speculation.HEAD :]
        if self._forwards.sheet.copying:
            assert np.array_equal(drafted, self._decision[:, 2:]), "not as the host looked up"
        drafted[...] = self._decision[:, 2:]
        self._speculation = Speculation(round_, rows, version=self._speculation.version)
        self._batch.serve(self._speculation)

    def verified(self, speculation: Speculation) -> Speculation:
        if not self._forwards.is_on:
            return speculation
        if self._draft is not None:
            self._draft.close(self._speculation, self._decision[:, 0])
        return self._speculation

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        if not self._forwards.is_on:
            return super().judge(batch, speculation, proposals)
        accepted = self._decision[:, 0]
        bonus = self._decision[:, 1]
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
        """Returns the input of a round that the host begins, int32 [b, columns]: the KV cache slot,
        the last token's position, this token, and earlier tokens that the draft's cache lacks."""
        state = np.full(self._forwards.sheet.state.shape, NOBODY, np.int64)
        state[:, 0] = batch.slots
        state[:, 1] = batch.last()
        state[:, 2] = batch.last_tokens
        lacking: list[tuple[int, Ints]] = []
        if self._draft is not None:
            lacking = self._draft.lacking()
        if self._forwards.is_shared:  # Other ranks do not know what the draft lacks.
            back = self._forwards.sheet.back
            longer = [sequence for sequence in batch.sequences if len(sequence.tokens) > 1]
            lacking = [(of.slot, np.array(of.tokens[-1 - back : -1], np.int32)) for of in longer]
        for slot, tokens in lacking:
            state[batch.slots == slot, -len(tokens) :] = tokens
        return state.astype(np.int32)

    def _forced(self, branches: Branches | None) -> Ints:
        """Returns the imposed (synthetic or recorded) tokens of a round, which the GPU uses instead
        of those of the models, as rows of Sheet.forced; NOBODY (a marker) where a model, not the
        workload, decides."""
        width = self._forwards.sheet.forced.shape[-1]
        forced = np.full((len(self._batch), width), NOBODY, np.int32)
        truth = self.oracle.truth()
        if truth is not None:
            drafted = width - truth.shape[1]
            forced[:, drafted:] = truth
            if branches is not None and branches.trees is not None:
                forced[:, :drafted] = np.hstack(branches.trees[::-1])
            elif branches is not None:
                forced[:, :drafted] = branches.tokens
        return forced

    def _next_branches(self) -> Branches | None:
        """Returns the drafts of the next round if their tokens are imposed (synthetic or recorded),
        else None. The oracles, which decide tokens, begin the round here and when it begins."""
        if self._imposed is None:
            return None
        batch = _after(self._batch, *self._imposed)
        self.oracle.begin_round(batch, ())
        if self._draft is None:
            return None
        self._draft.oracle.begin_round(batch, ())
        return self._draft.oracle.restart(batch, range(len(batch)), self._draft.source)


def _after(batch: Batch, accepted: Ints, bonus: Ints) -> Batch:
    """Returns a copy of the batch as it will be after the current round. accepted, bonus: the
    number of accepted tokens, and the bonus token, of each sequence."""
    following = copy(batch)
    following.lengths = batch.lengths + batch.shape.depths[accepted] + 1
    following.last_tokens = bonus
    return following


def _count_stored(batch: Batch, count: int, *, has_leaves: bool) -> None:
    """Counts `count` tokens of each sequence, from the last committed one on, as stored in the KV
    cache by the GPU. has_leaves: whether the tree nodes without children were stored, too."""
    last = batch.last()
    lag = 1 + (len(batch.placement.masks) if batch.placement else 0)
    assert (batch.filled[batch.slots] >= last - lag).all(), "tokens after some that are missing"
    batch.filled[batch.slots] = last + count
    if isinstance(batch, TreeBatch):
        batch.leave_moves(has_leaves=has_leaves)


def _room(batch: Batch, capacity: int) -> Index:
    """Returns how many KV positions are left after each sequence's last token, [b], until its slot
    of `capacity` positions is full, or a sequence without a prompt reuses its positions."""
    assert batch.placement is not None, "positions without a cache"
    room = capacity - 1 - batch.last()
    window = batch.placement.window
    return room if window is None else np.minimum(room, window - 1 - (batch.lengths - 1) % window)
