"""The stationary law of a chain of rounds, for many cells at once.

A cell is a chain over the states m = 0..D−1. From m, n of b sequences hit with P(n | m) =
Binomial(b, h_m), and (m, n) leads to the state next[m, n]. The unknowns are P(m) and h_m, the mean
hit probability of the rounds that led to m.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_TOLERANCE = 1e-6
_MOST_ITERATIONS = 100
# Iterations that follow the chain round by round; later ones jump to its long run.
_SINGLE_ROUNDS = 15
_DOUBLINGS = 24  # log2 of the rounds in a long run.
_ALL_COUNTS = 64  # Up to this batch size, hit_counts returns every n.


@dataclass(frozen=True)
class State:
    """The stationary law: P(m), [G, D], and P(m, n), [G, D, N]."""

    weight: Floats
    joint: Floats


@lru_cache(maxsize=16)
def hit_counts(batch: int) -> Ints:
    """Returns the values of n that are used, [N], including 0 and b: all of them up to b = 64.

    Above, they are one standard deviation √(n(b−n)/b) apart, which is enough to sum a bell curve
    (its mean is off by less than 0.1% of b).
    """
    if batch <= _ALL_COUNTS:
        return np.arange(batch + 1)
    below = [0]
    while (n := below[-1]) < batch / 2:
        below.append(n + max(1, int(math.sqrt(n * (batch - n) / batch))))
    half = {*(n for n in below if n <= batch // 2), batch // 2}
    return np.array(sorted(half | {batch - n for n in half}))


def stationary(batch: int, chance: Floats, steps: Ints) -> State:
    """Iterates P(m) and h_m from the last state until they converge, cell by cell.

    batch: sequences that may hit. chance: the mean hit probability after (m, n). steps: the next
    state; both [G, D, N] over hit_counts(batch). A chain that alternates between a long and a short
    verification, or leaves one of them once in a thousand rounds, would not converge this way:
    after some rounds P(m) jumps to the long run under the last h_m.
    """
    cells, depth = chance.shape[:2]
    weight, hit = np.zeros((cells, depth)), np.zeros((cells, depth))
    weight[:, -1] = 1.0
    left = np.arange(cells)  # Cells that have not converged.
    for number in range(_MOST_ITERATIONS):
        ways, leads = binomial(batch, hit[left]), steps[left]
        before = weight[left]
        now = before if number < _SINGLE_ROUNDS else long_run(before, ways, leads)
        joint = now[:, :, None] * ways
        reached, gained = onto(leads, joint), onto(leads, joint * chance[left])
        chances = gained / np.where(reached > 0, reached, 1.0)
        change = np.abs(reached - before) + np.abs(chances - hit[left]) * reached
        weight[left], hit[left] = reached, chances
        left = left[change.max(axis=1) > _TOLERANCE]
        if not len(left):
            break
    return State(weight, weight[:, :, None] * binomial(batch, hit))


def long_run(weight: Floats, ways: Floats, steps: Ints) -> Floats:
    """Returns P(m) after 2^24 rounds of a chain that stays put with probability 1/2 each round, [G,
    D].

    ways: P(n | m), [G, D, N]. Staying put leaves the stationary law unchanged and damps
    oscillation.
    """
    cells, depth = weight.shape
    pairs = steps + depth * np.arange(cells * depth).reshape(cells, depth, 1)
    moves = np.bincount(pairs.ravel(), ways.ravel(), cells * depth**2)
    rounds = (moves.reshape(cells, depth, depth) + np.eye(depth)) / 2
    for _ in range(_DOUBLINGS):
        rounds = rounds @ rounds
        rounds /= rounds.sum(axis=2, keepdims=True)
    return np.asarray((weight[:, None] @ rounds)[:, 0], np.float64)


def onto(steps: Ints, parts: Floats) -> Floats:
    """Sums parts [G, D, N] by the state that they lead to, [G, D]."""
    cells, depth = parts.shape[:2]
    flat = steps + depth * np.arange(cells)[:, None, None]
    sums = np.bincount(flat.ravel(), parts.ravel(), cells * depth)
    return np.asarray(sums.reshape(cells, depth), np.float64)


def binomial(batch: int, chance: Floats) -> Floats:
    """Returns the binomial P(n of b hit) for n in hit_counts(b), along a new last axis; sum 1."""
    counts = hit_counts(batch)
    p = np.clip(chance, 1e-15, 1 - 1e-15)[..., None]
    missed = np.log1p(-p)
    shares = np.exp(_log_ways(batch) + batch * missed + counts * (np.log(p) - missed))
    if len(counts) <= batch:
        shares /= shares.sum(axis=-1, keepdims=True)
    return np.asarray(shares, np.float64)


@lru_cache(maxsize=16)
def _log_ways(batch: int) -> Floats:
    """Returns the log of C(b, n) times the number of counts that each value of n represents."""
    counts = hit_counts(batch)
    edges = np.concatenate([[-0.5], (counts[:-1] + counts[1:]) / 2, [batch + 0.5]])
    ways = [-math.lgamma(n + 1) - math.lgamma(batch - n + 1) for n in counts.tolist()]
    return math.lgamma(batch + 1) + np.array(ways) + np.log(np.diff(edges))
