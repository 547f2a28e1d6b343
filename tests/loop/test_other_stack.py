"""A model of another kind than the stack of products, whose results decide the tokens.

Its weights are one number, the step; a forward reads out token + step for each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common import workloads
from mpissd.common.rounds import Ints, Speculation
from mpissd.engine import Decoder, RunConfig
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group
from mpissd.engine.model.forwards import Forwards, Places
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import Find, Stacks
from mpissd.engine.spec.acceptance import count_accepted
from mpissd.engine.workload.oracle import OpenGather, Proposals, TargetOracle
from mpissd.engine.workload.sequence import Batch
from tests.loop.test_third_workload import Counting, V

MACHINE = {"pair": "toy", "backend": "numpy", "workload": "stepping", "vocab": V}


@dataclass
class StepWeights:
    step: int
    max_rows: int


@dataclass
class StepBuffers:
    tokens: Ints
    result: Ints


class StepStack:
    def __init__(self, group: Group, weights: StepWeights, max_rows: int) -> None:
        self.group, self.weights = group, weights
        self.buffers = StepBuffers(np.zeros(max_rows, np.int32), np.zeros(max_rows, np.int32))

    def place(self, places: Places | None) -> None:
        assert places is None, "nobody says where rows stand"

    def release(self, slots: Sequence[int]) -> None:
        raise AssertionError("nobody releases a cache")

    def body(self, rows: int, k: int | None = None) -> Callable[[], None]:
        def forward() -> None:
            tokens = self.buffers.tokens[:rows]
            self.buffers.result[:rows] = (tokens + self.weights.step) % V

        return forward

    def best(self, rows: int) -> Find:
        raise AssertionError("nobody chooses among logits")

    def read(self, rows: int, k: int | None = None) -> tuple[Ints, None]:
        return self.buffers.result[:rows].reshape(1, 1, rows, 1), None

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        raise AssertionError("nobody reads logits")


@dataclass(frozen=True)
class StepStacks:
    step: int

    def weights(self, *_: Any, max_rows: int, seed: int) -> StepWeights:
        return StepWeights(self.step, max_rows)

    def stack(
        self,
        backend: Backend,
        group: Group,
        shard: Shard,
        options: ForwardOptions,
        weights: StepWeights,
        *,
        max_rows: int,
        max_sequences: int,
    ) -> StepStack:
        return StepStack(group, weights, max_rows)


class ReadingTarget(TargetOracle):
    """Takes the target's tokens from the forward's results."""

    def __init__(self, stepper: Forwards) -> None:
        self.stepper = stepper

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        best = self.stepper.results().ids[0, :, 0]
        ends = np.cumsum(speculation.num_draft + 1)
        accepted, bonus = np.zeros((2, len(batch)), np.int32)
        for row, part in enumerate(np.split(best, ends[:-1])):
            drafts, count = speculation.tokens[row : row + 1], speculation.num_draft[row : row + 1]
            true = np.resize(part, (1, drafts.shape[1] + 1))
            accepted[row] = count_accepted(drafts, true, count)[0]
            bonus[row] = part[accepted[row]]
        return accepted, bonus


class Stepping(Counting):
    @property
    def target_stacks(self) -> Stacks:
        return StepStacks(1)

    draft_stacks = target_stacks

    def target_oracle(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> TargetOracle:
        return ReadingTarget(stepper)


@pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])
def test_its_results_are_the_tokens(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workloads, "_KNOWN", dict(workloads._KNOWN))
    workloads.register("stepping", f"{__name__}:Stepping", "vocab")
    with Decoder(RunConfig(mode=mode, batch_size=3, **MACHINE)) as decoder:
        for _ in range(15):
            decoder.step()
    for id_, tokens in decoder.tokens.items():
        assert len(tokens) >= 15
        assert tokens == [(id_ + n) % V for n in range(1, len(tokens) + 1)]
    assert decoder.records.sequences()[:, 3].any() == (mode != "ar")
