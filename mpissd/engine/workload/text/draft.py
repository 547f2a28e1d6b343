"""Draft worker of the `text` workload: drafts and predicts with the draft model's own logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation
from mpissd.engine.model.forwards import Drafting, Forwards, Proposed
from mpissd.engine.model.forwards import Draws as DeviceDraws
from mpissd.engine.spec import sampling
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.history import PromptHistories
from mpissd.engine.workload.placement import Gap, Index
from mpissd.engine.workload.rollout import Branches, Lanes, Rollout
from mpissd.engine.workload.sampled import (
    Draws,
    Lane,
    Logits,
    Proposal,
    SampledRollout,
    SamplingDraftWorker,
    check_finite,
)
from mpissd.engine.workload.steps import Steps

_NOBODY = np.zeros(0, np.int64)


@dataclass(frozen=True)
class _Step:
    """Results of a step's rows: likeliest tokens [rows], logits [rows, V] if tokens are sampled,
    and the tokens drawn so far."""

    best: Ints
    logits: Logits | None = None
    proposed: Sequence[Proposed | None] = ()  # by row, if the device has already drawn
    drawn: Draws = field(default_factory=dict)


class TextDraftWorker(SamplingDraftWorker):
    """Drafts the likeliest tokens, or samples them; its best candidates after each row of the trunk
    are the predicted bonus tokens."""

    reads_forwards = True
    _histories: PromptHistories

    def __init__(
        self,
        stepper: Forwards,
        seed: int,
        fan_outs: FanOuts,
        lookahead: int,
        *,
        samples: bool = False,
        saguaro_c: float = 1.0,
        ids: Ints | None = None,
        lookup: str = "prompt",
    ) -> None:
        """Makes a worker.

        lookup: kind of lookup of a fast backup. ids: the tokens that the draft's logits are of,
        rising (None: all). Saguaro sampling uses `fan_outs` until `branches` is given others.
        """
        self.stepper, self._seed, self._fan_outs = stepper, seed, fan_outs
        self.lookahead = lookahead
        self.chains = not samples
        self._samples, self._saguaro_c, self._ids = samples, saguaro_c, ids
        self._lookup = lookup
        self._histories = PromptHistories()
        self._is_replaced, self._is_sound = False, True

    def shared(self, slot: int, request: Request) -> int:
        return self._histories.shared(slot, request.prompt)

    def known(self, slot: int) -> Sequence[int]:
        return self._histories.known(slot)

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        return self._histories.committed(slot, start, stop)

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane for each of the draft's best tokens after each row of the trunk."""
        self._fan_outs = fan_outs
        best = self.stepper.results().ids[0].tolist()
        rows: list[tuple[int, int, int, int]] = []  # batch row, k, place, token
        start = 0
        for row, (source, _, count, *tokens) in enumerate(speculation.rows.tolist()):
            fan_out = fan_outs.behind(source)
            for k in range(count + 1):
                served = tokens[k] if k < count else None
                candidates = [token for token in best[start + k] if token != served]
                rows += [(row, k, n, token) for n, token in enumerate(candidates[: fan_out[k]])]
            start += count + 1
        table = np.array(rows, np.int64).reshape(-1, 4)
        lanes = Lanes(table[:, 0], table[:, 1].astype(np.int32), table[:, 2].astype(np.int32))
        return Branches(lanes, self._rollout(batch, _NOBODY, table[:, 3], table[:, 0], later=1))

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        FAST lanes get all K tokens at once, copied from the sequence; its last token fills the
        places that the lookup leaves open.
        """
        chosen = np.asarray(rows, np.int64)
        rollout = self._rollout(batch, chosen, batch.last_tokens[chosen], chosen)
        if source == Source.FAST:
            histories = self._histories.rows(batch)
            for lane, row in enumerate(rows):
                rollout.tokens[lane] = histories[row].copied(self.lookahead, self._lookup)
        return rollout

    def _rollout(
        self,
        batch: Batch,
        chosen: Index,
        first: Index | Ints,
        rows: Index,
        later: int = 0,
    ) -> Rollout:
        """Returns lanes after the tokens `first` of batch rows `rows`, not grown yet.

        chosen: the batch rows that the lanes answer. later: rounds until their tokens are verified.
        """
        first = first.astype(np.int32)
        if not self._samples:
            return Rollout(chosen, first, np.zeros((len(first), self.lookahead), np.int32))
        histories = self._histories.rows(batch)
        fan_out = self._fan_outs.after_hit if later else self._fan_outs.after_miss
        lanes = []
        for row in rows.tolist():
            history = histories[row]
            request, draw = history.request, history.first_draw(later)
            seed, sequence = history.draws(self._seed)
            told = {"temperature": request.temperature, "seed": seed}
            lanes.append(Lane(sequence, draw, (), fan_out, **told))
        return SampledRollout(chosen, first, lanes, self.lookahead)

    def forget(self) -> None:
        super().forget()
        self._is_replaced = self._is_sound = True

    def is_sound(self) -> bool:
        return self._is_sound

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        self._collect_by(0, rollouts)

    def _collect_by(self, head: int, rollouts: Sequence[Rollout]) -> None:
        """Stores the tokens of a step, by this one of the forward's heads."""
        step = self._step_of(rollouts, head)
        row = 0
        for rollout in rollouts:
            self._collect(rollout, step, row)
            row += len(rollout)

    def _step_of(self, rollouts: Sequence[Rollout], head: int) -> _Step:
        """Reads the finished forward's results of these rollouts' rows."""
        count = sum(map(len, rollouts))
        start, lanes = self.first_row, (getattr(rollout, "lanes", ()) for rollout in rollouts)
        results = self.stepper.results()
        ids = results.ids[head, :, 0]
        if self._is_replaced and results.values is not None:
            values = results.values[head, start : start + count, 0]
            self._is_sound = bool(np.isfinite(values).all())
        best, first = ids[start : start + count], head * len(ids) + start
        if not any(lane.temperature > 0 for each in lanes for lane in each):
            return _Step(best)
        draws: DeviceDraws | None = getattr(self.stepper, "draws", None)
        if draws is not None and (asked := self._asked(rollouts, first, draws.most_damped)):
            told = {
                one.row: kept
                for one, kept in zip(asked, draws.propose(asked, self._saguaro_c), strict=True)
            }
            return _Step(best, proposed=[told.get(first + row) for row in range(count)])
        return _Step(best, self.stepper.logits(range(first, first + count)))

    def _asked(self, rollouts: Sequence[Rollout], first: int, most: int) -> list[Drafting]:
        """Returns the draws for the device; empty if it cannot do all of them."""
        asked, drawn = list[Drafting](), Draws()
        for rollout in rollouts:
            if not isinstance(rollout, SampledRollout):
                return []
            for n, lane in enumerate(rollout.lanes):
                top = self._damped(lane, rollout.steps)
                if lane.temperature > 0 and top > most:
                    return []
                if lane.temperature > 0:
                    u = self._u(lane, rollout.steps, drawn)
                    asked.append(Drafting(first + n, lane.temperature, u, top))
            first += len(rollout)
        return asked

    def _damped(self, lane: Lane, place: int) -> int:
        """Returns how many of the largest logits Saguaro's sampling damps."""
        return lane.fan_out[place] if lane.fan_out and self._saguaro_c < 1 else 0

    def _collect(self, rollout: Rollout, step: _Step, start: int) -> None:
        """Stores the next token of every lane, whose rows begin at `start`."""
        if step.logits is None and not step.proposed:
            rollout.tokens[:, rollout.steps] = step.best[start : start + len(rollout)]
            if isinstance(rollout, SampledRollout):
                for row in rollout.recorded:
                    row.append(None)  # a certain token has no distribution
        else:
            for n in range(len(rollout)):
                self._token(rollout, n, step, start + n)
        rollout.steps += 1

    def _token(self, rollout: Rollout, n: int, step: _Step, row: int) -> None:
        """Stores lane n's next token, which row `row` of the finished forward decides."""
        place = rollout.steps
        if isinstance(rollout, SampledRollout):
            if step.proposed and (drawn := step.proposed[row]) is not None:
                self._record(rollout, n, place, (self._named(drawn.token), drawn.q, drawn.kept))
                return
            if step.logits is not None and rollout.lanes[n].temperature > 0:
                rollout.lanes[n].logits = step.logits[row]
                self._draw(rollout, n, place, step.drawn)
                return
            rollout.recorded[n].append(None)
        rollout.tokens[n, place] = step.best[row]

    def _propose(self, lane: Lane, place: int, u: float) -> Proposal:
        """Draws the lane's next token with u: returns (token, its probability, the whole row)."""
        assert lane.logits is not None, "a step without logits"
        check_finite(lane.logits, "draft")
        top = self._damped(lane, place)
        probs = sampling.probabilities(lane.logits, lane.temperature, top, self._saguaro_c)
        entry, q, row = sampling.propose(probs, u)
        return self._named(entry), q, row

    def _named(self, entry: int) -> int:
        """Returns the token of an entry of the draft's rows."""
        return entry if self._ids is None else int(self._ids[entry])


class StateDraftWorker(TextDraftWorker):
    """Drafts from the hidden state that the target's last verification left.

    Keys and values of accepted tokens were computed from the draft's own states. They are computed
    again from the target's states, together with the next round's first token.
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
        """Returns the gaps of prompts; as many tokens as a round accepts are left to its first
        step."""
        return super()._gaps(batch, rows, max(spare, self.lookahead))

    def store_opened(self, batch: Batch, rows: int) -> Steps[int]:
        """Stores nothing: the target computes the states of these tokens in this very round."""
        yield from ()
        return 0

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        for head in range(self._heads):
            self._collect_by(head, rollouts)
