"""Base class of workers that track where their rows lie in the model's KV cache.

Without a placement (a model of products alone) rows have no place, and nothing is ever filled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Batch, Ints, Request, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.workload.placement import Gap, Placement, chunk, joined
from mpissd.engine.workload.rollout import Rollout

Admissions = Sequence[tuple[int, Request]]


class PlacedWorker(ABC):
    """Base class of workers: follows the sequences' places, and fills the cache."""

    stepper: Forwards
    placement: Placement | None = None

    @abstractmethod
    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Admits new sequences to their slots and prepares the tokens that this round needs.

        Called after an outcome was applied to `batch`. A slot that is used again forgets its
        previous sequence.
        """

    def enter(self, batch: Batch, admissions: Admissions) -> None:
        """Begins a round: places new sequences in the KV cache, rolls the others back."""
        placement = self.placement
        if placement is not None:
            self._vacate(placement, batch.slots)
            for slot, request in admissions:
                shared = self.reusable(slot, request)
                if not shared:
                    self.stepper.release([slot])
                placement.admit(slot, request, shared)
            placement.roll_back(batch)
        self.begin_round(batch, admissions)

    def leave(self) -> None:
        """Ends a pass: gives back the pages of every sequence, where sequences share them."""
        if self.placement is not None:
            self._vacate(self.placement, np.zeros(0, np.int64))

    def _vacate(self, placement: Placement, slots: NDArray[np.int64]) -> None:
        if left := placement.vacate(slots):
            self.stepper.release(left)

    def reusable(self, slot: int, request: Request) -> int:
        """Returns how many tokens of a new prompt need no forward, since the slot's cache holds
        them."""
        held = 0 if self.placement is None else int(self.placement.filled[slot])
        return min(self.shared(slot, request), held)

    def shared(self, slot: int, request: Request) -> int:
        """Returns how many tokens of a new prompt begin the slot's last sequence."""
        return 0

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        """Returns tokens start … stop − 1 of a slot's sequence, int32 [stop − start].

        If forwards decide nothing, any tokens may be returned.
        """
        return np.zeros(stop - start, np.int32)

    def fill(self, batch: Batch, rows: Sequence[int], waiter: Waiter, spare: int = 0) -> bool:
        """Stores the committed tokens that the cache of batch rows `rows` lacks, prompts first.

        Rows that lack at most `spare` tokens are left out. Returns whether there was anything to
        store; collective over the target ranks, which all see the same batch.
        """
        if self.placement is None or not len(rows):
            return False
        gaps = self.placement.gaps(batch, np.asarray(rows, np.int64), spare)
        if not gaps:
            return False
        tokens = np.concatenate([self.committed(*gap) for gap in gaps])
        places = self.placement.fill(gaps)
        most = self.stepper.most_rows
        for start in range(0, len(tokens), most):
            part = slice(start, start + most)
            self.stepper.upload(len(tokens[part]), tokens[part], chunk(places, part))
            self.stepper.launch()
            self.stepper.wait(waiter)
        return True

    def _upload_trunk(
        self, rows: int, tokens: Ints, batch: Batch, speculation: Speculation
    ) -> None:
        """Hands the last token of each sequence and its served tokens to the device."""
        if self.placement is None:
            self.stepper.upload(rows, tokens)
        else:
            places = self.placement.trunk(batch, speculation.num_draft)
            self.stepper.upload(rows, tokens, places)

    def _upload_lanes(
        self, placement: Placement, rollouts: Sequence[Rollout], inputs: Sequence[Ints]
    ) -> int:
        """Hands the lanes' tokens to the device, behind committed tokens that the cache lacks.

        Returns the row of the first lane; lanes follow one another.
        """
        tokens, parts = [*inputs], []
        gaps: list[Gap] = []
        for rollout in rollouts:
            assert rollout.places is not None, "a lane without a place"
            gaps += placement.missing(rollout.places, rollout.steps)
            parts.append(placement.step(rollout.places, rollout.steps))
        if gaps:
            tokens = [*(self.committed(*gap) for gap in gaps), *tokens]
            parts = [placement.places_of(gaps), *parts]
        every = np.concatenate(tokens)
        self.stepper.upload(len(every), every, joined(parts))
        return sum(gap.stop - gap.start for gap in gaps)
