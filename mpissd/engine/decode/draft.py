"""The draft's part of a round: answers an outcome, then pre-speculates while the target verifies.

SD runs the same loop without growth: its cache is always empty, so every outcome is a miss. The
order of these steps is in draft_loop.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import DivergedError
from mpissd.common.rounds import Control, Outcome, Source, Speculation
from mpissd.common.tape import LAST, SPILL_ROUNDS, Tape
from mpissd.common.trace import DraftLedger, DraftPhase, Ledger, select
from mpissd.common.wait import Waiter
from mpissd.engine.decode.cache import SpeculationCache
from mpissd.engine.decode.rank_counts import RankCounts
from mpissd.engine.model.transformer.chained import ChainedForwards
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.oracle import Rollout
from mpissd.engine.workload.workers import DraftWorker, R, Steps, finish

_UNKNOWN = float("nan")
# While rounds draft nothing, tokens to store wait until they are worth a forward: a sequence's
# tokens until they are more than LAG, opened prompts until PART rows are due.
LAG, PART = 7, 24


@dataclass(frozen=True)
class DraftPolicy:
    """How a draft answers misses and grows branches.

    The trunk is the committed tokens and the served ones. fan_outs: bonus candidates at each row of
    the trunk; if empty, no branches grow (SD).
    """

    lookahead: int
    fan_outs: FanOuts = field(default_factory=FanOuts)
    backup: Source = Source.JIT
    backup_lookahead: int = 0
    sampled: bool = False


class Drafter:
    """One draft's state between rounds: the batch, and the branches that it grows.

    chained: the programs of rounds that the device decides (None: never); in such a round the
    target's worker launches this drafter's forwards. rows: by batch row, the distributions [V] of
    the last answer's uncertain tokens. caught_up_s: seconds in which the tokens were stored that
    the misses of the last answer lacked. version: of the weights that draft; 0: as they were
    loaded. divergence: why weights that replaced those are to be left.
    """

    # By round. t_draft_s: seconds in which a whole speculation was drafted, NaN if hits gave a part
    # of it. t_growth_s: seconds of a growth that ended, or NaN. num_jit: misses that the model
    # drafted. steps_ready: steps grown of the branches that hit.
    COLUMNS = ("round", "t_draft_s", "t_growth_s", "num_jit", "steps_ready")

    def __init__(
        self,
        worker: DraftWorker,
        policy: DraftPolicy,
        capacity: int,
        waiter: Waiter,
        rank_counts: RankCounts | None = None,
    ) -> None:
        """Takes the counter of the bonus tokens' ranks; None: they are not counted."""
        self.worker, self.policy, self._waiter = worker, policy, waiter
        self.rank_counts = rank_counts
        self.batch = worker.open_batch(capacity)
        self.cache = SpeculationCache()
        self.chained: ChainedForwards | None = None
        self.ledger: Ledger = DraftLedger()
        self._control = Control()  # of the round that is answered now
        self._due = 0  # rows of opened prompts that the target stored, and this draft did not
        self._fan_outs = policy.fan_outs  # of the branches that grow
        self.rows: dict[int, list[NDArray[np.float32]]] = {}
        self.caught_up_s = 0.0
        self.version = 0
        self.divergence: str | None = None
        self._tape = Tape("d")
        self.draft_s = self._growth_s = _UNKNOWN
        self._num_jit = self._steps_ready = 0

    def finish(self, steps: Steps[R]) -> R:
        """Runs all forwards of this drafter's `steps`; returns their result."""
        return finish(steps, self.wait)

    def wait(self) -> None:
        """Waits until the launched forward is over."""
        self.worker.wait(self._waiter)

    @property
    def waiter(self) -> Waiter:
        """How this rank waits for others."""
        return self._waiter

    def answer(self, outcome: Outcome) -> Speculation:
        """Returns the speculation that an outcome asks for (`answering`)."""
        return self.finish(self.answering(outcome))

    def answering(self, outcome: Outcome) -> Steps[Speculation]:
        """Makes the speculation that an outcome asks for: hits from the cache, misses by the
        backup.

        A miss ends the growth; a hit prunes it to the branch of the outcome.
        """
        mark, cache = self.ledger.mark, self.cache
        self.worker.enter(self.batch, self.batch.apply(outcome))
        mark(DraftPhase.COMMIT)
        self._control = outcome.control
        lanes = cache.lookup(self.batch, outcome)
        mark(DraftPhase.LOOKUP)
        rollouts = []
        if self._most and (hits := cache.prune(lanes)) is not None:
            self._steps_ready = hits.steps
            rollouts.append(hits)
        misses = [row for row, lane in enumerate(lanes) if lane is None]
        self.caught_up_s, self._num_jit = 0.0, 0
        if misses and self._most:
            rollouts += yield from self._backup(misses)
        yield from self._finish(rollouts)
        speculation = self._assembled(outcome.round + 1, len(lanes), rollouts)
        if self.rank_counts is not None:
            self.rank_counts.note_lookup(outcome, lanes, cache.branches, self._fan_outs)
        cache.clear()
        mark(DraftPhase.SPECULATE)
        return speculation

    @property
    def _most(self) -> int:
        """Most tokens that the next speculation may have."""
        limit = self._control.lookahead
        return self.policy.lookahead if limit is None else min(limit, self.policy.lookahead)

    @property
    def is_asked(self) -> bool:
        """Whether the lead waits for the answer: one without a token it knows."""
        return self._control.lookahead != 0

    def _backup(self, rows: list[int]) -> Steps[list[Rollout]]:
        """Begins the tokens of these misses; FAST tokens cost no draft step."""
        policy = self.policy
        if policy.backup == Source.JIT:
            start = perf_counter()
            # The first step stores one token itself.
            if (yield from self.worker.filling(self.batch, rows, 1)):
                self.ledger.mark(DraftPhase.PREFILL)
                self.caught_up_s = perf_counter() - start
            self._num_jit = len(rows)
        backup = self.worker.restart(self.batch, rows, policy.backup)
        if policy.backup == Source.FAST:
            backup.steps = min(policy.backup_lookahead, self._most)
        return [backup]

    def _finish(self, rollouts: Sequence[Rollout]) -> Steps[None]:
        """Grows hits to K and misses to K_b, in shared forwards."""
        if self.chained is not None and self.chained.is_on:
            (rollout,) = rollouts
            rollout.steps = self.policy.lookahead  # the target's worker launches these forwards
            self.rollout = rollout
            return
        start = perf_counter()
        wanted = [(rollout, self._wanted(rollout)) for rollout in rollouts]
        while short := [rollout for rollout, want in wanted if rollout.steps < want]:
            self.worker.launch_step(self.batch, short)
            yield
            if not self._collect(short):
                for rollout, want in wanted:
                    rollout.fill(want)
        drafting_s = perf_counter() - start
        only_jit = self._num_jit == len(self.batch) > 0
        drafted = min(self.policy.backup_lookahead, self._most)
        is_whole = only_jit and drafted == self.policy.lookahead
        self.draft_s = drafting_s if is_whole else _UNKNOWN

    def _wanted(self, rollout: Rollout) -> int:
        is_hit = rollout is self.cache.growth
        return self._most if is_hit else min(self.policy.backup_lookahead, self._most)

    def _collect(self, rollouts: Sequence[Rollout]) -> bool:
        """Stores a step's tokens; returns False if newer weights give logits that are not finite.

        No token is drawn from such logits. The token served in its place has q = 1, so decoding
        stays lossless. Raises DivergedError if the weights come from the draft's own files.
        """
        try:
            self.worker.collect_step(rollouts)
        except DivergedError as error:
            if not self.version:
                raise
            self.divergence = str(error)
        if self.version and not self.worker.oracle.is_sound:
            self.divergence = "draft: a logit is not finite: its weights overflow"
        return self.divergence is None

    def _assembled(self, round_: int, count: int, rollouts: Sequence[Rollout]) -> Speculation:
        """Returns the speculation of a round for `count` sequences; rows in no rollout have source
        NONE."""
        head, sampled = Speculation.HEAD, self.policy.sampled
        speculation = Speculation.empty(round_, count, self.policy.lookahead, sampled=sampled)
        speculation.version = self.version
        self.rows = {}
        for rollout in rollouts:
            is_hit = rollout is self.cache.growth
            source = Source.CACHE if is_hit else self.policy.backup
            steps = min(rollout.steps, self._most)
            # A slice if the rollout covers all rows in order.
            rows = slice(None) if len(rollout) == count else rollout.rows
            speculation.rows[rows, :head] = source, int(is_hit), steps
            speculation.rows[rows, head : head + steps] = rollout.tokens[:, :steps]
            if sampled:
                speculation.q[rows, :steps] = 1.0 if rollout.q is None else rollout.q[:, :steps]
                for lane, row in enumerate(rollout.rows.tolist()):
                    self.rows[row] = rollout.proposals(lane, steps)
        return speculation

    def proposals(self) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the last answer's uncertain tokens, by sequence."""
        every = [row for _, rows in sorted(self.rows.items()) for row in rows]
        return [np.asarray(row) for row in every]  # some are kept on a device

    def verification_started(self, speculation: Speculation) -> None:
        """Begins the round in which the target verifies this speculation."""
        self.worker.served(self.batch, speculation)
        if self.rank_counts is not None:
            self.rank_counts.count(speculation)

    def begin_growth(self, speculation: Speculation) -> Steps[bool]:
        """Runs the glue (scores the served trunk), makes the cache's keys; False: none to grow."""
        control, every = self._control, range(len(self.batch))
        grows = self.policy.fan_outs.branches > 0 and control.width != 0
        if not (grows and self._most and every):
            if not self._most:  # so that drafting can begin again
                yield from self._fill(every, LAG)
            return False
        yield from self._fill(every)
        self._growth_start = perf_counter()
        self.worker.launch_glue(self.batch, speculation)
        fan_outs = self._fan_outs = self.policy.fan_outs.within(control.width, control.lookahead)
        yield
        self.ledger.mark(DraftPhase.GLUE)
        branches = self.worker.oracle.branches(self.batch, speculation, fan_outs)
        self.cache.fill(self.batch, speculation, branches)
        lanes = branches.lanes
        self.worker.place_branches(self.batch, branches.rollout, lanes.rows, lanes.k)
        self.ledger.mark(DraftPhase.KEYS)
        return True

    def _fill(self, rows: Sequence[int], spare: int = 0) -> Steps[None]:
        """Stores committed tokens that the cache of batch rows `rows` lacks."""
        if (yield from self.worker.filling(self.batch, rows, spare)):
            self.ledger.mark(DraftPhase.PREFILL)

    @property
    def is_storing(self) -> bool:
        """Whether this round stores parts of opened prompts."""
        return self._control.prefill_rows > 0

    def store_opened(self) -> Steps[int]:
        """Stores a part of the opened prompts: as many rows as the target did, so that both are
        ready together. Returns how many were stored."""
        self._due += self._control.prefill_rows
        if not self._most and self._due < PART:
            return 0
        due, self._due = self._due, 0
        if stored := (yield from self.worker.store_opened(self.batch, due)):
            self.ledger.mark(DraftPhase.PREFILL)
        return stored

    @property
    def growing(self) -> bool:
        """Whether a further growth step would add tokens to the cache."""
        growth = self.cache.growth
        return growth is not None and len(growth) > 0 and growth.steps < self._most

    def grow_step(self) -> Steps[None]:
        """Adds one token to every branch."""
        assert self.cache.growth is not None, "grow_step() without growth"
        growing = [self.cache.growth]
        self.worker.launch_step(self.batch, growing)
        yield
        if not self._collect(growing):
            self.cache.clear()
        if not self.growing:
            self._growth_s = perf_counter() - self._growth_start
        self.ledger.mark(DraftPhase.GROW)

    def change(self, version: int) -> None:
        """Drafts by the weights of this version from the next answer on.

        Called between two rounds, when the worker's model has changed. Drops the branches of the
        old weights, so that a speculation and its q come from one version.
        """
        self.cache.clear()
        self.worker.forget(self.batch)
        self.version, self.divergence = version, None

    def leave(self) -> None:
        """Ends the pass after the last outcome."""
        self.worker.leave(self.batch)

    def close_round(self, speculation: Speculation) -> None:
        """Records the round that `speculation` opened."""
        round_, add = speculation.round, self._tape.tail.append
        # Five calls of append take less time than one extend().
        add(round_)
        add(self.draft_s)
        add(self._growth_s)
        add(self._num_jit)
        add(self._steps_ready)
        self._growth_s, self._steps_ready = _UNKNOWN, 0
        if round_ % SPILL_ROUNDS == LAST:
            self._tape.spill()
        self.ledger.close_round(round_, DraftPhase.RECORD)

    def table(self, first_round: int, last_round: int) -> NDArray[Any]:
        """Returns the rows of COLUMNS for rounds first … last-1, [rounds, columns]."""
        table: NDArray[Any] = select(self._tape.read(), len(self.COLUMNS), first_round, last_round)
        return table
