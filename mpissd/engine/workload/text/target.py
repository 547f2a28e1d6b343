"""Target worker of the `text` workload: verifies with the logits of its own forward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Batch, Ints, Request, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec import sampling
from mpissd.engine.workload.base import LogitsGather, Proposals
from mpissd.engine.workload.gemm.workers import GemmTargetWorker
from mpissd.engine.workload.sampled import Logits, SamplingTargetWorker, check_finite
from mpissd.engine.workload.text.sequences import PromptHistories


class TextTargetWorker(SamplingTargetWorker):
    """Accepts the drafted tokens that the target would have chosen, or sampled."""

    _histories: PromptHistories

    def __init__(
        self,
        stepper: Forwards,
        seed: int,
        twin: GemmTargetWorker,
        *,
        samples: bool = False,
        draft_ids: Ints | None = None,
        widths: Sequence[int] = (0,),
        gather: LogitsGather | None = None,
    ) -> None:
        """Makes the worker of one target rank.

        twin: what stands for it where forwards compute nothing. draft_ids: the tokens that the
        draft knows (None: all). widths: columns of the LM head by target rank; gather: needed for
        several, if tokens are sampled.
        """
        self.stepper, self._seed, self._twin = stepper, seed, twin
        self._samples, self._draft_ids = samples, draft_ids
        self._widths, self._gather = widths, gather
        self._histories = PromptHistories()
        self._num_rows = 0
        self._parts: Logits

    def twin(self, stepper: Forwards) -> GemmTargetWorker:  # type: ignore[override]
        """Returns a worker of the `gemm` workload: paused forwards have no logits."""
        return self._twin.twin(stepper)

    def shared(self, slot: int, request: Request) -> int:
        return self._histories.shared(slot, request.prompt)

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        return self._histories.committed(slot, start, stop)

    def upload(self, batch: Batch, speculation: Speculation) -> None:
        self._histories.serve(batch, speculation)
        self._num_rows = speculation.num_rows
        super().upload(batch, speculation)

    def wait(self, waiter: Waiter) -> None:
        super().wait(waiter)
        if self._gather is not None and self._samples:
            local = self.stepper.logits(range(self._num_rows))
            padded = np.full((self._num_rows, max(self._widths)), -np.inf, np.float32)
            padded[:, : local.shape[1]] = local
            self._gather.start(padded)
            waiter.until(self._gather.done, "logits of the target ranks")

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Returns (num_accepted, bonus), both int32 [b]: greedily, or by rejection sampling."""
        if not self._samples:
            return self._greedy(speculation)
        if self._gather is not None:
            self._parts = self._gather.result()
        return super().judge(batch, speculation, proposals)

    def _greedy(self, speculation: Speculation) -> tuple[Ints, Ints]:
        found = self.stepper.results()
        if found.values is not None:
            check_finite(found.values[0, :, 0], "target")
        best = found.ids[0, :, 0].tolist()
        accepted, bonus = np.zeros((2, len(speculation.rows)), np.int32)
        start = 0
        served = zip(speculation.tokens.tolist(), speculation.num_draft.tolist(), strict=True)
        for row, (tokens, count) in enumerate(served):
            k = 0
            while k < count and tokens[k] == best[start + k]:
                k += 1
            accepted[row], bonus[row] = k, best[start + k]
            start += count + 1
        return accepted, bonus

    def _target_row(self, request: Request, start: int, i: int) -> sampling.Floats:
        if self._gather is None:
            logits = self.stepper.logits([start + i])[0]
        else:
            parts = zip(self._parts[:, start + i], self._widths, strict=True)
            logits = np.concatenate([part[:width] for part, width in parts])
        check_finite(logits, "target")
        probs = sampling.probabilities(logits, request.temperature)
        return sampling.nucleus(probs, request.top_p)
