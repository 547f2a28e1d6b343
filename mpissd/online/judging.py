"""Judges weights by positions at which their best token is the target's; needs no PyTorch.

One rule says whether a version is published, and one formula what share of a gap was closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ERRORS = 2.0  # standard errors by which a version must be ahead (docs/online.md: two rules)
Counted = NDArray[np.float64]
Points = Sequence[Mapping[str, Any]]


def counted(judged: Sequence[Sequence[tuple[int, float]]]) -> Counted:
    """Returns (right, all) positions of each sequence that `Student.judge` judged, [n, 2]."""
    return np.array([[sum(rank == 0 for rank, _ in one), len(one)] for one in judged], float)


def paired(mine: Counted, other: Counted) -> tuple[float, float]:
    """Returns the difference of two shares, and its standard error over the rows, two or more.

    mine, other: (counted, all) of the same rows, [n, 2]; the error is that of a ratio's estimate
    with n − 1 degrees of freedom.
    """
    total, n = other[:, 1].sum(), len(other)
    gains = mine[:, 0] - other[:, 0]
    gain = gains.sum() / total
    squares = ((gains - gain * other[:, 1]) ** 2).sum() * n / (n - 1)
    return float(gain), float(np.sqrt(squares) / total)


def is_ahead(gain: float, error: float) -> bool:
    """Returns whether a version that gained so much, with this standard error, is published."""
    return gain > ERRORS * error


def gap_of(points: Points, key: str = "agreement") -> tuple[float, float] | None:
    """Returns (static, the best offline) of one stage's points; None where there is no gap."""
    values = {
        schedule: [point[key] for point in points if point["schedule"] == schedule]
        for schedule in ("static", "offline")
    }
    if not values["static"] or not values["offline"]:
        return None
    static, best = values["static"][-1], max(values["offline"])
    return (static, best) if best > static else None


def share_of(value: float, gap: tuple[float, float]) -> float:
    """Returns what share of a gap is closed at a value."""
    return (value - gap[0]) / (gap[1] - gap[0])


def gaps_closed(points: Points, key: str = "agreement") -> dict[str, float | None]:
    """Returns, by stage, the share of its gap that online's last point closed; None without a gap.

    A stage that has not all three schedules is left out.
    """
    found: dict[str, float | None] = {}
    for stage in dict.fromkeys(point["stage"] for point in points):
        own = [point for point in points if point["stage"] == stage]
        if {"static", "online", "offline"} <= {point["schedule"] for point in own}:
            (last,) = [point[key] for point in own if point["schedule"] == "online"][-1:]
            gap = gap_of(own, key)
            found[stage] = None if gap is None else round(share_of(last, gap), 3)
    return found
