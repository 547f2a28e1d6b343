"""Figures of a draft from its ranks: agreement, tokens a round, cache hits by fan-out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

FAN_OUTS = (1, 2, 4, 8, 16)
LOOKAHEADS = (4, 7)


@dataclass
class Judged:
    """Ranks and overlaps of each answer: one array a sequence.

    ranks: how many tokens the draft finds likelier than the true one; the size of the whole
    vocabulary for one that it cannot name. overlaps: sum of min(p, q) at temperature 1. surprises:
    −log q of each true token that the draft can name, in nats.
    """

    ranks: list[list[int]] = field(default_factory=list)
    overlaps: list[float] = field(default_factory=list)
    surprises: list[float] = field(default_factory=list)


def summary(judged: Judged) -> dict[str, Any]:
    """Returns the draft's figures: agreement, alpha, tokens a round, hits and misses."""
    ranks = [rank for answer in judged.ranks for rank in answer]
    by_lookahead = {str(k): _rounds(judged.ranks, k) for k in LOOKAHEADS}
    return {
        "answers": len(judged.ranks),
        "tokens": len(ranks),
        "greedy_agreement": _mean(rank == 0 for rank in ranks),
        "alpha": _mean(judged.overlaps),
        "cross_entropy": _mean(judged.surprises),
        "by_lookahead": by_lookahead,
    }


def _rounds(answers: Sequence[Sequence[int]], lookahead: int) -> dict[str, Any]:
    """Returns tokens a round and hit rates of rounds that serve `lookahead` tokens."""
    found = [outcome for ranks in answers for outcome in rounds_of(ranks, lookahead)]
    ended = [outcome for outcome in found if outcome[1] is not None]
    behind = {
        "rejection": [rank - 1 for k, rank in ended if k < lookahead and rank is not None],
        "all_accepted": [rank for k, rank in ended if k == lookahead and rank is not None],
    }
    told: dict[str, Any] = {"tokens_per_round": _mean(k + (r is not None) for k, r in found)}
    both = [rank for ranks in behind.values() for rank in ranks]
    told["hits"] = {str(f): _mean(rank < f for rank in both) for f in FAN_OUTS}
    for name, ranks in behind.items():
        told[f"misses_{name}"] = {str(f): _mean(rank >= f for rank in ranks) for f in FAN_OUTS}
    return told


def rounds_of(ranks: Sequence[int], lookahead: int) -> Iterator[tuple[int, int | None]]:
    """Yields (accepted tokens, rank of the target's own token) of each round of an answer.

    The rank is None where the answer ends with an accepted token. Behind a rejection it counts the
    proposed token too, which is no key: subtract 1.
    """
    at = 0
    while at < len(ranks):
        accepted = 0
        while accepted < lookahead and at + accepted < len(ranks) and not ranks[at + accepted]:
            accepted += 1
        at += accepted
        yield accepted, ranks[at] if at < len(ranks) else None
        at += 1


def _mean(values: Any) -> float | None:
    told = [float(value) for value in values]
    return round(sum(told) / len(told), 4) if told else None
