"""The formulas that measured numbers are held against, each with its source.

Letters as in the papers: alpha per-token acceptance, K lookahead, k accepted tokens (0..K), F_k
bonus candidates kept for "k accepted", B = ΣF_k, h hit rate, b batch size. Times are in units of
one autoregressive step of the target: r = verify_ratio = t_target(b(K+1)) / t_target(1). The T_SD
of a result row is in units of the verification instead: t_draft = r·T_SD.

    [L]  Leviathan, Kalman, Matias, ICML 2023          [S]  Kumar, Dao, May, arXiv 2603.03251
    [D]  derived here; tests/common/test_theory.py checks it by simulation or brute force

Everything raises ConfigError for a value outside its range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

from mpissd.common.errors import ConfigError

_Number = TypeVar("_Number", int, float)


def expected_tokens(alpha: float, lookahead: int) -> float:
    """Tokens a round, bonus included: (1 − alpha^{K+1}) / (1 − alpha) [L, eq. 1].

    Written as the sum it closes, so that alpha = 1 gives K+1 and nothing cancels near it.
    """
    return expected_tokens_from_rates([alpha] * _at_least("lookahead", lookahead, 0))


def expected_tokens_from_rates(hazards: Sequence[float]) -> float:
    """1 + Σ_i Π_{j≤i} a_j for hazards a_i = P(x_i accepted | x_1..x_{i−1} accepted) [D]."""
    return math.fsum(k * p for k, p in enumerate(accept_probabilities(hazards))) + 1.0


def accept_probabilities(hazards: Sequence[float]) -> tuple[float, ...]:
    """w_k = P(k accepted) for k = 0..K: Π_{j≤k} a_j · (1 − a_{k+1}), with a_{K+1} = 0."""
    reached, probabilities = 1.0, []
    for rate in hazards:
        _probability("acceptance rate", rate)
        probabilities.append(reached * (1.0 - rate))
        reached *= rate
    return (*probabilities, reached)


def speedup_sd(tokens: float, verify_ratio: float, t_draft: float) -> float:
    """AR → SD: E_SD / (r + T_draft) [L, theorem 3.8, with r for its 1].

    With r = 1 and t_draft = T_SD it is the milestone report's E / (1 + T_SD).
    """
    return tokens / (_at_least("verify_ratio", verify_ratio) + _at_least("t_draft", t_draft))


def speedup_ssd(
    p_hit: float,
    tokens_hit: float,
    tokens_miss: float,
    *,
    verify_ratio: float,
    t_growth: float,
    t_backup: float,
    batch_size: int = 1,
    interruptible: bool = True,
) -> float:
    """AR → SSD [S, theorem 7]: [h·E_hit + (1−h)·E_miss] / [H·max(r, T_p) + (1−H)·(r + T_b)].

    H = h^b: a round waits for every sequence, hits are independent [S, cor. 16]. A miss aborts
    growth; where it can't (interruptible=False) the denominator is max(r, T_p) + (1−H)·T_b [D].
    """
    _probability("p_hit", p_hit)
    _at_least("t_backup", t_backup)
    tokens = p_hit * tokens_hit + (1 - p_hit) * tokens_miss
    all_hit = p_hit ** _at_least("batch_size", batch_size, 1)
    hit_s = max(_at_least("verify_ratio", verify_ratio), _at_least("t_growth", t_growth))
    miss_s = (verify_ratio if interruptible else hit_s) + t_backup
    return tokens / (all_hit * hit_s + (1 - all_hit) * miss_s)


def speedup_bound(
    tokens_hit: float, tokens_sd: float, verify_ratio: float, t_draft: float
) -> float:
    """SD → SSD when every round hits and growth hides: (r + T_SD)·E_hit / (r·E_SD) [S, cor. 9]."""
    _at_least("t_draft", t_draft)
    return (verify_ratio + t_draft) * tokens_hit / (verify_ratio * tokens_sd)


def stationary_hit_rate(after_hit: float, after_miss: float) -> float:
    """h = h_m / (1 − h_h + h_m), of a chain that hits with h_h after a hit, h_m after a miss [D].

    (h_h, h_m) = (1, 0) never changes state; a sequence starts with a miss, so it is 0.
    """
    _probability("p_hit after a hit", after_hit)
    _probability("p_hit after a miss", after_miss)
    return after_miss / (1 - after_hit + after_miss) if after_miss else 0.0


def power_law_miss(fan_out: float, hit_a: float, hit_r: float) -> float:
    """miss(F) = min(1, A·F^{−r}), and 1 where nothing is kept (F = 0) [S, def. 11, has A = 1]."""
    if fan_out <= 0:
        return 1.0
    return min(1.0, hit_a * float(fan_out**-hit_r))  # a steep law underflows to 0


def miss_probability(
    weights: Sequence[float],
    fan_out: Sequence[float],
    hit_a: Sequence[float],
    hit_r: float | Sequence[float],
) -> float:
    """Σ_k w_k·miss_k(F_k); weights = accept_probabilities(...), all sequences K+1 long.

    hit_r: one for every k, or K+1 of them.
    """
    rows = zip(weights, fan_out, hit_a, each_k(hit_r, len(weights)), strict=True)
    return math.fsum(w * power_law_miss(f, a, r) for w, f, a, r in rows)


def fan_out_for(p_hit: float, hit_a: float, hit_r: float) -> int | None:
    """The smallest F with miss(F) ≤ 1 − p_hit; None where no finite F has."""
    _probability("p_hit", p_hit)
    if p_hit == 0:
        return 0
    if p_hit == 1 and hit_a > 0:
        return None
    ratio = hit_a / (1 - p_hit) if hit_a else 0.0
    least: float = ratio ** (1 / _positive("hit_r", hit_r))
    return max(1, math.ceil(least * (1 - 1e-12)))


def each_k(value: float | Sequence[float], width: int) -> Sequence[float]:
    """`width` numbers: the one that all k share, or those that there are."""
    return [value] * width if isinstance(value, (int, float)) else value


def power_fan_out(
    weights: Sequence[float], budget: float, hit_a: Sequence[float], hit_r: float
) -> tuple[float, ...]:
    """Real-valued F_k ∝ (w_k·A_k)^{1/(1+r)} with ΣF_k = B: minimises Σ w_k·A_k·F_k^{−r} [D]."""
    _positive("hit_r", hit_r)
    shares = [(w * a) ** (1 / (1 + hit_r)) for w, a in zip(weights, hit_a, strict=True)]
    total = math.fsum(shares)
    if total <= 0:
        raise ConfigError(f"hit_a={tuple(hit_a)}: allowed: one above 0 where k is ever accepted")
    return tuple(budget * share / total for share in shares)


def geometric_fan_out(
    alpha: float, lookahead: int, budget: float, hit_r: float
) -> tuple[float, ...]:
    """Theorem 12 [S]: F_k = F_0·a^{k/(1+r)} for k < K, F_K = F_0·(a^K / (1−a))^{1/(1+r)}."""
    weights = accept_probabilities([alpha] * lookahead)
    return power_fan_out(weights, budget, [1.0] * (lookahead + 1), hit_r)


def geometric_miss(
    alpha: float, lookahead: int, budget: float, hit_r: float, hit_a: float = 1.0
) -> float:
    """Miss probability of geometric_fan_out where no F_k is clipped: A·(1−a)·N^{1+r}·B^{−r} [D].

    N = (1−β^K)/(1−β) + β^K·(1−a)^{−1/(1+r)}, β = a^{1/(1+r)}; alpha < 1.
    """
    if not 0 <= alpha < 1:
        raise ConfigError(f"alpha={alpha}: allowed: at least 0, below 1")
    _positive("budget", budget)
    root = 1 / (1 + _positive("hit_r", hit_r))
    beta = alpha**root
    norm = math.fsum(beta**k for k in range(lookahead)) + beta**lookahead / (1 - alpha) ** root
    return float(hit_a * (1 - alpha) * norm ** (1 + hit_r) * budget**-hit_r)


def backup_crossover(
    p_hit: float,
    tokens_hit: float,
    tokens_slow: float,
    tokens_fast: float,
    *,
    t_slow: float,
    t_fast: float,
    verify_ratio: float = 1.0,
    t_growth: float = 0.0,
    interruptible: bool = True,
) -> float:
    """b*: up to this batch size the slow (drafting) backup is no worse, above it the fast one is
    better [S, thm 17, for T_p ≤ r = 1]. inf: always; 0: never.

    With M = max(r, T_p), N_i = h·E_hit + (1−h)·E_i, D = N_s − N_f and G = N_f·T_s − N_s·T_f, the
    slow one's speedup_ssd is no less where h^b·(G + (M − r)·D) ≥ G − r·D [D]. Growth that a miss
    can't abort (interruptible=False) has M for r. ConfigError: t_slow < t_fast, which may have no
    single crossover.
    """
    _probability("p_hit", p_hit)
    if not t_slow >= t_fast:
        raise ConfigError(f"t_slow={t_slow}: allowed: at least t_fast={t_fast}")
    slow = p_hit * tokens_hit + (1 - p_hit) * tokens_slow
    fast = p_hit * tokens_hit + (1 - p_hit) * tokens_fast
    gain, cost = slow - fast, fast * t_slow - slow * t_fast
    longest = max(verify_ratio, t_growth)
    least = verify_ratio if interruptible else longest
    if p_hit == 1 or (gain >= 0 and cost <= least * gain):
        return math.inf
    if p_hit == 0 or gain < 0:
        return 0.0
    return math.log((cost - least * gain) / (cost + (longest - least) * gain)) / math.log(p_hit)


def break_even_alpha(
    lookahead: int, verify_ratio: float, t_draft: float, rival: float = 1.0
) -> float | None:
    """The alpha at which SD is `rival` times as fast as AR: E_SD(alpha) = rival·(r + T_draft) [D].

    Bisection to 1e-12 (E_SD rises from 1 to K+1). 0.0 when any alpha does, None when none does.
    """
    wanted = rival * (verify_ratio + t_draft)
    if wanted <= 1:
        return 0.0
    if not wanted <= expected_tokens(1.0, lookahead):
        return None
    low, high = 0.0, 1.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        enough = expected_tokens(middle, lookahead) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return high


def _probability(what: str, value: float) -> None:
    if not 0 <= value <= 1:  # true of NaN as well
        raise ConfigError(f"{what}={value}: allowed: 0 to 1")


def _at_least(what: str, value: _Number, least: float = 0) -> _Number:
    if not value >= least:
        raise ConfigError(f"{what}={value}: allowed: at least {least}")
    return value


def _positive(what: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise ConfigError(f"{what}={value}: allowed: above 0 and finite")
    return value
