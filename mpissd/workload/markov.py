"""The `markov` workload: language models whose distributions are known, sampled and verified.

The forwards are those of the pair's shapes, real or modelled, and last as long as they do; what is
drafted, accepted and predicted comes from two markov models. Each target rank computes the logits
of its share of the vocabulary, behind the sequences as *it* has committed them, and the lead
gathers them: a follower that lost its place changes the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mpissd.model.stepper import Forwards
from mpissd.rng import Purpose, uniforms
from mpissd.rounds import Batch, Ints, Source, Speculation, verify_rows
from mpissd.spec import sampling
from mpissd.spec.fanout import FanOuts
from mpissd.wait import Waiter
from mpissd.workload.base import (
    Admissions,
    Branches,
    DraftWorker,
    Lanes,
    Proposals,
    Rollout,
    TargetWorker,
)
from mpissd.workload.history import Histories, History, looked_up
from mpissd.workload.markov_laws import MarkovLaws
from mpissd.workload.markov_model import Logits, MarkovModel
from mpissd.workload.sampled import Lane, SampledRollout

_ROUND = 512  # draws that a round may use of a stream: a lookahead is at most 256
_EPOCH = 1 << 32  # rounds that an epoch may have


class LogitsGather(Protocol):
    """T ranks' shares of the logits → the lead."""

    def start(self, local: Logits) -> None:
        """Starts to gather `local` [rows, V/T] (collective)."""

    def done(self) -> bool:
        """Whether the gather is over (never blocks)."""

    def result(self) -> Logits:
        """[T, rows, V/T], on the lead."""


class OwnLogits:
    """The gather of a group of one."""

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
        """gather: needed from T = 2 on."""
        self.stepper, self._laws = stepper, laws
        self._tp, self._rank = tp, rank
        self._gather = gather or OwnLogits()
        self._histories = Histories(lambda request: laws.prompt(request.request_id))
        self._contexts: list[tuple[int, ...]] = []

    def twin(self, stepper: Forwards) -> MarkovTargetWorker:
        """The same laws over other forwards (calibration)."""
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
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.upload(len(tokens), tokens)

    def launch(self) -> None:
        self.stepper.launch()
        self._gather.start(self._local_logits())

    def _local_logits(self) -> Logits:
        """[rows, ceil(V/T)] of this rank's share; what lies beyond V is −inf."""
        share = -(-self._laws.vocab // self._tp)
        start = min(self._rank * share, self._laws.vocab)
        stop = min(start + share, self._laws.vocab)
        local = np.full((len(self._contexts), share), -np.inf, np.float32)
        for row, context in enumerate(self._contexts):
            local[row, : stop - start] = self._laws.target.logits(context, start, stop)
        return local

    def done(self) -> bool:
        return self.stepper.done() and self._gather.done()

    def wait(self, waiter: Waiter) -> None:
        self.stepper.wait(waiter)
        waiter.until(self._gather.done, "logits of the target ranks")

    def elapsed_s(self) -> float:
        return self.stepper.elapsed_s()

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """spec.sampling.judge, sequence by sequence; draws are keyed by (sequence, round)."""
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
        sequence, first = history.request.request_id, _first_draw(history)
        drawn: list[float] = uniforms(self._laws.seed, purpose, sequence, first, count).tolist()
        return drawn

    def close(self) -> None:
        self.stepper.close()


def _first_draw(history: History, later: int = 0) -> int:
    """Where the draws of a sequence's round, or one `later`, begin in its streams: no two rounds
    of a sequence, nor of its epochs, share a draw."""
    return (history.request.epoch * _EPOCH + history.age + later) * _ROUND


def trunk(
    model: MarkovModel, tokens: Sequence[int], served: Sequence[int]
) -> list[tuple[int, ...]]:
    """The contexts behind 0, 1, … len(served) served tokens."""
    recent = [*tokens[-model.order :], *served]
    known = len(recent) - len(served)
    return [model.context(recent[: known + n]) for n in range(len(served) + 1)]


class _TargetRows:
    """The target's distributions of one sequence, made when they are asked for."""

    def __init__(self, logits: Logits, start: int, temperature: float) -> None:
        self._logits, self._start, self._temperature = logits, start, temperature

    def __call__(self, i: int) -> sampling.Floats:
        return sampling.probabilities(self._logits[self._start + i], self._temperature)


class _DraftRows:
    """The rows behind one sequence's tokens; those that were certain have none."""

    def __init__(self, proposals: Proposals, row: int, q: Sequence[float]) -> None:
        self._proposals, self._row, self._q = proposals, row, q

    def __call__(self, i: int) -> sampling.Row:
        before = sum(q < 1 for q in self._q[:i])
        return self._proposals(self._row, before)


class MarkovDraftWorker(DraftWorker):
    """Drafts with the draft model."""

    def __init__(
        self, stepper: Forwards, laws: MarkovLaws, lookahead: int, fan_outs: FanOuts
    ) -> None:
        """fan_outs: the lists that Saguaro sampling damps by until others are grown."""
        self.stepper, self._laws, self._lookahead = stepper, laws, lookahead
        self._fan_outs = fan_outs
        self._histories = Histories(lambda request: laws.prompt(request.request_id))

    def twin(self, stepper: Forwards) -> MarkovDraftWorker:
        """The same laws over other forwards (calibration)."""
        return MarkovDraftWorker(stepper, self._laws, self._lookahead, self._fan_outs)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._histories.begin_round(batch, admissions)

    def served(self, batch: Batch, speculation: Speculation) -> None:
        self._histories.serve(batch, speculation)

    def launch_glue(self, batch: Batch, speculation: Speculation) -> None:
        tokens = verify_rows(batch.last_tokens, speculation)
        self.stepper.upload(len(batch) * (self._lookahead + 1), tokens)
        self.stepper.launch()

    def done(self) -> bool:
        return self.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        self.stepper.wait(waiter)

    def elapsed_s(self) -> float:
        return self.stepper.elapsed_s()

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """The draft's likeliest tokens at each row of the trunk, likeliest first."""
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
                    sequence, draws = history.request.request_id, _first_draw(history, 1)
                    lanes.append(Lane(sequence, draws, behind, fan_outs.after_hit))
        table = np.array(found, np.int64).reshape(-1, 4)
        first = table[:, 3].astype(np.int32)
        rollout = SampledRollout(np.zeros(0, np.int64), first, lanes, self._lookahead)
        k_of, place_of = table[:, 1].astype(np.int32), table[:, 2].astype(np.int32)
        return Branches(Lanes(table[:, 0], k_of, place_of), rollout)

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """FAST tokens are certain: from the sequence's own past, else the likeliest of all."""
        histories = self._histories.rows(batch)
        lanes = [
            Lane(
                histories[row].request.request_id,
                _first_draw(histories[row]),
                self._laws.draft.context(histories[row].tokens),
                self._fan_outs.after_miss,
            )
            for row in rows
        ]
        chosen = np.asarray(rows, np.int64)
        rollout = SampledRollout(chosen, batch.last_tokens[chosen], lanes, self._lookahead)
        if source == Source.FAST:
            for lane, row in enumerate(rows):
                rollout.tokens[lane] = self._fast(histories[row].tokens)
        return rollout

    def _fast(self, tokens: Sequence[int]) -> list[int]:
        found = looked_up(tokens, self._laws.draft.order + 1, self._lookahead)
        unigram = self._laws.draft.likeliest
        return found + [unigram] * (self._lookahead - len(found))

    def launch_step(self, rollouts: Sequence[Rollout]) -> None:
        inputs = [rollout.inputs for rollout in rollouts]
        tokens = inputs[0] if len(inputs) == 1 else np.concatenate(inputs)
        self.stepper.upload(len(tokens), tokens)
        self.stepper.launch()

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        for rollout in rollouts:
            assert isinstance(rollout, SampledRollout) and rollout.q is not None
            place = rollout.steps
            drawn: dict[tuple[int, int], float] = {}  # lanes of a sequence share it: one can win
            for n, lane in enumerate(rollout.lanes):
                key = lane.sequence, lane.first_draw + place
                if key not in drawn:
                    drawn[key] = uniforms(self._laws.seed, Purpose.DRAFT, *key, 1)[0]
                token, q, row = self._propose(lane, place, drawn[key])
                rollout.tokens[n, place], rollout.q[n, place] = token, q
                rollout.recorded[n].append(row if q < 1 else None)
                lane.context = self._laws.draft.context((*lane.context, token))
            rollout.steps += 1

    def _propose(self, lane: Lane, place: int, u: float) -> tuple[int, float, sampling.Row]:
        """The lane's token at its place in the round, its probability, and the row it is from."""
        laws = self._laws
        top = lane.fan_out[place] if lane.fan_out else 0
        logits = laws.draft.logits(lane.context)
        probs = sampling.probabilities(logits, laws.temperature, top, laws.saguaro_c)
        return sampling.propose(probs, u)

    def close(self) -> None:
        self.stepper.close()
