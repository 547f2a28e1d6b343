"""Draft worker of the `markov` workload: drafts and predicts with an exactly known model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Batch, Source, Speculation
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec import sampling
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.history import Histories
from mpissd.engine.workload.markov.laws import MarkovLaws
from mpissd.engine.workload.markov.model import trunk
from mpissd.engine.workload.rollout import Branches, Lanes, Rollout
from mpissd.engine.workload.sampled import Lane, SampledRollout, SamplingDraftWorker


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
