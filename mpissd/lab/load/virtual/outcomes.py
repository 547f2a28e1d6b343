"""Outcomes of rounds in virtual time: accepted tokens, and hits.

From a job's imposed models, with coins keyed by sequence and position, or from a recording.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.engine.workload.replay.recording import Recorded
from mpissd.engine.workload.replay.workload import ReplayWorkload

_POSITIONS = 4096  # after which the coins of a sequence begin again


class Outcomes(ABC):
    """The outcomes of one sequence, by the tokens that it has emitted so far."""

    @abstractmethod
    def accepted(self, emitted: int, lookahead: int, source: Source) -> int:
        """Returns how many of `lookahead` drafted tokens the target accepts."""

    @abstractmethod
    def hits(self, emitted: int, k: int, served: int, fan_out: Sequence[int]) -> bool:
        """Returns whether the draft has kept the bonus token after k of `served` tokens."""


class Drawn(Outcomes):
    """Outcomes by a job's acceptance and hit models."""

    def __init__(self, job: Job, request_id: int) -> None:
        seed, count = job.config.seed, 2 * _POSITIONS
        self._law, self._hazards = job.hit_law, {s: a.hazards for s, a in job.acceptance.items()}
        self._coins = uniforms(seed, Purpose.ACCEPT, request_id, 0, count)
        self._ranks = uniforms(seed, Purpose.RANK, request_id, 0, count)

    def accepted(self, emitted: int, lookahead: int, source: Source) -> int:
        coins, hazards, k = self._coins[emitted % _POSITIONS :], self._hazards[source], 0
        while k < lookahead and coins[k] < hazards[k]:
            k += 1
        return k

    def hits(self, emitted: int, k: int, served: int, fan_out: Sequence[int]) -> bool:
        chance = self._law.hit_probability(fan_out[k], k == served)
        return bool(self._ranks[(emitted + k) % _POSITIONS] < chance)


class Replayed(Outcomes):
    """Outcomes of one prompt of a recording; after its end the answer begins again."""

    def __init__(self, recorded: Recorded) -> None:
        self._tokens, self._end = recorded.tokens.tolist(), recorded.end
        self._rollout, self._top = recorded.rollout.tolist(), recorded.top.tolist()

    def accepted(self, emitted: int, lookahead: int, source: Source) -> int:
        at, k = emitted % self._end, 0
        drafted, true = self._rollout[at], self._tokens[at:]
        while k < lookahead and drafted[k] == true[k]:
            k += 1
        return k

    def hits(self, emitted: int, k: int, served: int, fan_out: Sequence[int]) -> bool:
        at = emitted % self._end
        if at + k >= self._end:  # the recording has no draft tokens there
            return False
        left_out = self._rollout[at][k] if k < served else None
        kept = [token for token in self._top[at + k] if token != left_out]
        return self._tokens[at + k] in kept[: fan_out[k]]


def outcomes_of(job: Job, request_id: int) -> Outcomes:
    """Returns the outcomes of a request: of prompt request_id of a recording, or drawn."""
    workload = job.workload
    if isinstance(workload, ReplayWorkload):
        every = workload.recording.sequences
        return Replayed(every[request_id % len(every)])
    return Drawn(job, request_id)
