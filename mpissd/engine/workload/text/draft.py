"""Draft oracle of the `text` workload: drafts and predicts with the draft model's own logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.model.forwards import Drafting, Forwards
from mpissd.engine.model.forwards import Draws as DeviceDraws
from mpissd.engine.spec import sampling
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.lookup import LONGEST
from mpissd.engine.workload.oracle import (
    Draws,
    Lane,
    Proposal,
    Rollout,
    SampledDraft,
    SampledRollout,
    check_finite,
)
from mpissd.engine.workload.sequence import Batch


class LogitsDraft(SampledDraft):
    """Drafts the likeliest tokens, or samples them; its best candidates after each row of the trunk
    are the predicted bonus tokens."""

    reads_forwards = True

    def __init__(
        self,
        stepper: Forwards,
        seed: int,
        lookahead: int,
        fan_outs: FanOuts,
        *,
        samples: bool = False,
        saguaro_c: float = 1.0,
        ids: Ints | None = None,
        lookup: str = "prompt",
        heads: int | None = None,
    ) -> None:
        """Makes an oracle.

        lookup: kind of lookup of a fast backup. ids: the tokens that the draft's logits are of,
        rising (None: all). heads: the tokens that one forward drafts, of a draft on the target's
        hidden states; None: of a draft model.
        """
        super().__init__(seed, lookahead, fan_outs)
        self._stepper, self._saguaro_c, self._ids = stepper, saguaro_c, ids
        self.samples, self.copies = samples, (lookup, LONGEST, None)
        self.chains = not samples and heads is None
        self._heads = heads or 1
        self._is_replaced = False

    def _likeliest(self, batch: Batch, count: int) -> Iterator[list[int]]:
        return iter(self._stepper.results().ids[0].tolist())

    def forget(self) -> None:
        self._is_replaced = self.is_sound = True

    def collect(self, rollouts: Sequence[Rollout], first_row: int) -> None:
        results = self._stepper.results()
        rows = slice(first_row, first_row + sum(map(len, rollouts)))
        for head in range(self._heads):
            best = results.ids[head, rows, 0]
            if self._is_replaced and results.values is not None:
                self.is_sound = bool(np.isfinite(results.values[head, rows, 0]).all())
            drawn = self._drawn(rollouts, best, head * results.ids.shape[1] + first_row)
            start = 0
            for rollout in rollouts:
                part = slice(start, start + len(rollout))
                if drawn is not None and isinstance(rollout, SampledRollout):
                    for n, proposal in enumerate(drawn[part]):
                        rollout.record(n, proposal)
                else:
                    rollout.tokens[:, rollout.steps] = best[part]
                    for row in rollout.recorded if isinstance(rollout, SampledRollout) else ():
                        row.append(None)  # a certain token has no distribution
                rollout.steps += 1
                start = part.stop

    def _drawn(self, rollouts: Sequence[Rollout], best: Ints, first: int) -> list[Proposal] | None:
        """Returns the next token of every lane, or None if the likeliest are taken.

        best: the likeliest tokens, by lane. first: the first lane's row of logits.
        """
        if not self.samples:
            return None
        lanes = [
            (lane, rollout.steps)
            for rollout in rollouts
            if isinstance(rollout, SampledRollout)
            for lane in rollout.lanes
        ]
        if not any(lane.temperature > 0 for lane, _ in lanes):
            return None
        tokens: list[Proposal] = [(token, 1.0, None) for token in best.tolist()]
        chosen = [n for n, (lane, _) in enumerate(lanes) if lane.temperature > 0]
        shared = Draws()
        u = [lanes[n][0].u(lanes[n][1], shared) for n in chosen]
        tops = [self._damped(*lanes[n]) for n in chosen]
        draws: DeviceDraws | None = getattr(self._stepper, "draws", None)
        if draws is not None and max(tops) <= draws.most_damped:
            asked = [
                Drafting(first + n, lanes[n][0].temperature, draw, top)
                for n, draw, top in zip(chosen, u, tops, strict=True)
            ]
            proposed = draws.propose(asked, self._saguaro_c)
            for n, one in zip(chosen, proposed, strict=True):
                tokens[n] = self._named(one.token), one.q, one.kept
            return tokens
        logits = self._stepper.logits(range(first, first + len(lanes)))
        for n, draw in zip(chosen, u, strict=True):
            lanes[n][0].logits = logits[n]
            tokens[n] = self._propose(*lanes[n], draw)
        return tokens

    def _propose(self, lane: Lane, place: int, u: float) -> Proposal:
        assert lane.logits is not None, "a step without logits"
        check_finite(lane.logits, "draft")
        top = self._damped(lane, place)
        probs = sampling.probabilities(lane.logits, lane.temperature, top, self._saguaro_c)
        entry, q, row = sampling.propose(probs, u)
        return self._named(entry), q, row

    def _damped(self, lane: Lane, place: int) -> int:
        """Returns how many of the largest logits Saguaro's sampling damps."""
        return lane.fan_out[place] if lane.fan_out and self._saguaro_c < 1 else 0

    def _named(self, entry: int) -> int:
        """Returns the token of an entry of the draft's rows."""
        return entry if self._ids is None else int(self._ids[entry])
