"""Workers of the `markov` workload: exactly known models draft, predict and verify."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec import sampling
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.history import Histories
from mpissd.engine.workload.markov.model import Logits, MarkovLaws, trunk
from mpissd.engine.workload.rollout import Branches, Lanes, Rollout
from mpissd.engine.workload.sampled import (
    Lane,
    OwnLogits,
    SampledRollout,
    SamplingDraftWorker,
    SamplingTargetWorker,
    gathered,
)
from mpissd.engine.workload.workers import LogitsGather, Proposals


class MarkovDraftWorker(SamplingDraftWorker):
    """Samples drafted tokens from the draft model, and predicts bonus tokens with it."""

    def __init__(
        self, stepper: Forwards, laws: MarkovLaws, lookahead: int, fan_outs: FanOuts
    ) -> None:
        """Makes a worker; Saguaro sampling uses `fan_outs` until `branches` is given others."""
        self.stepper, self._laws, self.lookahead = stepper, laws, lookahead
        self._seed, self._fan_outs = laws.seed, fan_outs
        self._histories = Histories(lambda request: laws.prompt(request.request_id))
        self._copies = "prompt", laws.draft.order + 1, laws.draft.likeliest

    def twin(self, stepper: Forwards) -> MarkovDraftWorker:
        """Returns a worker with the same laws that runs its forwards on `stepper`."""
        return MarkovDraftWorker(stepper, self._laws, self.lookahead, self._fan_outs)

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane for each of the draft's likeliest tokens behind each row of the trunk."""
        self._fan_outs = fan_outs
        model = self._laws.draft
        found: list[tuple[int, int, int, int]] = []  # row, k, place, token
        lanes: list[Lane] = []
        sources = speculation.source.tolist()
        for row, history in enumerate(self._histories.rows(batch)):
            fan_out = fan_outs.behind(sources[row])
            for k, context in enumerate(trunk(model, history.tokens, history.served)):
                served = history.served[k] if k < len(history.served) else None
                ids = sampling.largest(model.logits(context), fan_out[k], served).tolist()
                for place, token in enumerate(ids):
                    found.append((row, k, place, token))
                    behind = model.context((*context, token))
                    sequence, draws = history.request.request_id, history.first_draw(1)
                    lanes.append(Lane(sequence, draws, behind, fan_outs.after_hit))
        table = np.array(found, np.int64).reshape(-1, 4)
        first = table[:, 3].astype(np.int32)
        rollout = SampledRollout(np.zeros(0, np.int64), first, lanes, self.lookahead)
        k_of, place_of = table[:, 1].astype(np.int32), table[:, 2].astype(np.int32)
        return Branches(Lanes(table[:, 0], k_of, place_of), rollout)

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        FAST lanes get all K tokens at once, with q = 1: by prompt lookup in the sequence, and the
        model's likeliest token for the rest. JIT lanes are grown step by step.
        """
        histories = self._histories.rows(batch)
        lanes = [
            Lane(
                histories[row].request.request_id,
                histories[row].first_draw(),
                self._laws.draft.context(histories[row].tokens),
                self._fan_outs.after_miss,
            )
            for row in rows
        ]
        chosen = np.asarray(rows, np.int64)
        rollout = SampledRollout(chosen, batch.last_tokens[chosen], lanes, self.lookahead)
        if source == Source.FAST:
            for lane, row in enumerate(rows):
                rollout.tokens[lane] = histories[row].copied(self.lookahead, *self._copies)
        return rollout

    def _propose(self, lane: Lane, place: int, u: float) -> tuple[int, float, sampling.Row]:
        """Draws the lane's next token with u: returns (token, its probability, the whole row)."""
        laws = self._laws
        top = lane.fan_out[place] if lane.fan_out else 0
        logits = laws.draft.logits(lane.context)
        probs = sampling.probabilities(logits, laws.temperature, top, laws.saguaro_c)
        token, q, row = sampling.propose(probs, u)
        lane.context = laws.draft.context((*lane.context, token))
        return token, q, row


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
