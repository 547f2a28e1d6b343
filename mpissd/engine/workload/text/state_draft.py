"""Workers of text drafts that read the target's hidden states, on the lead's own device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Batch, Speculation
from mpissd.engine.workload.placement import Gap
from mpissd.engine.workload.rollout import Rollout
from mpissd.engine.workload.steps import Steps
from mpissd.engine.workload.text.draft import TextDraftWorker


class StateDraftWorker(TextDraftWorker):
    """Drafts behind the state that the target's last verification has left there.

    Keys and values of accepted tokens, which were drafted behind states of the draft's own, are
    computed again with the target's states, beside the next round's first token.
    """

    chains = False

    def __init__(self, *args: object, heads: int = 1, **flags: object) -> None:
        """Makes a worker; heads: tokens that one forward drafts. See TextDraftWorker."""
        super().__init__(*args, **flags)  # type: ignore[arg-type]
        self.chains, self._heads = False, heads

    def served(self, batch: Batch, speculation: Speculation) -> None:
        super().served(batch, speculation)
        if self.placement is not None:
            filled, slots = self.placement.filled, batch.slots
            filled[slots] = np.minimum(filled[slots], self.placement.last(batch) + 1)

    def _gaps(self, batch: Batch, rows: Sequence[int], spare: int) -> list[Gap]:
        """Returns what prompts lack; as many tokens as a round accepts are left to its first
        step."""
        return super()._gaps(batch, rows, max(spare, self.lookahead))

    def store_opened(self, batch: Batch, rows: int) -> Steps[int]:
        """Stores nothing: the target computes the states of these tokens in this very round."""
        yield from ()
        return 0

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        for head in range(self._heads):
            self._collect_by(head, rollouts)
