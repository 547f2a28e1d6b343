"""The models of the `gemm` workload, position by position, as the text defines them: no tables.

They can check everything that a run recorded, whatever code made it.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mpissd.common.real_pairs import ASSUMED
from mpissd.common.rng import Purpose, uniforms

_BLOCK = 256


@lru_cache(maxsize=4096)
def _block(seed: int, purpose: Purpose, sequence: int, number: int) -> list[float]:
    return list(uniforms(seed, purpose, sequence, number * _BLOCK, _BLOCK))


class Law:
    """Y(s,p), the draft's x(s,p,i,source) and the rank of the bonus token.

    hazards: a_1 … a_K by source. p_hit imposes hits, else miss(F) = min(1, floor + A·F^-r), where
    `laws` holds (A, r, floor) after a rejection, and where all served tokens were accepted.
    """

    def __init__(
        self,
        seed: int,
        vocab: int,
        hazards: Mapping[Any, Sequence[float]],
        fan_out: Sequence[int] = (),
        p_hit: float | None = None,
        laws: tuple[tuple[float, float, float], tuple[float, float, float]] = ASSUMED.laws,
    ) -> None:
        self.seed, self.vocab, self.hazards = seed, vocab, hazards
        self.fan_out, self.p_hit = fan_out, p_hit
        self.laws = laws

    def draw(self, purpose: Purpose, sequence: int, position: int) -> float:
        number, offset = divmod(position, _BLOCK)
        return _block(self.seed, purpose, sequence, number)[offset]

    def true(self, sequence: int, position: int) -> int:
        """Y: the token that the target emits."""
        return int(self.vocab * self.draw(Purpose.TOKEN, sequence, position))

    def proposal(self, sequence: int, position: int, place: int, source: int) -> int:
        """x at `place` (from 0) of a round, drafted by `source`."""
        true = self.true(sequence, position)
        if self.draw(Purpose.ACCEPT, sequence, position) < self.hazards[source][place]:
            return true
        other = int((self.vocab - 1) * self.draw(Purpose.WRONG, sequence, position))
        return other + (other >= true)

    def proposals(self, sequence: int, length: int, count: int, source: int) -> list[int]:
        """x_1 … x_count after `length` committed tokens."""
        return [self.proposal(sequence, length + i, i, source) for i in range(count)]

    def judge(self, sequence: int, length: int, drafts: Sequence[int]) -> tuple[int, int]:
        """(k, t*) of a verification."""
        k = 0
        while k < len(drafts) and drafts[k] == self.true(sequence, length + k):
            k += 1
        return k, self.true(sequence, length + k)

    def rank(self, sequence: int, position: int, end: bool = False) -> float:
        """From 1; infinite where no fan-out reaches the bonus token. end: all were accepted."""
        u = self.draw(Purpose.RANK, sequence, position)
        if self.p_hit is not None:
            return 1 if u < self.p_hit else math.inf
        a, r, floor = self.laws[end]
        if u <= floor:
            return math.inf
        return float(max(1, math.ceil((a / (u - floor)) ** (1 / r))))

    def hits(self, sequence: int, length: int, k: int, end: bool = False) -> bool:
        """Whether the outcome (k, t*) of a verification after `length` tokens is a key.

        end: whether all served tokens were accepted.
        """
        return bool(self.fan_out) and self.rank(sequence, length + k, end) <= self.fan_out[k]
