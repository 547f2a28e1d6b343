"""Rollouts whose tokens are sampled from a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.spec import sampling
from mpissd.engine.workload.base import Rollout


@dataclass
class Lane:
    """The state from which a lane draws its next token.

    first_draw: the index of the first random draw of the round that will verify its tokens.
    """

    sequence: int
    first_draw: int
    context: tuple[int, ...]
    fan_out: tuple[int, ...]  # of the verifying round; Saguaro sampling damps the tokens it keeps


class SampledRollout(Rollout):
    """A rollout that records, with each sampled token, its probability and distribution."""

    def __init__(self, rows: NDArray[np.int64], first: Ints, lanes: list[Lane], K: int) -> None:
        super().__init__(rows, first, np.zeros((len(first), K), np.int32))
        self.q = np.ones((len(first), K))
        self.lanes = lanes
        self.recorded: list[list[sampling.Row | None]] = [[] for _ in lanes]

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        super().keep(lanes, rows)
        assert self.q is not None
        self.q = self.q.take(np.array(lanes, np.int64), axis=0)
        self.lanes = [self.lanes[n] for n in lanes]
        self.recorded = [self.recorded[n] for n in lanes]

    def proposals(self, lane: int) -> list[NDArray[np.float32]]:
        return [row for row in self.recorded[lane] if row is not None]
