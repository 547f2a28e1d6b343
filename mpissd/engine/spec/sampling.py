"""Rejection sampling: what a draft proposes, what a target accepts, and what replaces a rejection.

p is the target's distribution of the next token, q the distribution that a proposal was drawn from.
q is fixed to float32 *before* it is sampled (record), so that both ends of a link compute with the
very distribution that was sampled [Leviathan et al. 2023, Theorem 1; Kumar, Dao, May 2026,
Definition 14].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError

Floats = NDArray[np.float64]
Row = NDArray[np.float32]  # [V] a distribution as it travels; it need not add up to 1

_EMPTY = 1e-14  # a residual of less than this is p = q but for rounding


def probabilities(
    logits: NDArray[np.floating], temperature: float, top: int = 0, scale: float = 1.0
) -> Floats:
    """softmax(z / temperature), [V] → [V]; temperature 0: all on the first of the largest.

    top, scale: Saguaro's σ_{F,C}: the F largest logits weigh C times as much (C in 0..1), which
    leaves more of the residual to the tokens that the cache holds. C = 1, C = 0 over the whole
    support and temperature 0 all mean plain softmax.
    """
    if temperature == 0:
        certain = np.zeros(len(logits))
        certain[int(np.argmax(logits))] = 1.0
        return certain
    exact = np.asarray(logits, np.float64)
    with np.errstate(over="ignore"):  # −inf: a temperature near 0 leaves the largest alone
        weights = np.exp((exact - exact.max()) / temperature)
    if top > 0 and scale < 1:
        damped = weights.copy()
        damped[largest(logits, top)] *= scale
        weights = damped if damped.sum() > 0 else weights
    return np.asarray(weights / weights.sum())


def largest(
    logits: NDArray[np.floating], count: int, without: int | None = None
) -> NDArray[np.int64]:
    """Ids of the `count` largest logits, largest first, of equals the smaller id first.

    without: an id that is left out. Fewer ids where the vocabulary has no more.
    """
    wanted = min(count + (without is not None), len(logits))
    if wanted == 0:
        return np.zeros(0, np.int64)
    least = np.partition(logits, len(logits) - wanted)[len(logits) - wanted]
    ids = np.flatnonzero(logits >= least)
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    if without is not None:
        ids = ids[ids != without]
    return ids[:count]


def record(probs: Floats) -> Row:
    """A proposal's distribution as it will travel; it is this one that is sampled."""
    return probs.astype(np.float32)


def recorded(row: Row) -> Floats:
    """The distribution that a recorded row stands for, [V]; equal on every rank, to the bit."""
    exact = row.astype(np.float64)
    return np.asarray(exact / exact.sum())


def draw(probs: Floats, u: float) -> int:
    """The token that u in [0, 1) chooses, by the inverse of the cumulative distribution."""
    cumulated = np.cumsum(probs)
    return int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))


def propose(probs: Floats, u: float) -> tuple[int, float, Row]:
    """What u proposes of a distribution [V]: the token, its probability q, and the recorded row
    that both are of."""
    row = record(probs)
    exact = recorded(row)
    token = draw(exact, u)
    return token, float(exact[token]), row


def residual(p: Floats, q: Floats) -> Floats | None:
    """max(p − q, 0) / Σ, what a rejected proposal is replaced from; None where p = q."""
    left = np.maximum(p - q, 0.0)
    total = float(left.sum())
    return None if total <= _EMPTY else np.asarray(left / total)


def without(p: Floats, token: int) -> Floats | None:
    """The residual of a proposal that was certain (q = 1 on `token`); None where p is, too."""
    left = p.copy()
    left[token] = 0.0
    total = float(left.sum())
    return None if total <= _EMPTY else left / total


def judge(
    p: Callable[[int], Floats],
    tokens: Sequence[int],
    q: Sequence[float],
    q_row: Callable[[int], Row],
    coins: Sequence[float],
    u: float,
) -> tuple[int, int]:
    """One sequence's verification: (tokens accepted k, bonus t*).

    p(i): the target's distribution [V] behind i accepted tokens, i = 0 … len(tokens). q[i]: the
    probability that token i was drawn with; 1 means that it was certain. q_row(i): the recorded
    distribution [V] it was drawn from, asked for only where it is rejected and was not certain.
    coins[i], u: independent uniforms that accept token i, and draw the bonus.
    Token i is accepted if coin < p/q; else t* comes from max(p − q, 0). Behind the last, from p.

    Raises ProtocolError: a proposal of probability 0, or a row that gives it another one.
    """
    for i, token in enumerate(tokens):
        if not 0 < q[i] <= 1:
            raise ProtocolError(f"token {token} was proposed with probability {q[i]}")
        row = p(i)
        if coins[i] * q[i] < row[token]:
            continue
        left = without(row, token) if q[i] == 1 else residual(row, _checked(q_row(i), token, q[i]))
        if left is not None:
            return i, draw(left, u)
    return len(tokens), draw(p(len(tokens)), u)


def _checked(row: Row, token: int, q: float) -> Floats:
    probs = recorded(row) if row[token] > 0 else row.astype(np.float64)
    if probs[token] != q:
        raise ProtocolError(f"token {token}: its row says {probs[token]}, its proposal said {q}")
    return probs
