"""The `gemm` workload: real (or modelled) forwards, tokens and outcomes from the laws of gemm_law.

The forwards compute on random numbers and decide nothing; k, t* and the draft tokens come from the
laws, so acceptance and cache hits are imposed and every mode emits the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mpissd.model.stepper import Stepper
from mpissd.rounds import Batch, Ints, Source, Speculation, verify_rows
from mpissd.spec.acceptance import AcceptanceLaw, HitLaw, count_accepted
from mpissd.wait import Waiter
from mpissd.workload.base import Admissions, DraftWorker, Rollout, TargetWorker
from mpissd.workload.gemm_law import TokenStream


class GemmTargetWorker(TargetWorker):
    """Verifies with GEMMs; accepts by comparing with the stream Y."""

    def __init__(self, stepper: Stepper, stream: TokenStream, lookahead: int) -> None:
        self._stepper, self._stream = stepper, stream
        self._ahead = np.arange(lookahead + 1, dtype=np.int64)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._stream.begin_round(batch, admissions)

    def launch(self, batch: Batch, speculation: Speculation) -> None:
        tokens = verify_rows(batch.last_tokens, speculation)
        self._stepper.launch(len(tokens), tokens)

    def done(self) -> bool:
        return self._stepper.done()

    def wait(self, waiter: Waiter) -> None:
        self._stepper.wait(waiter)

    def elapsed_s(self) -> float:
        return self._stepper.elapsed_s()

    def judge(self, batch: Batch, speculation: Speculation) -> tuple[Ints, Ints]:
        """Row j of the forward scores position n + j, n the committed length."""
        positions = batch.lengths[:, None] + self._ahead
        true = self._stream.true(self._stream.index(batch.slots, positions))
        accepted = count_accepted(speculation.tokens, true[:, :-1], speculation.num_draft)
        bonus: Ints = true[np.arange(len(true)), accepted]
        return accepted, bonus

    def close(self) -> None:
        self._stepper.close()


class GemmDraftWorker(DraftWorker):
    """Drafts with GEMMs; tokens and bonus candidates come from the laws."""

    def __init__(
        self,
        stepper: Stepper,
        stream: TokenStream,
        lookahead: int,
        acceptance: Mapping[Source, AcceptanceLaw],
        hit_law: HitLaw,
    ) -> None:
        self._stepper, self._stream, self._hit_law = stepper, stream, hit_law
        self._rates = {
            source: np.asarray(law.hazards, np.float64) for source, law in acceptance.items()
        }
        self._lookahead = lookahead
        self._ahead = np.arange(lookahead + 1, dtype=np.int64)
        # positions of the K tokens behind each row j's bonus, relative to the committed length
        self._behind = self._ahead[:, None] + 1 + self._ahead[None, :lookahead]  # [K+1, K]

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._stream.begin_round(batch, admissions)

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        tokens = verify_rows(batch.last_tokens, speculation)
        self._stepper.launch(len(batch) * (self._lookahead + 1), tokens)

    def done(self) -> bool:
        return self._stepper.done()

    def wait(self, waiter: Waiter) -> None:
        self._stepper.wait(waiter)

    def elapsed_s(self) -> float:
        return self._stepper.elapsed_s()

    def branches(
        self, batch: Batch, speculation: Speculation, fan_out: Sequence[int]
    ) -> tuple[Ints, Rollout]:
        counts = np.asarray(fan_out)
        k_of = np.repeat(np.arange(len(counts), dtype=np.int32), counts)  # [B]
        ids = self._candidates(batch, speculation, counts, k_of)
        behind = batch.lengths[:, None, None] + self._behind
        index = self._stream.index(batch.slots, behind)
        tokens = self._stream.drafts(index, self._rates[Source.CACHE])  # [b, K+1, K]
        lanes = tokens[:, k_of].reshape(-1, self._lookahead)
        rows = np.repeat(np.arange(len(batch)), len(k_of))
        return k_of, Rollout(rows, ids.reshape(-1), lanes)

    def _candidates(
        self, batch: Batch, speculation: Speculation, counts: NDArray[np.int64], k_of: Ints
    ) -> Ints:
        """Bonus candidates [b, B]: distinct a row, never the proposed token of a served column.

        Row j's decoys count upwards from Y_j + 1, past the proposed token; where row j is the true
        outcome, Y_j takes the place that its rank has, if it is within the fan-out.
        """
        vocab, stream = self._stream.vocab, self._stream
        index = stream.index(batch.slots, batch.lengths[:, None] + self._ahead)
        true = stream.true(index)  # [b, K+1]
        accepted = count_accepted(speculation.tokens, true[:, :-1], speculation.num_draft)
        gap = np.full(true.shape, vocab, np.int32)  # of the proposed token behind Y_j + 1
        served = self._ahead[:-1] < speculation.num_draft[:, None]
        distance = (speculation.tokens - true[:, :-1] - 1) % vocab
        np.copyto(gap[:, :-1], distance, where=served)
        starts = np.cumsum(counts) - counts
        step = np.arange(len(k_of), dtype=np.int32) - starts[k_of]  # place within its row
        shift = step + (step >= gap[:, k_of])
        ids: Ints = ((true[:, k_of] + 1 + shift) % vocab).astype(np.int32)
        each = np.arange(len(true))
        rank = self._hit_law.ranks(stream.rank(index[each, accepted]))
        hit = rank <= counts[accepted]
        if hit.any():
            lane = (starts[accepted] + rank - 1)[hit]
            ids[each[hit], lane] = true[each[hit], accepted[hit]]
        return ids

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        chosen = np.asarray(rows, np.int64)
        positions = batch.lengths[chosen][:, None] + self._ahead[:-1]
        index = self._stream.index(batch.slots[chosen], positions)
        tokens = self._stream.drafts(index, self._rates[source])
        return Rollout(chosen, batch.last_tokens[chosen], tokens)

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        inputs = [rollout.inputs for rollout in rollouts]
        tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        self._stepper.launch(len(tokens), tokens)

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            rollout.steps += 1

    def close(self) -> None:
        self._stepper.close()
