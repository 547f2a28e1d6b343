"""Closed formulas that measurements are compared with, each with its source.

Symbols are those of the papers: alpha is the acceptance rate of a token, K the number of drafted
tokens, k the number of accepted ones (0..K), F_k the number of bonus-token candidates that are kept
for the case that k tokens are accepted.

    [L]  Leviathan, Kalman, Matias, ICML 2023          [S]  Kumar, Dao, May, arXiv 2603.03251
    [D]  derived here; tests/engine/test_acceptance.py and test_fanout.py check it
"""

import math
from collections.abc import Sequence


def expected_tokens(alpha: float, lookahead: int) -> float:
    """Returns the mean number of tokens of a round with K = lookahead, (1 − alpha^{K+1}) / (1 −
    alpha) (Leviathan et al. 2023, eq. 1), as a sum, which is exact near alpha = 1."""
    return math.fsum(alpha**k for k in range(lookahead + 1))


def accept_probabilities(hazards: Sequence[float]) -> tuple[float, ...]:
    """Returns P(k tokens accepted) for k = 0..K: Π_{j≤k} a_j · (1 − a_{k+1}), with a_{K+1} = 0.
    hazards: a_j, the probability that token j is accepted if all earlier ones are."""
    reached = 1.0
    probabilities = []
    for rate in hazards:
        probabilities.append(reached * (1.0 - rate))
        reached *= rate
    return (*probabilities, reached)


def power_law_miss(fan_out: float, hit_a: float, hit_r: float, floor: float = 0.0) -> float:
    """Returns the probability of a cache miss with F = fan_out candidates for the bonus token,
    min(1, floor + A·F^{−r}), or 1 if F = 0. hit_a, hit_r: A and r; arXiv 2603.03251, def. 11 has A
    = 1 and no floor. floor: the probability of tokens that the draft does not know."""
    if fan_out <= 0:
        return 1.0
    return min(1.0, floor + hit_a * float(fan_out**-hit_r))  # 0 if r is large, not an error


def each_k(value: float | Sequence[float], width: int) -> Sequence[float]:
    """Returns one number for each possible number of accepted tokens: `value` itself if it is a
    sequence, or else a list of `width` times `value`."""
    return [value] * width if isinstance(value, (int, float)) else value
