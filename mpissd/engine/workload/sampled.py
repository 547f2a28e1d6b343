"""Workers that sample tokens from two models: they draft, reject and replace tokens.

A subclass provides the models' distributions: `markov` computes them from the context, `text` reads
the logits of its forwards. Draws are keyed by (seed, purpose, sequence, round), so that every
worker may draw them in any order.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import DivergedError
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Batch, Ints, Request, Speculation
from mpissd.engine.spec import sampling
from mpissd.engine.workload.history import Histories, History
from mpissd.engine.workload.rollout import Rollout
from mpissd.engine.workload.workers import (
    Admissions,
    DraftWorker,
    LogitsGather,
    Proposals,
    TargetWorker,
)

Logits = NDArray[np.float32]
Draws = dict[tuple[int, int, int], float]  # by (seed, sequence, draw)
Proposal = tuple[
    int, float, sampling.Row
]  # a token, its probability, the row that it is drawn from


@dataclass(frozen=True)
class Case:
    """A sequence to verify: sampling.judge's arguments, and its first row.

    row: of the batch; start: of the forward.
    """

    row: int
    start: int
    request: Request
    tokens: Sequence[int]
    q: Sequence[float]
    proposal: Callable[[int], sampling.Row]
    coins: Sequence[float]
    u: float


@dataclass
class Lane:
    """The state from which a lane (a branch slot) draws its next token.

    seed, sequence: of its random draws. first_draw: the index of the first one of the round that
    will verify its tokens. fan_out is of that round: Saguaro sampling damps the tokens that it
    keeps. context, logits: the draft model's last context and its logits, whichever of the two the
    worker uses.
    """

    sequence: int
    first_draw: int
    context: tuple[int, ...]
    fan_out: tuple[int, ...]
    logits: Logits | None = None
    temperature: float = 0.0
    seed: int | None = None


class SampledRollout(Rollout):
    """A rollout that records, with each sampled token, its probability and distribution."""

    def __init__(self, rows: NDArray[np.int64], first: Ints, lanes: list[Lane], K: int) -> None:
        super().__init__(rows, first, np.zeros((len(first), K), np.int32))
        self.q = np.ones((len(first), K))
        self.lanes = lanes
        self.recorded: list[list[sampling.Row | None]] = [[] for _ in lanes]

    def keep(self, lanes: Sequence[int], rows: Sequence[int]) -> None:
        super().keep(lanes, rows)
        assert self.q is not None
        self.q = self.q.take(np.array(lanes, np.int64), axis=0)
        self.lanes = [self.lanes[n] for n in lanes]
        self.recorded = [self.recorded[n] for n in lanes]

    def fill(self, count: int) -> None:
        assert self.q is not None
        self.q[:, self.steps : count] = 1.0
        for row in self.recorded:
            row[self.steps :] = [None] * max(0, count - self.steps)
        super().fill(count)

    def proposals(self, lane: int, steps: int) -> list[NDArray[np.float32]]:
        return [row for row in self.recorded[lane][:steps] if row is not None]


class SamplingDraftWorker(DraftWorker):
    """A draft worker that samples each drafted token; a subclass provides the distribution."""

    _seed: int
    _histories: Histories

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._histories.begin_round(batch, admissions)

    def served(self, batch: Batch, speculation: Speculation) -> None:
        self._histories.serve(batch, speculation)

    def collect_step(self, rollouts: Sequence[Rollout]) -> None:
        drawn: Draws = {}
        for rollout in rollouts:
            assert isinstance(rollout, SampledRollout)
            for n in range(len(rollout.lanes)):
                self._draw(rollout, n, rollout.steps, drawn)
            rollout.steps += 1

    def _draw(self, rollout: SampledRollout, n: int, place: int, drawn: Draws) -> int:
        """Draws and records token `place` of a rollout's lane n; lanes of a sequence share
        draws."""
        lane = rollout.lanes[n]
        return self._record(
            rollout, n, place, self._propose(lane, place, self._u(lane, place, drawn))
        )

    def _u(self, lane: Lane, place: int, drawn: Draws) -> float:
        """Returns the uniform that draws token `place` of a lane."""
        seed = self._seed if lane.seed is None else lane.seed
        key = seed, lane.sequence, lane.first_draw + place
        if key not in drawn:
            drawn[key] = uniforms(seed, Purpose.DRAFT, *key[1:], 1)[0]
        return drawn[key]

    def _record(self, rollout: SampledRollout, n: int, place: int, proposal: Proposal) -> int:
        """Records token `place` of a rollout's lane n."""
        assert rollout.q is not None
        token, q, row = proposal
        rollout.tokens[n, place], rollout.q[n, place] = token, q
        rollout.recorded[n].append(row if q < 1 else None)
        return token

    @abstractmethod
    def _propose(self, lane: Lane, place: int, u: float) -> Proposal:
        """Draws the lane's next token with u: returns (token, its probability, the whole row)."""


class SamplingTargetWorker(TargetWorker):
    """A target worker that verifies by rejection sampling (greedily at temperature 0)."""

    _seed: int
    _histories: Histories
    # The token of each entry of a proposal's row, rising; None: entry t is token t.
    _draft_ids: Ints | None = None

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        self._histories.begin_round(batch, admissions)

    @abstractmethod
    def _target_row(
        self, request: Request, start: int, i: int
    ) -> sampling.Floats | sampling.Weights:
        """Returns the target's distribution [V] of row start + i of the finished forward."""

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        """Applies rejection sampling (spec.sampling.judge) to each sequence.

        Returns (num_accepted, bonus), both int32 [b]. Draws are keyed by (sequence, round). Of a
        speculation whose distributions are lost no sampled token is judged.
        """
        accepted, bonus = np.zeros((2, len(batch)), np.int32)
        start, cases = 0, list[Case]()
        for row, history in enumerate(self._histories.rows(batch)):
            count = len(history.served)
            if (sure := self._certain(history, start)) is not None:
                accepted[row], bonus[row] = sure
            else:
                q = speculation.q[row, :count].tolist() if speculation.sampled else [1.0] * count
                if speculation.is_lost and min(q, default=1.0) < 1:
                    q = []  # draw the token after the last committed one, whatever was drafted
                cases.append(self._case(history, row, start, q, proposals))
            start += count + 1
        for case, verdict in zip(cases, self._judge_all(cases), strict=True):
            accepted[case.row], bonus[case.row] = verdict
        return accepted, bonus

    def _case(
        self, history: History, row: int, start: int, q: Sequence[float], proposals: Proposals
    ) -> Case:
        coins = self._draws(Purpose.ACCEPT, history, len(q))
        (u,) = self._draws(Purpose.BONUS, history, 1)
        proposal = partial(_proposal, proposals, row, q)
        served = history.served[: len(q)]
        return Case(row, start, history.request, served, q, proposal, coins, u)

    def _judge_all(self, cases: Sequence[Case]) -> list[tuple[int, int]]:
        """Returns (k, t*) of each of these sequences."""
        return [self._judge_one(case) for case in cases]

    def _judge_one(self, case: Case) -> tuple[int, int]:
        p = partial(self._target_row, case.request, case.start)
        drafted = case.tokens, case.q, case.proposal
        return sampling.judge(p, *drafted, case.coins, case.u, self._draft_ids)

    def _certain(self, history: History, start: int) -> tuple[int, int] | None:
        """Returns (k, t*) from the rows after row `start` if no draw decides them, or None."""
        return None

    def _draws(self, purpose: Purpose, history: History, count: int) -> list[float]:
        seed, sequence = history.draws(self._seed)
        drawn: list[float] = uniforms(seed, purpose, sequence, history.first_draw(), count).tolist()
        return drawn


def _proposal(proposals: Proposals, row: int, q: Sequence[float], i: int) -> sampling.Row:
    """Returns the distribution that drafted token i was drawn from; certain tokens have none."""
    return proposals(row, sum(one < 1 for one in q[:i]))


def check_finite(logits: Logits, model: str) -> None:
    """Raises DivergedError if a logit is not finite, which would decide a token silently."""
    if not np.isfinite(logits).all():
        raise DivergedError(f"{model}: a logit is not finite: its weights are damaged, or overflow")


class OwnLogits:
    """Gather of logits for a single target rank: returns its own."""

    def start(self, local: Logits) -> None:
        self._local = local

    def done(self) -> bool:
        return True

    def result(self) -> Logits:
        return self._local[None]


def gathered(gather: LogitsGather) -> Logits:
    """Returns the logits of all ranks side by side: float32 [rows, Σ columns]."""
    parts: Any = gather.result()
    found: Logits = parts.transpose(1, 0, 2).reshape(parts.shape[1], -1)
    return found
