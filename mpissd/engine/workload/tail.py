"""Draft worker that prepares for one outcome: all served tokens are accepted (fan_out=tail:F).

PEARL and AMUSD continue drafting behind the tokens under verification as if the target accepted all
of them. A list F_0 … F_K expresses this only while every speculation is K tokens long; this worker
keeps its candidates behind the last *served* token, wherever that is. Its place depends on time and
length alone, so decoding stays lossless [THEORY, losslessness 1].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.placement import Placement
from mpissd.engine.workload.rollout import Branches, Lanes, Rollout
from mpissd.engine.workload.steps import Steps
from mpissd.engine.workload.workers import Admissions, DraftWorker


class TailWorker(DraftWorker):
    """A draft worker whose branches all grow behind the last served token."""

    def __init__(self, worker: DraftWorker) -> None:
        """Wraps `worker`, which does everything except choose the branches."""
        self._worker = worker
        self.stepper, self.lookahead = worker.stepper, worker.lookahead

    def twin(self, stepper: Forwards) -> TailWorker:
        """Returns a tail worker over the wrapped worker's twin on `stepper`."""
        return TailWorker(self._worker.twin(stepper))

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns fan_outs.widest candidates behind each sequence's last served token alone."""
        served, count = speculation.num_draft, fan_outs.widest
        every = len(batch) > 0 and bool((served != served[0]).any())
        rows = range(speculation.tokens.shape[1] + 1)
        fan_out = tuple(count if every or k == served[0] else 0 for k in rows)
        branches = self._worker.branches(batch, speculation, FanOuts(fan_out, fan_out))
        if not every:
            return branches
        lanes = branches.lanes
        last = np.flatnonzero(lanes.k == served[lanes.rows])
        branches.rollout.keep(last.tolist(), ())
        return Branches(Lanes(lanes.rows[last], lanes.k[last], lanes.place[last]), branches.rollout)

    def forget(self) -> None:
        self._worker.forget()

    def is_sound(self) -> bool:
        return self._worker.is_sound()

    def prepare(self, requests: Iterable[Request]) -> None:
        self._worker.prepare(requests)

    @property
    def placement(self) -> Placement | None:
        return self._worker.placement

    @placement.setter
    def placement(self, placement: Placement | None) -> None:
        self._worker.placement = placement

    def enter(self, batch: Batch, admissions: Admissions) -> None:
        self._worker.enter(batch, admissions)

    def store_opened(self, batch: Batch, rows: int) -> Steps[int]:
        return self._worker.store_opened(batch, rows)

    def leave(self) -> None:
        self._worker.leave()

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._worker.begin_round(batch, admissions)

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        return self._worker.committed(slot, start, stop)

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        self._worker.launch_step(rollouts)

    def served(self, batch: Batch, speculation: Speculation) -> None:
        self._worker.served(batch, speculation)

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        return self._worker.restart(batch, rows, source)

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        self._worker.collect_step(rollouts)
