"""The draft's part of a round: answer an outcome, then pre-speculate while the target verifies.

SD runs the same loop without growth: its cache is always empty, so every outcome is a miss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import DivergedError
from mpissd.common.rounds import Batch, Control, Outcome, Source, Speculation
from mpissd.common.trace import DraftLedger, DraftPhase, Ledger
from mpissd.common.wait import Waiter
from mpissd.engine.decode.ahead import Ahead
from mpissd.engine.decode.answer import Answer, Part
from mpissd.engine.decode.draft_rows import DraftRows
from mpissd.engine.decode.rank_counts import RankCounts
from mpissd.engine.decode.upkeep import LAG, PART, Upkeep
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.rollout import Rollout
from mpissd.engine.workload.steps import R, Steps, finish
from mpissd.engine.workload.workers import DraftWorker


@dataclass(frozen=True)
class DraftPolicy:
    """How a draft answers misses and grows branches.

    The trunk is the committed tokens and the served ones. fan_outs: bonus candidates at each row of
    the trunk; if empty, no branches grow (SD). rests: whether the draft stores nothing after many
    rounds without drafting (`Upkeep`).
    """

    lookahead: int
    fan_outs: FanOuts = field(default_factory=FanOuts)
    backup: Source = Source.JIT
    backup_lookahead: int = 0
    sampled: bool = False
    rests: bool = False


class Drafter:
    """One draft's state between rounds: the batch, the growth, and the cache of its outcomes."""

    COLUMNS = DraftRows.COLUMNS

    def __init__(
        self,
        worker: DraftWorker,
        policy: DraftPolicy,
        capacity: int,
        waiter: Waiter,
        rank_counts: RankCounts | None = None,
    ) -> None:
        """Takes the counter of the bonus tokens' ranks; None: they are not counted."""
        self._worker, self._policy, self._waiter = worker, policy, waiter
        self._fan_outs = policy.fan_outs
        self.rank_counts = rank_counts
        self._batch = Batch(capacity)
        self._ahead = Ahead()
        self._answer = Answer(policy.lookahead, sampled=policy.sampled)
        self.ledger: Ledger = DraftLedger()
        self._rows = DraftRows()
        self._control = Control()  # of the round that is answered now
        self._upkeep = Upkeep(rests=policy.rests)
        self.version = 0  # of the weights that draft; 0: as they were loaded
        self.divergence: str | None = None  # why weights that replaced those are to be left
        # Of the last answer: tokens that misses lacked and that were stored first, and the seconds.
        self.caught_up = 0, 0.0

    @property
    def digest(self) -> int:
        """The digest of the outcomes that it received (Batch.digest)."""
        return self._batch.digest

    @property
    def num_live(self) -> int:
        """The number of sequences in the batch."""
        return len(self._batch)

    @property
    def lacking(self) -> int:
        """Number of committed tokens not stored yet, not counting the next first step's."""
        return self._worker.lacking(self._batch)

    @property
    def worker(self) -> DraftWorker:
        """The worker that it drafts with."""
        return self._worker

    @property
    def policy(self) -> DraftPolicy:
        """The policy that it was made with."""
        return self._policy

    def finish(self, steps: Steps[R]) -> R:
        """Runs all forwards of this drafter's `steps`; returns their result."""
        return finish(steps, self.wait)

    def wait(self) -> None:
        """Waits until the launched forward is over."""
        self._worker.wait(self._waiter)

    def wait_until(self, test: Callable[[], bool], what: str) -> None:
        """Waits until test() is true, as this rank waits for others; what: named in the error."""
        self._waiter.until(test, what)

    def answer(self, outcome: Outcome) -> Speculation:
        """Returns the speculation that an outcome asks for (`answering`)."""
        return self.finish(self.answering(outcome))

    def answering(self, outcome: Outcome) -> Steps[Speculation]:
        """Makes the speculation that an outcome asks for: hits from the cache, misses by the
        backup.

        A miss ends the growth; a hit prunes it to the branch of the outcome. A sequence of which
        the draft lacks too much has source NONE.
        """
        mark = self.ledger.mark
        self._worker.enter(self._batch, self._batch.apply(outcome))
        mark(DraftPhase.COMMIT)
        self._control = outcome.control
        self._upkeep.open_round(drafts=self._most > 0)
        lanes = self._ahead.lookup(self._batch, outcome)
        mark(DraftPhase.LOOKUP)
        rollouts = self._winners(lanes) + (yield from self._backups(lanes))
        yield from self._finish(rollouts)
        speculation = self._assemble(outcome.round + 1, len(lanes), rollouts)
        if self.rank_counts is not None:
            self.rank_counts.note_lookup(outcome, lanes, self._ahead.branches, self._fan_outs)
        self._ahead.clear()
        mark(DraftPhase.SPECULATE)
        return speculation

    @property
    def _most(self) -> int:
        """Most tokens that the next speculation may have."""
        limit = self._control.lookahead
        return self._policy.lookahead if limit is None else min(limit, self._policy.lookahead)

    @property
    def is_asked(self) -> bool:
        """Whether the lead waits for the answer: one without a token it knows."""
        return self._control.lookahead != 0

    def _winners(self, lanes: Sequence[int | None]) -> list[Rollout]:
        growth = self._ahead.prune(lanes) if self._most else None
        if growth is None:
            return []
        self._rows.steps_ready = growth.steps
        return [growth] if len(growth.rows) else []

    def _backups(self, lanes: Sequence[int | None]) -> Steps[list[Rollout]]:
        self.caught_up = 0, 0.0
        rows = [row for row, lane in enumerate(lanes) if lane is None]
        self._rows.num_jit = 0
        if not rows or not self._most:
            return []
        if self._upkeep.has_rested:
            self._upkeep.check(self.lacking)  # prompts that were opened during a rest join later
        if self._policy.backup == Source.JIT:
            if self._upkeep.is_catching_up:
                rows = self._worker.ready(self._batch, rows, LAG)
            if not (rows := (yield from self._catch_up(rows))):
                return []
        backup = self._worker.resume(self._batch, rows, self._policy.backup)
        if self._policy.backup == Source.JIT:
            self._rows.num_jit = len(rows)
        else:
            # FAST tokens cost no draft step.
            backup.steps = min(self._policy.backup_lookahead, self._most)
        return [backup]

    def _catch_up(self, rows: list[int]) -> Steps[list[int]]:
        """Stores the tokens that misses need before their first draft step, as many as the lead
        allows; a step stores one token itself. Returns the rows that lack no more."""
        start, most = perf_counter(), self._control.catch_up
        if not (stored := (yield from self._fill(rows, 1, most))):
            return rows if most is None else self._worker.ready(self._batch, rows, 1)
        self.ledger.mark(DraftPhase.PREFILL)
        self.caught_up = stored, perf_counter() - start
        return rows if most is None else self._worker.ready(self._batch, rows, 1)

    def _fill(self, rows: Sequence[int], spare: int = 0, most: int | None = None) -> Steps[int]:
        """Stores committed tokens that the cache of batch rows `rows` lacks, up to `most`."""
        return (yield from self._worker.filling(self._batch, rows, spare, most))

    def _finish(self, rollouts: Sequence[Rollout]) -> Steps[None]:
        """Grows hits to K and misses to K_b, in shared forwards."""
        start, steps = perf_counter(), 0
        wanted = [(rollout, self._wanted(rollout)) for rollout in rollouts]
        while short := [rollout for rollout, want in wanted if rollout.steps < want]:
            self._worker.launch_step(short)
            yield
            steps += 1
            if not self._collect(short):
                for rollout, want in wanted:
                    rollout.fill(want)
        drafting_s = perf_counter() - start
        only_jit = self._rows.num_jit == len(self._batch) > 0
        drafted = min(self._policy.backup_lookahead, self._most)
        complete = only_jit and drafted == self._policy.lookahead
        self._rows.draft_s = drafting_s if complete else float("nan")

    def _collect(self, rollouts: Sequence[Rollout]) -> bool:
        """Stores a step's tokens; returns False if newer weights give logits that are not finite.

        No token is drawn from such logits. The token served in its place has q = 1, so decoding
        stays lossless. Raises DivergedError if the weights come from the draft's own files.
        """
        try:
            self._worker.collect_step(rollouts)
        except DivergedError as error:
            if not self.version:
                raise
            self.divergence = str(error)
        if self.version and not self._worker.is_sound():
            self.divergence = "draft: a logit is not finite: its weights overflow"
        return self.divergence is None

    def _wanted(self, rollout: Rollout) -> int:
        if rollout is self._ahead.growth:
            return self._most
        return min(self._policy.backup_lookahead, self._most)

    def _assemble(self, round_: int, count: int, rollouts: Sequence[Rollout]) -> Speculation:
        parts = [
            Part(one, Source.CACHE if one is self._ahead.growth else self._policy.backup)
            for one in rollouts
        ]
        return self._answer.assemble(round_, count, parts, self._most, self.version)

    def proposals(self) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the last answer's uncertain tokens, by sequence."""
        return self._answer.proposals()

    def proposals_by_row(self) -> dict[int, list[NDArray[np.float32]]]:
        """Returns the distributions of `proposals` as {batch row: distributions}."""
        return self._answer.rows

    def hear(self, speculation: Speculation) -> None:
        """Begins the round in which the target verifies this speculation."""
        self._worker.served(self._batch, speculation)
        if self.rank_counts is not None:
            self.rank_counts.count(speculation)

    def leave(self) -> None:
        """Ends the pass after the last outcome."""
        self._worker.leave()

    @property
    def _has_glue(self) -> bool:
        grows = self._policy.fan_outs.branches > 0 and self._control.width != 0
        return grows and self._most > 0 and len(self._batch) > 0

    def begin_growth(self, speculation: Speculation) -> Steps[bool]:
        """Runs the glue (scores the served trunk), makes the cache's keys; False: none to grow."""
        if not self._has_glue:
            yield from self._keep_up()
            return False
        if self._upkeep.is_catching_up:
            return False
        if (yield from self._fill(range(len(self._batch)))):
            self.ledger.mark(DraftPhase.PREFILL)
        self._growth_start = perf_counter()
        self._worker.launch_glue(self._batch, speculation)
        control = self._control
        fan_outs = self._fan_outs = self._policy.fan_outs.within(control.width, control.lookahead)
        yield
        self.ledger.mark(DraftPhase.GLUE)
        branches = self._worker.branches(self._batch, speculation, fan_outs)
        rows, k = self._ahead.begin(self._batch, speculation, branches)
        self._worker.settle(self._batch, branches.rollout, rows, k)
        self.ledger.mark(DraftPhase.KEYS)
        return True

    def _keep_up(self) -> Steps[None]:
        """Stores the tokens of rounds without drafting, so that drafting can begin again."""
        if self._most or self._upkeep.is_resting:
            return
        most = PART if self._upkeep.is_behind else None
        if (yield from self._fill(range(len(self._batch)), LAG, most)):
            self.ledger.mark(DraftPhase.PREFILL)

    @property
    def is_catching_up(self) -> bool:
        """Whether it has rested and lacks much: `store_part` stores a part of that."""
        if self._upkeep.is_catching_up:
            self._upkeep.check(self.lacking)
        return self._upkeep.is_catching_up

    def store_part(self) -> Steps[None]:
        """Stores a part of the lacking tokens after a rest; sequences that lack fewest first."""
        yield from self._fill(range(len(self._batch)), 1, PART)
        self.ledger.mark(DraftPhase.PREFILL)

    @property
    def is_storing(self) -> bool:
        """Whether this round stores parts of opened prompts."""
        return self._control.fill > 0

    def store_opened(self) -> Steps[int]:
        """Stores a part of the opened prompts: as many rows as the target did, so that both are
        ready together. Returns how many were stored."""
        due = self._upkeep.opened(self._control.fill)
        if stored := (yield from self._worker.store_opened(self._batch, due)):
            self.ledger.mark(DraftPhase.PREFILL)
        return stored

    @property
    def growing(self) -> bool:
        """Whether a further growth step would add tokens to the cache."""
        growth = self._ahead.growth
        return growth is not None and len(growth) > 0 and growth.steps < self._most

    def grow_step(self) -> Steps[None]:
        """Adds one token to every branch."""
        assert self._ahead.growth is not None, "grow_step() without growth"
        growing = [self._ahead.growth]
        self._worker.launch_step(growing)
        yield
        if not self._collect(growing):
            self._ahead.clear()
        if not self.growing:
            self._rows.growth_s = perf_counter() - self._growth_start
        self.ledger.mark(DraftPhase.GROW)

    def change(self, version: int) -> None:
        """Drafts by the weights of this version from the next answer on.

        Called between two rounds, when the worker's model has changed. Drops the cache and the
        branches of the old weights, so that a speculation and its q come from one version.
        """
        self._ahead.clear()
        self._worker.forget()
        self.version, self.divergence = version, None

    def close_round(self, speculation: Speculation) -> None:
        """Records the round that `speculation` opened."""
        self._rows.close(speculation.round)
        self.ledger.close_round(speculation.round, DraftPhase.RECORD)

    def table(self, first_round: int, last_round: int) -> NDArray[Any]:
        """Returns the rows of COLUMNS for rounds first … last-1."""
        return self._rows.table(first_round, last_round)
