"""Speculative sampling: draws draft tokens (proposals), accepts them or draws replacements.

p is the target's distribution of the next token; q is the distribution that a proposal was drawn
from. q is rounded to float32 *before* it is sampled (`record`), so that the draft rank and the
target rank compute with exactly the same distribution [Leviathan et al. 2023, Theorem 1; Kumar,
Dao, May 2026, Definition 14].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.engine.law.tree import CHAIN, Shape

Floats = NDArray[np.float64]
Row = NDArray[np.float32]  # a distribution [V] as it is sent; its sum need not be exactly 1

_EMPTY = 1e-14  # If max(p − q, 0) sums to less, p and q differ only by rounding.
_BLOCK = 256  # the number of tokens in a block, whose probabilities `draw` adds up first
_FEW = 4096  # the largest vocabulary for which `draw` sums over all tokens and not over blocks


@dataclass(frozen=True)
class Weights:
    """A distribution over V tokens that is not normalised: p[i] = values[i] / total, where total >
    0 is the sum of values. Not dividing all V values saves a quarter of the time of a distribution:
    acceptance needs only one p[i], and drawing a token needs none."""

    values: Floats
    total: float

    def __getitem__(self, token: int) -> float:
        return float(self.values[token] / self.total)

    @property
    def probs(self) -> Floats:
        """The normalised distribution [V]."""
        return self.values / self.total


def weigh(
    logits: NDArray[np.floating], temperature: float, top: int = 0, scale: float = 1.0
) -> Weights:
    """Returns the distribution softmax(logits / temperature) over V tokens; at temperature 0 the
    first maximum has probability 1.

    top, scale: Saguaro's sampling of drafted tokens multiplies the weights of the `top` largest
    logits by `scale` (0..1), so that a rejection more often yields one of these tokens, for which
    the draft has drafted ahead. It changes nothing with scale = 1 or at temperature 0.
    """
    if temperature == 0:
        certain = np.zeros(len(logits))
        certain[int(np.argmax(logits))] = 1.0
        return Weights(certain, 1.0)
    exact = np.asarray(logits, np.float64)
    weights = exact - exact.max()
    # A temperature near 0 turns all but the largest logit into −inf, as it should.
    with np.errstate(over="ignore"):
        weights /= temperature
    np.exp(weights, out=weights)
    if top > 0 and scale < 1:
        damped = weights.copy()
        damped[largest(logits, top)] *= scale
        weights = damped if damped.sum() > 0 else weights
    return Weights(weights, float(weights.sum()))


def largest(logits: NDArray[np.floating], count: int) -> NDArray[np.int64]:
    """Returns the ids of the `count` largest logits (of all, if there are fewer), the largest
    first; of equal logits the smaller id comes first."""
    wanted = min(count, len(logits))
    if wanted == 0:
        return np.zeros(0, np.int64)
    least = np.partition(logits, len(logits) - wanted)[len(logits) - wanted]
    ids = np.flatnonzero(logits >= least)
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def record(probs: Floats) -> Row:
    """Rounds a drafted token's distribution [V] to float32, the form that is sampled and sent."""
    return probs.astype(np.float32)


def recorded(row: Row) -> Floats:
    """Normalises a distribution [V] that was rounded to float32. Every rank gets the same bits."""
    exact = row.astype(np.float64)
    return np.asarray(exact / exact.sum())


def draw(weights: Floats, u: float, total: float = 1.0) -> int:
    """Draws a token from the distribution weights / total [V] by the uniform number u in [0, 1):
    inverts the cumulative distribution. Sums in token order define the result. Sums over blocks of
    tokens take a tenth of the time, and are used if rounding errors cannot change the result."""
    token = _between(weights, u) if len(weights) > _FEW else None
    if token is not None:
        return token
    cumulated = np.cumsum(weights if total == 1 else weights / total)
    return int(np.searchsorted(cumulated, u * cumulated[-1], side="right"))


def _between(weights: Floats, u: float) -> int | None:
    """Returns what `draw` returns, computed by sums over blocks of tokens, or None if rounding
    errors could give another token. In any order, the rounding error of a sum of V weights is at
    most (V + 2) 2^-53 of the total [Higham 2002, section 4.2]. At most four such errors add up: in
    a token's bound and in u's share of the total, in both ways to sum. The margin is twice that."""
    ends = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)))
    total = float(ends[-1])
    wanted = u * total
    margin = (len(weights) + 2 * _BLOCK) * 2.0**-50 * total
    block = int(np.searchsorted(ends, wanted, side="right"))
    if block == len(ends):
        return None
    first = float(ends[block - 1]) if block else 0.0
    bounds = first + np.cumsum(weights[_BLOCK * block : _BLOCK * (block + 1)])
    at = int(np.searchsorted(bounds, wanted, side="right"))
    low = bounds[at - 1] if at else first
    is_sure = at < len(bounds) and low + margin < wanted < bounds[at] - margin
    return _BLOCK * block + at if is_sure else None


def propose(probs: Floats, u: float) -> tuple[int, float, Row]:
    """Samples a drafted token from the distribution `probs` [V], rounded to float32, by the uniform
    number u in [0, 1). Returns (the token, its probability q, the rounded distribution)."""
    row = record(probs)
    exact = row.astype(np.float64)
    total = float(exact.sum())
    token = draw(exact, u, total)
    return token, float(exact[token] / total), row


def residual(p: Floats, q: Floats) -> Floats | None:
    """Returns max(p − q, 0), normalised: what the target, with distribution p, draws from after it
    rejects a token drawn from q. Returns None if p = q."""
    left = p - q
    np.maximum(left, 0.0, out=left)
    total = float(left.sum())
    if total <= _EMPTY:
        return None
    left /= total
    return left


def without(p: Floats, token: int) -> Floats | None:
    """Returns the distribution p without `token`, normalised: what the target draws from after it
    rejects a token that was drafted with probability 1. Returns None if p has no other token."""
    left = p.copy()
    left[token] = 0.0
    total = float(left.sum())
    return None if total <= _EMPTY else left / total


def judge(
    p: Callable[[int], Floats | Weights],
    tokens: Sequence[int],
    q: Sequence[float],
    q_row: Callable[[int], Row],
    coins: Sequence[float],
    u: float,
    ids: NDArray[np.int32] | None = None,
    shape: Shape = CHAIN,
) -> tuple[int, int]:
    """Verifies one sequence's drafted tokens by rejection sampling. Returns (k, t*): the node at
    which the accepted path ends (in a chain, the number of accepted tokens), and the bonus token.

    p(n): the target's distribution [V], or its weights, after node n of the tree. tokens[i]: the
    token of node i + 1. q[i]: the probability with which it was drawn, given the earlier children
    of its parent; 1 if it was certain. q_row(i): the float32 distribution [V] that token i was
    drawn from; called only if the token is rejected and was not certain. coins[i], u: independent
    uniform numbers that decide on token i and draw t*. ids: if the draft has a smaller vocabulary,
    the target's id of each entry of its rows, ascending.

    Token i is accepted if coins[i] < p/q. After a rejection, p becomes max(p − q, 0), normalised,
    for the next child; after the last child t* is drawn from it [SpecInfer, algorithm 2]. Raises
    ProtocolError for a proposal of probability 0, or whose row gives another probability.
    """
    node = 0
    while True:
        row = p(node)
        for child in shape.children[node]:
            if (i := child - 1) >= len(tokens):
                continue
            token = tokens[i]
            if not 0 < q[i] <= 1:
                raise ProtocolError(f"token {token} was proposed with probability {q[i]}")
            if coins[i] * q[i] < row[token]:
                node = child
                break
            probs = row.probs if isinstance(row, Weights) else row
            if q[i] == 1:
                left = without(probs, token)
            else:
                left = residual(probs, _checked(q_row(i), token, q[i], ids, len(probs)))
            if left is None:
                node = child
                break
            row = left
        else:
            values, total = (row.values, row.total) if isinstance(row, Weights) else (row, 1.0)
            return node, draw(values, u, total)


def _checked(row: Row, token: int, q: float, ids: NDArray[np.int32] | None, vocab: int) -> Floats:
    """Returns the distribution [vocab] that `token` was drawn from, in the target's vocabulary.
    ids: the target's id of each entry of `row` (None: entry t is token t). Raises ProtocolError if
    the received `row` does not give `token` the probability q."""
    exact = row.astype(np.float64)
    exact /= checked_total(exact, token, q, ids)
    if ids is None:
        return exact
    spread = np.zeros(vocab)  # Tokens outside the draft's vocabulary have probability 0.
    spread[ids] = exact
    return spread


def checked_total(row: Row | Floats, token: int, q: float, ids: NDArray[np.int32] | None) -> float:
    """Returns the sum of `row`, the distribution that `token` was drawn from. Raises ProtocolError
    if the row's entry for `token`, divided by this sum, is not the probability q that was sent."""
    place = token if ids is None else int(np.searchsorted(ids, token))
    exact = np.asarray(row, np.float64)
    total = float(exact.sum())
    probability = exact[place] / total if exact[place] > 0 else exact[place]
    if probability != q:
        raise ProtocolError(f"token {token}: its row says {probability}, its proposal said {q}")
    return total


def cut(probs: Floats, top_p: float, top_k: int = 0, min_p: float = 0.0) -> Floats:
    """Drops unlikely tokens of a distribution [V], in vLLM's order: those less likely than min_p
    times the likeliest one, all but the top_k likeliest (0: none), and all outside the nucleus. Of
    equal probabilities the smaller id is kept first."""
    if min_p > 0:
        probs = np.where(probs >= min_p * probs.max(), probs, 0.0)
        probs = probs / probs.sum()
    if 0 < top_k < len(probs):
        chosen = largest(probs, top_k)
        kept = np.zeros_like(probs)
        kept[chosen] = probs[chosen]
        probs = kept / kept.sum()
    return nucleus(probs, top_p)


def nucleus(probs: Floats, top_p: float) -> Floats:
    """Cuts a distribution [V] to its likeliest tokens, as few as have a sum of at least top_p, and
    renormalises it [Holtzman 2020]. Of equal probabilities the smaller id is kept first."""
    if top_p >= 1:
        return probs
    order = np.argsort(-probs, kind="stable")
    count = int(np.searchsorted(np.cumsum(probs[order]), top_p)) + 1
    kept = np.zeros_like(probs)
    kept[order[:count]] = probs[order[:count]]
    return np.asarray(kept / kept.sum())
