"""The draft side of a round: answer an outcome, then pre-speculate while the target verifies.

SD is the same loop with nothing grown: its cache is always empty, every outcome is a miss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from mpissd.comm.link import DraftEnd
from mpissd.rounds import Batch, Event, Outcome, Source, Speculation
from mpissd.spec.cache import Key, SpeculationCache
from mpissd.trace import DraftPhase, Ledger, select
from mpissd.wait import Waiter
from mpissd.workload.base import DraftWorker, Rollout


@dataclass(frozen=True)
class DraftPolicy:
    """How a draft answers and what it grows.

    fan_out: F_0 … F_K bonus candidates a row of the trunk; empty: nothing is grown (SD).
    on_late: a hit whose branch isn't grown yet is finished first ("finish"), or served as it is.
    """

    lookahead: int
    fan_out: tuple[int, ...]
    backup: Source = Source.JIT
    backup_lookahead: int = 0
    on_late: str = "finish"

    @property
    def speculates_ahead(self) -> bool:
        """Whether anything is grown while the target verifies (SSD)."""
        return sum(self.fan_out) > 0


class Drafter:
    """One draft's state between rounds: the batch, the growth and the cache that it fills."""

    COLUMNS = ("round", "t_draft_s", "t_growth_s", "num_jit", "steps_ready")

    def __init__(
        self, worker: DraftWorker, policy: DraftPolicy, capacity: int, waiter: Waiter
    ) -> None:
        self._worker, self._policy, self._waiter = worker, policy, waiter
        self._batch = Batch(capacity)
        self._cache = SpeculationCache()
        self._growth: Rollout | None = None
        self.ledger = Ledger(DraftPhase)
        self._rows: list[list[float]] = []
        self._draft_s = self._growth_s = float("nan")
        self._num_jit = self._steps_ready = 0

    @property
    def digest(self) -> int:
        """Of the outcomes it heard (Batch.digest)."""
        return self._batch.digest

    def answer(self, outcome: Outcome) -> Speculation:
        """The speculation that an outcome asks for: hits from the cache, misses by the backup.

        A miss ends the growth; a hit prunes it to the branch that won.
        """
        mark = self.ledger.mark
        self._worker.begin_round(self._batch, self._batch.apply(outcome))
        mark(DraftPhase.COMMIT)
        lanes = self._lookup(outcome)
        mark(DraftPhase.LOOKUP)
        rollouts = self._winners(lanes) + self._backups(lanes)
        self._finish(rollouts)
        speculation = self._assemble(outcome.round + 1, lanes, rollouts)
        self._cache.clear()
        self._growth = None
        mark(DraftPhase.SPECULATE)
        return speculation

    def _lookup(self, outcome: Outcome) -> list[int | None]:
        """The lane that answers each live sequence; None is a miss."""
        batch, cache = self._batch, self._cache
        if not len(cache):
            return [None] * len(batch)
        lookup, round_ = cache.lookup, outcome.round
        return [
            None if event else lookup((round_, seq, epoch, k, token))
            for seq, epoch, event, k, token in outcome.rows.tolist()
            if event != Event.RELEASE
        ]

    def _winners(self, lanes: Sequence[int | None]) -> list[Rollout]:
        rows = [row for row, lane in enumerate(lanes) if lane is not None]
        if not rows or self._growth is None:
            return []
        self._growth.keep([lane for lane in lanes if lane is not None], rows)
        self._steps_ready = self._growth.steps
        return [self._growth]

    def _backups(self, lanes: Sequence[int | None]) -> list[Rollout]:
        rows = [row for row, lane in enumerate(lanes) if lane is None]
        self._num_jit = len(rows) if self._policy.backup == Source.JIT else 0
        if not rows:
            return []
        backup = self._worker.restart(self._batch, rows, self._policy.backup)
        if self._policy.backup == Source.FAST:
            backup.steps = self._policy.backup_lookahead  # costs no draft step
        return [backup]

    def _finish(self, rollouts: Sequence[Rollout]) -> None:
        """Grows hits to K (unless served as they are) and misses to K_b, in shared forwards."""
        start = perf_counter()
        wanted = [(rollout, self._wanted(rollout)) for rollout in rollouts]
        while short := [rollout for rollout, want in wanted if rollout.steps < want]:
            self._step(short)
        only_jit = self._num_jit == len(self._batch) > 0
        complete = only_jit and self._policy.backup_lookahead == self._policy.lookahead
        self._draft_s = perf_counter() - start if complete else float("nan")

    def _wanted(self, rollout: Rollout) -> int:
        if rollout is not self._growth:
            return self._policy.backup_lookahead
        return rollout.steps if self._policy.on_late == "serve" else self._policy.lookahead

    def _step(self, rollouts: Sequence[Rollout]) -> None:
        self._worker.launch_step(rollouts)
        self._worker.wait(self._waiter)
        self._worker.collect_step(rollouts)

    def _assemble(
        self, round_: int, lanes: Sequence[int | None], rollouts: Sequence[Rollout]
    ) -> Speculation:
        speculation = Speculation.empty(round_, len(lanes), self._policy.lookahead)
        for rollout in rollouts:
            won, steps, head = rollout is self._growth, rollout.steps, Speculation.HEAD
            rows = slice(None) if len(rollouts) == 1 else rollout.rows  # alone: all rows, in order
            source = Source.CACHE if won else self._policy.backup
            speculation.rows[rows, :head] = source, int(won), steps
            speculation.rows[rows, head : head + steps] = rollout.tokens[:, :steps]
        return speculation

    def begin_growth(self, speculation: Speculation) -> bool:
        """Runs the glue over the served trunk and makes the keys; False: nothing to grow."""
        if not self._policy.speculates_ahead or not len(self._batch):
            return False
        self._growth_start = perf_counter()
        self._worker.launch_glue(self._batch, speculation)
        self._worker.wait(self._waiter)
        self.ledger.mark(DraftPhase.GLUE)
        k_of, growth = self._worker.branches(self._batch, speculation)
        self._cache.fill(self._keys(speculation.round, k_of.tolist(), growth.first.tolist()))
        self._growth = growth
        self.ledger.mark(DraftPhase.KEYS)
        return True

    def _keys(self, round_: int, k_of: list[int], candidates: list[int]) -> Iterator[Key]:
        """(round, id, epoch, k, t*) of every lane, in lane order."""
        rows = self._batch.identity[:, :2].tolist()
        tokens = iter(candidates)
        return chain.from_iterable(
            zip(repeat(round_), repeat(seq), repeat(epoch), k_of, islice(tokens, len(k_of)))
            for seq, epoch in rows
        )

    @property
    def growing(self) -> bool:
        """Whether a further growth step would add to the cache."""
        return self._growth is not None and self._growth.steps < self._policy.lookahead

    def grow_step(self) -> None:
        """One more token on every branch."""
        assert self._growth is not None, "grow_step() without growth"
        self._step([self._growth])
        if not self.growing:
            self._growth_s = perf_counter() - self._growth_start
        self.ledger.mark(DraftPhase.GROW)

    def close_round(self, speculation: Speculation) -> None:
        """Records the round that `speculation` opened."""
        self._rows.append(
            [
                speculation.round,
                self._draft_s,
                self._growth_s,
                self._num_jit,
                self._steps_ready,
            ]
        )
        self._growth_s = float("nan")
        self._steps_ready = 0
        self.ledger.close_round(speculation.round, DraftPhase.RECORD)

    def table(self, first_round: int, last_round: int) -> NDArray[Any]:
        """Rows of COLUMNS for rounds first … last-1."""
        return select(self._rows, len(self.COLUMNS), first_round, last_round)


def serve(link: DraftEnd, drafter: Drafter) -> None:
    """The draft loop: answers outcomes until one says stop, and grows in between.

    The link is polled between growth steps, so an outcome waits for at most one step.
    """
    drafter.ledger.restart()
    for round_ in count(-1):  # the first outcome only admits
        outcome, stop = link.outcome(round_)
        drafter.ledger.mark(DraftPhase.WAIT)
        if stop:
            return
        speculation = drafter.answer(outcome)
        link.send_speculation(speculation)
        drafter.ledger.mark(DraftPhase.SEND)
        if drafter.begin_growth(speculation):
            while drafter.growing and not link.outcome_arrived():
                drafter.grow_step()
        drafter.close_round(speculation)
