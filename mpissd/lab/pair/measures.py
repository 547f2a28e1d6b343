"""Acceptance by position in a round, and ranks of bonus tokens.

Intervals are of 95%, from 200 resamples of whole sequences: rounds of one text are no independent
draws.

miss(F) = floor + A·F^−r [Kumar, Dao, May 2026, definition 11, with A and a floor]. The floor is the
measured share of tokens that the draft does not know, and (A, r) are the maximum-likelihood fit to
the others, whose ranks are known up to the candidates kept (mpissd/engine/spec/fit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.theory import power_law_miss
from mpissd.engine.spec.acceptance import hazards_of_counts
from mpissd.engine.spec.fit import most_likely
from mpissd.lab.pair.outcomes import NO_LOOKUP, Array, Outcomes

Floats = NDArray[np.float64]
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # fan-outs at which misses are listed
RESAMPLES = 200
_FAILS = 0.1  # relative error of the fitted miss rate beyond which the fit counts as failed


@dataclass(frozen=True)
class RankTable:
    """Counts of outcomes by sequence: [S, F + 2]; columns: rank 1 … F, beyond, outside.

    Whole sequences are resampled, since outcomes of one text resemble each other.
    """

    counts: Array
    knows_vocabulary: bool

    @classmethod
    def of(cls, sequence: Array, rank: Array, limit: int, knows_vocabulary: bool) -> RankTable:
        """Counts ranks [n] of these sequences [n]; those without a lookup are left out."""
        used = rank != NO_LOOKUP
        column = np.where(rank > 0, rank - 1, limit - rank)  # BEYOND: limit, OUTSIDE: limit + 1
        counts = np.zeros((int(sequence.max(initial=-1)) + 1, limit + 2), np.int64)
        np.add.at(counts, (sequence[used], column[used]), 1)
        return cls(counts, knows_vocabulary)

    def joined(self, other: RankTable) -> RankTable:
        """Returns the table of both; of the narrower one's width."""
        width = min(self.counts.shape[1], other.counts.shape[1]) - 2
        parts = [_narrowed(table.counts, width) for table in (self, other)]
        return RankTable(np.concatenate(parts), self.knows_vocabulary and other.knows_vocabulary)

    def to_dict(self, rng: np.random.Generator) -> dict[str, Any]:
        """Returns the JSON form: counts, the miss rate by fan-out, and the fit; with intervals."""
        total = self.counts.sum(axis=0)
        found: dict[str, Any] = {
            "outcomes": int(total.sum()),
            "ranks": total[:-2].tolist(),
            "beyond": int(total[-2]),
            "outside": int(total[-1]) if self.knows_vocabulary else None,
            "misses": {},
            "fit": None,
        }
        if not total.any():
            return found
        fit, again = fitted(total), [total_of(self.counts, rng) for _ in range(RESAMPLES)]
        found["misses"] = _misses(total, again, fit)
        if fit is None:
            return found
        fits = [one for counts in again if (one := fitted(counts)) is not None]
        columns = zip(("A_95", "r_95", "floor_95"), np.array(fits).T, strict=True)
        intervals = {name: interval(column) for name, column in columns}
        fails = [int(f) for f, miss in found["misses"].items() if miss["fails"]]
        found["fit"] = {"A": fit[0], "r": fit[1], "floor": fit[2], **intervals, "fails_at": fails}
        return found


def _narrowed(counts: Array, width: int) -> Array:
    more = counts[:, width:-1].sum(axis=1, keepdims=True)
    return np.concatenate([counts[:, :width], more, counts[:, -1:]], axis=1)


def total_of(counts: Array, rng: np.random.Generator) -> Array:
    """Returns the column sums of as many rows, drawn with replacement."""
    return np.asarray(counts[rng.integers(0, len(counts), len(counts))].sum(axis=0), np.int64)


def fitted(total: Array) -> tuple[float, float, float] | None:
    """Returns (A, r, floor) of counts [F + 2], or None if they do not determine a fit."""
    limit, outcomes = len(total) - 2, int(total.sum())
    inside = total[:-1]
    ranks = np.repeat([*range(1, limit + 1), 0], inside)
    law = most_likely(ranks, np.full(len(ranks), limit))
    if law is None:
        return None
    floor = float(total[-1]) / outcomes
    return (1.0 - floor) * law[0], law[1], floor


def _misses(
    total: Array, again: Sequence[Array], fit: tuple[float, float, float] | None
) -> dict[str, dict[str, Any]]:
    """Returns {F: measured miss rate, its interval, the fitted one, whether the fit fails}."""
    rows = {}
    for width in (f for f in WIDTHS if f <= len(total) - 2):
        miss = _miss(total, width)
        low, high = interval([_miss(counts, width) for counts in again if counts.any()])
        law = None if fit is None else power_law_miss(width, *fit)
        off = law is not None and abs(law - miss) > _FAILS * miss
        fails = law is not None and off and not low <= law <= high
        rows[str(width)] = {"miss": miss, "miss_95": [low, high], "law": law, "fails": fails}
    return rows


def _miss(total: Array, width: int) -> float:
    return float(total[width:].sum() / total.sum())


def interval(values: Sequence[float] | Floats) -> list[float]:
    """Returns the 2.5% and 97.5% quantiles."""
    low, high = np.percentile(np.asarray(values, np.float64), [2.5, 97.5])
    return [float(low), float(high)]


def accepted_table(outcomes: Sequence[Outcomes]) -> Array:
    """Counts k by sequence of all sources, [S, K + 1]."""
    parts = []
    for of in outcomes:
        counts = np.zeros((int(of.sequence.max(initial=-1)) + 1, of.lookahead + 1), np.int64)
        np.add.at(counts, (of.sequence, of.accepted), 1)
        parts.append(counts)
    return np.concatenate(parts)


def acceptance(table: Array, rng: np.random.Generator) -> dict[str, Any]:
    """Returns counts of k, tokens a round, and acceptance by position: marginal, conditional."""
    total, again = table.sum(axis=0), [total_of(table, rng) for _ in range(RESAMPLES)]
    marginal, hazards = _marginal(total), _hazards(total)
    lines = np.array([[_tokens(t), _alpha(t), *_marginal(t), *_hazards(t)] for t in again])
    bounds = [interval(column) for column in lines.T]
    width = len(marginal)
    return {
        "rounds": int(total.sum()),
        "accepted": total.tolist(),
        "tokens_a_round": _tokens(total),
        "tokens_a_round_95": bounds[0],
        "alpha": _alpha(total),
        "alpha_95": bounds[1],
        "marginal": marginal,
        "marginal_95": bounds[2 : 2 + width],
        "conditional": hazards,
        "conditional_95": bounds[2 + width :],
    }


def _tokens(total: Array) -> float:
    return float(1 + (total * np.arange(len(total))).sum() / total.sum())


def _alpha(total: Array) -> float:
    """Returns accepted / (accepted + rejected): the mean acceptance rate of the judged tokens."""
    accepted = float((total * np.arange(len(total))).sum())
    judged = accepted + float(total[:-1].sum())
    return accepted / judged if judged else 0.0


def _hazards(total: Array) -> list[float]:
    return list(hazards_of_counts(total.tolist(), len(total) - 1))


def _marginal(total: Array) -> list[float]:
    reached = total[::-1].cumsum()[::-1] / total.sum()
    return [float(share) for share in reached[1:]]


def rank_tables(of: Outcomes) -> tuple[RankTable, RankTable] | None:
    """Returns the ranks after a rejection and after K accepted tokens; None if not kept."""
    if of.rank is None:
        return None if of.counted is None else _counted(of)
    end = of.accepted == of.lookahead
    count = int(of.sequence.max(initial=-1)) + 1
    both = []
    for chosen in (~end, end):
        rank = np.where(chosen, of.rank, NO_LOOKUP)
        table = RankTable.of(of.sequence, rank, of.limit, of.knows_vocabulary)
        assert len(table.counts) == count, (len(table.counts), count)
        both.append(table)
    return both[0], both[1]


def _counted(of: Outcomes) -> tuple[RankTable, RankTable] | None:
    """Returns the tables of a row, one outcome a sequence; None if its lists are of several F."""
    tables = []
    for counts in of.counted or ():
        if len(np.unique(counts[:, 0])) != 1:
            return None
        rank = np.repeat(counts[:, 1], counts[:, 2])
        tables.append(RankTable.of(np.arange(len(rank)), rank, int(counts[0, 0]), False))
    return (tables[0], tables[1]) if len(tables) == 2 else None
