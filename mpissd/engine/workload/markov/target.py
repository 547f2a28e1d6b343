"""Target worker of the `markov` workload: verifies against an exactly known language model.

The forwards, real or modelled, have the shapes and the durations of the pair's target; a markov
model decides which tokens are accepted. Each target rank computes the logits of its share
of the vocabulary from the tokens that *it* has committed, and the lead gathers them. A follower
whose tokens are wrong would therefore change the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Batch, Ints, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec import sampling
from mpissd.engine.workload.base import Admissions, LogitsGather, Proposals, TargetWorker
from mpissd.engine.workload.markov.history import Histories, History, trunk
from mpissd.engine.workload.markov.laws import MarkovLaws
from mpissd.engine.workload.markov.model import Logits


class OwnLogits:
    """Gather of logits for a single target rank: returns its own."""

    def start(self, local: Logits) -> None:
        self._local = local

    def done(self) -> bool:
        return True

    def result(self) -> Logits:
        return self._local[None]


class MarkovTargetWorker(TargetWorker):
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
        self.stepper, self._laws = stepper, laws
        self._tp, self._rank = tp, rank
        self._gather = gather or OwnLogits()
        self._histories = Histories(lambda request: laws.prompt(request.request_id))
        self._contexts: list[tuple[int, ...]] = []

    def twin(self, stepper: Forwards) -> MarkovTargetWorker:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""
        return MarkovTargetWorker(
            stepper, self._laws, tp=self._tp, rank=self._rank, gather=self._gather
        )

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._histories.begin_round(batch, admissions)

    def upload(self, batch: Batch, speculation: Speculation) -> None:
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
        """Applies rejection sampling (spec.sampling.judge) to each sequence.

        Returns (num_accepted, bonus), both int32 [b]. Draws are keyed by (sequence, round).
        """
        laws, parts = self._laws, self._gather.result()
        logits = parts.transpose(1, 0, 2).reshape(parts.shape[1], -1)[:, : laws.vocab]
        accepted, bonus = np.zeros((2, len(batch)), np.int32)
        start = 0
        for row, history in enumerate(self._histories.rows(batch)):
            count = len(history.served)
            q = speculation.q[row, :count].tolist() if speculation.sampled else [1.0] * count
            coins = self._draws(Purpose.ACCEPT, history, count)
            u = self._draws(Purpose.BONUS, history, 1)
            accepted[row], bonus[row] = sampling.judge(
                _TargetRows(logits, start, laws.temperature),
                history.served,
                q,
                _DraftRows(proposals, row, q),
                coins,
                u[0],
            )
            start += count + 1
        return accepted, bonus

    def _draws(self, purpose: Purpose, history: History, count: int) -> list[float]:
        sequence, first = history.request.request_id, history.first_draw()
        drawn: list[float] = uniforms(self._laws.seed, purpose, sequence, first, count).tolist()
        return drawn


class _TargetRows:
    """The target's distributions of one sequence by row, computed when they are needed."""

    def __init__(self, logits: Logits, start: int, temperature: float) -> None:
        self._logits, self._start, self._temperature = logits, start, temperature

    def __call__(self, i: int) -> sampling.Floats:
        return sampling.probabilities(self._logits[self._start + i], self._temperature)


class _DraftRows:
    """The draft's distributions of one sequence by token; a token with q = 1 has none."""

    def __init__(self, proposals: Proposals, row: int, q: Sequence[float]) -> None:
        self._proposals, self._row, self._q = proposals, row, q

    def __call__(self, i: int) -> sampling.Row:
        before = sum(q < 1 for q in self._q[:i])
        return self._proposals(self._row, before)
