"""Drafting ahead on a GPU that itself passes each forward's greedy tokens to the next forward."""

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Ints, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.features.device_rounds import device_decides
from mpissd.engine.job import Job
from mpissd.engine.law.fanout import FanOuts, lanes_of
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.growing import DeviceGrowth
from mpissd.engine.round.branches import Branches
from mpissd.engine.round.rows import DraftWorker
from mpissd.engine.round.sequence import Batch


def joining(job: Job, worker: DraftWorker) -> DraftWorker:
    """Returns a draft worker whose GPU grows branches (drafts for possible next rounds) without
    waiting for the host, or `worker` itself if the job needs the host between two forwards."""
    is_fed = job.serving or job.config.learners or job.tree_lanes or job.masks
    if is_fed or not (job.config.drafts and job.fan_out and device_decides(worker)):
        return worker
    stepper = worker.stepper
    assert isinstance(stepper, Stepper)
    counts = {job.config.batch_size * sum(fan_out) for fan_out in job.fan_outs.lists}
    return JoiningWorker(worker, DeviceGrowth(stepper, counts, job.lookahead))


class JoiningWorker(DraftWorker):
    """A draft worker whose GPU grows branches without the host. The first forward of the branches
    is launched together with the draft's forward over the tokens that the target verifies, and each
    further forward while the one before it runs."""

    def __init__(self, worker: DraftWorker, growth: DeviceGrowth) -> None:
        super().__init__(worker.stepper, worker.oracle, worker.placement)
        self._growth = growth
        self._begun: Branches | None = None  # branches whose first forward is launched

    def launch_scoring(
        self, batch: Batch, speculation: Speculation, fan_outs: FanOuts, levels: int
    ) -> None:
        super().launch_scoring(batch, speculation, fan_outs, levels)
        self._begun = None
        if batch.forced:
            return
        picks: Ints | int = 0
        if self.oracle.reads_forwards:
            branches, picks = _unknown(batch, speculation, fan_outs, self.oracle.lookahead)
        else:  # tokens are imposed
            branches = self.oracle.branches(batch, speculation, fan_outs)
        assert branches.places is not None, "a branch without a place"
        places = batch.step(branches.places, 0)
        if self._growth.begin(branches, places, picks, levels):
            self._begun = branches

    def scored(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        if self._begun is None:
            return super().scored(batch, speculation, fan_outs)
        self._growth.collect()  # reads the branches' first tokens
        return self._begun

    def launch_step(self, batch: Batch, growing: Sequence[Branches]) -> None:
        if self._growth.left:
            self._growth.launch()
        else:
            super().launch_step(batch, growing)

    def collect_step(self, growing: Sequence[Branches]) -> None:
        if self._growth.left:
            self._growth.collect()
        else:
            super().collect_step(growing)

    def settle(self, waiter: Waiter) -> bool:
        is_growing = self._growth.left > 0
        while self._growth.left:
            self.wait(waiter)
            self._growth.collect()
        return is_growing


def _unknown(
    batch: Batch, speculation: Speculation, fan_outs: FanOuts, lookahead: int
) -> tuple[Branches, Ints]:
    """Makes a branch for each bonus candidate before the draft's forward over the verified tokens
    has decided the candidates, so that the GPU can fill them in. Only for chains. Returns (the n
    branches, whose `first`, the candidate, is −1; where the GPU finds the candidates, int32 [3, n]:
    for each, the row of the forward, its rank among the row's likeliest tokens, and the drafted
    token that does not count)."""
    fans = list[int]()
    trunk = list[tuple[int, int, int]]()
    for row, source in enumerate(speculation.source.tolist()):
        served = [*batch.sequences[row].served, -1]
        fans += fan_outs.behind(source)[: len(served)]
        trunk += [(row, k, token) for k, token in enumerate(served)]
    lines, ranks = lanes_of(fans)
    rows, nodes, after = np.array(trunk, np.int32)[lines].T
    tokens = np.full((len(lines), 1 + lookahead), -1, np.int32)
    branches = batch.grown_ahead(rows.astype(np.int64), nodes, ranks, tokens[:, 0], tokens[:, 1:])
    return branches, np.array([lines, ranks, after])
