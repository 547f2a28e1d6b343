"""The `gemm` workload: real (or modelled) forwards, tokens and outcomes from the laws of gemm_law.

The forwards compute on random numbers and decide nothing; k, t* and the draft tokens come from the
laws, so acceptance and cache hits are imposed and every mode emits the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpissd.model.stepper import Forwards
from mpissd.rounds import Batch, Ints, Request, Source, Speculation, verify_rows
from mpissd.spec.acceptance import count_accepted
from mpissd.wait import Waiter
from mpissd.workload.base import Admissions, DraftWorker, Rollout, TargetWorker
from mpissd.workload.gemm_law import DraftStream, Index, TokenStream


class GemmTargetWorker(TargetWorker):
    """Verifies with GEMMs; accepts by comparing with the stream Y."""

    def __init__(self, stepper: Forwards, stream: TokenStream) -> None:
        self.stepper, self._stream = stepper, stream
        self._ahead: Index = np.arange(stream.lookahead + 1, dtype=np.int64)

    def twin(self, stepper: Forwards) -> GemmTargetWorker:
        """The same laws over other forwards (calibration)."""
        return GemmTargetWorker(stepper, self._stream)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws what these sequences will need first, while none is live."""
        self._stream.prepare(requests)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._stream.begin_round(batch, admissions)

    def launch(self, batch: Batch, speculation: Speculation) -> None:
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.launch(len(tokens), tokens)

    def done(self) -> bool:
        return self.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        return self.stepper.elapsed_s()

    def judge(self, batch: Batch, speculation: Speculation) -> tuple[Ints, Ints]:
        """Row j of the forward scores position n + j, n the committed length."""
        true = self._stream.true(self._ahead)  # [b, K+1]
        accepted = count_accepted(speculation.tokens, true, speculation.num_draft)
        row_starts = np.arange(0, true.size, len(self._ahead))
        return accepted, true.reshape(-1).take(row_starts + accepted)

    def close(self) -> None:
        self.stepper.close()


class GemmDraftWorker(DraftWorker):
    """Drafts with GEMMs; tokens and bonus candidates come from the laws."""

    def __init__(self, stepper: Forwards, stream: DraftStream) -> None:
        self.stepper, self._stream = stepper, stream
        self._behind: Index = stream.k_of.astype(np.int64) + 1

    def twin(self, stepper: Forwards) -> GemmDraftWorker:
        """The same laws over other forwards (calibration)."""
        return GemmDraftWorker(stepper, self._stream)

    def prepare(self, requests: Iterable[Request]) -> None:
        """Draws what these sequences will need first, while none is live."""
        self._stream.prepare(requests)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._stream.begin_round(batch, admissions)

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.launch(len(batch) * (self._stream.lookahead + 1), tokens)

    def done(self) -> bool:
        return self.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        return self.stepper.elapsed_s()

    def branches(self, batch: Batch, speculation: Speculation) -> tuple[Ints, Rollout]:
        """Lane (s, k, t*) grows from position n + k + 1, behind its bonus token."""
        stream = self._stream
        candidates = stream.candidates(speculation.source, speculation.num_draft).reshape(-1)
        tokens = stream.drafts(Source.CACHE, self._behind)
        nobody = np.zeros(0, np.int64)
        return stream.k_of, Rollout(nobody, candidates, tokens.reshape(len(candidates), -1))

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        chosen = np.asarray(rows, np.int64)
        tokens = self._stream.drafts(source, np.zeros((), np.int64), chosen)
        return Rollout(chosen, batch.last_tokens[chosen], tokens)

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        inputs = [rollout.inputs for rollout in rollouts]
        tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        self.stepper.launch(len(tokens), tokens)

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            rollout.steps += 1

    def close(self) -> None:
        self.stepper.close()
