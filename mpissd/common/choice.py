"""Decides whether predictions or measurements choose among configurations.

A predicted mean contains no measured round, so that luck does not choose the configurations to
compare (docs/definitions.md). Predictions that miss the rows by far choose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

MOST_MISSED = 0.2  # median error of replays beyond which predictions choose no K


def missed(errors: Iterable[float | None]) -> float:
    """Returns the median size of the replays' errors, as a share; 0 if none is known.

    A replay knows the row's own draws, so that luck is no part of its error.
    """
    known = [abs(error) for error in errors if error is not None and not math.isnan(error)]
    return median(known) if known else 0.0


def are_predicted(means: Iterable[float | None], errors: Iterable[float | None]) -> bool:
    """Returns whether predicted means can choose: none is missing, and their replays hold."""
    are_known = all(mean and not math.isnan(mean) for mean in means)
    return are_known and missed(errors) <= MOST_MISSED
