"""Target worker of the `markov` workload: verifies against an exactly known language model.

The forwards, real or modelled, have the shapes and the durations of the pair's target; a markov
model decides which tokens are accepted. Each target rank computes the logits of its share
of the vocabulary from the tokens that *it* has committed, and the lead gathers them. A follower
whose tokens are wrong would therefore change the output.
"""

from __future__ import annotations

import numpy as np

from mpissd.common.rounds import Batch, Ints, Request, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec import sampling
from mpissd.engine.workload.history import Histories
from mpissd.engine.workload.markov.laws import MarkovLaws
from mpissd.engine.workload.markov.model import Logits, trunk
from mpissd.engine.workload.sampled import OwnLogits, SamplingTargetWorker, gathered
from mpissd.engine.workload.workers import LogitsGather, Proposals


class MarkovTargetWorker(SamplingTargetWorker):
    """Verifies by rejection sampling against the target model (greedily at temperature 0)."""

    def __init__(
        self,
        stepper: Forwards,
        laws: MarkovLaws,
        *,
        tp: int = 1,
        rank: int = 0,
        gather: LogitsGather | None = None,
    ) -> None:
        """Makes the worker of target rank `rank` of `tp`; needs `gather` if tp ≥ 2."""
        self.stepper, self._laws, self._seed = stepper, laws, laws.seed
        self._tp, self._rank = tp, rank
        self._gather = gather or OwnLogits()
        self._histories = Histories(lambda request: laws.prompt(request.request_id))
        self._contexts: list[tuple[int, ...]] = []
        self._logits: Logits

    def twin(self, stepper: Forwards) -> MarkovTargetWorker:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""
        return MarkovTargetWorker(
            stepper, self._laws, tp=self._tp, rank=self._rank, gather=self._gather
        )

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        self._histories.serve(batch, speculation)
        self._contexts = [
            context
            for history in self._histories.rows(batch)
            for context in trunk(self._laws.target, history.tokens, history.served)
        ]
        super().upload(batch, speculation)

    def launch(self) -> None:
        super().launch()
        self._gather.start(self._local_logits())

    def _local_logits(self) -> Logits:
        """Returns this rank's share of the logits, float32 [rows, ceil(V/T)].

        Columns beyond the vocabulary are −inf.
        """
        share = -(-self._laws.vocab // self._tp)
        start = min(self._rank * share, self._laws.vocab)
        stop = min(start + share, self._laws.vocab)
        local = np.full((len(self._contexts), share), -np.inf, np.float32)
        for row, context in enumerate(self._contexts):
            local[row, : stop - start] = self._laws.target.logits(context, start, stop)
        return local

    def done(self) -> bool:
        return super().done() and self._gather.done()

    def wait(self, waiter: Waiter) -> None:
        super().wait(waiter)
        waiter.until(self._gather.done, "logits of the target ranks")

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        self._logits = gathered(self._gather)[:, : self._laws.vocab]
        return super().judge(batch, speculation, proposals)

    def _target_row(self, request: Request, start: int, i: int) -> sampling.Floats:
        return sampling.probabilities(self._logits[start + i], self._laws.temperature)
