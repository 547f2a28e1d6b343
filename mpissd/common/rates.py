"""How fast one run was, and how sure that is: from its rounds, or from its row alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rows import Row

NUM_BLOCKS = 20  # a run is cut into, if there are …
_PER_BLOCK = 5  # … so many rounds for each
FEWEST_ROUNDS = 4 * _PER_BLOCK
NORMAL_Z = 1.959964  # 97.5% of a standard normal
_SPREADS = (("p90", 1.281552), ("p99", 2.326348))  # and where a standard normal has them

Samples = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Rounds:
    """The measured rounds of a run, [n]: seconds, and tokens of all sequences."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path, row: Row) -> Rounds:
        """From rounds/RUN_ID.npz. ConfigError: no such arrays, or other rounds than the row's."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                seconds = np.asarray(arrays["round_s"], np.float64)
                sequences = np.asarray(arrays["sequences"], np.int64)
                tokens = _tokens(sequences, len(seconds), row.get("token_limit"))
        except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path}: no rounds of a run: {error}") from error
        if len(seconds) != row.get("num_rounds"):
            told = f"{len(seconds)} rounds, the row has {row.get('num_rounds')}"
            raise ConfigError(f"{path}: {told}")
        return cls(seconds, tokens)


def _tokens(
    sequences: NDArray[np.int64], num_rounds: int, limit: int | None
) -> NDArray[np.float64]:
    """Tokens of each round; what a sequence emits past `limit` does not count."""
    made = np.zeros(num_rounds)
    for request_id in np.unique(sequences[:, 1]):
        own = sequences[sequences[:, 1] == request_id]
        total = np.cumsum(own[:, 3] + 1)
        counted = total if limit is None else np.minimum(total, limit)
        np.add.at(made, own[:, 0], np.diff(counted, prepend=0))
    return made


@dataclass(frozen=True)
class Rate:
    """Tokens a second, the variance of its logarithm, and the degrees of freedom of that."""

    value: float
    variance: float
    freedom: int
    from_rounds: bool = True

    @classmethod
    def of_rounds(cls, seconds: Samples, tokens: Samples | None = None) -> Rate:
        """Of seconds a round, and tokens a round (None: all rounds alike).

        Neighbouring rounds have much in common (a clock, a hot device), so the run is cut into
        blocks; the variance is that of a ratio of block sums. ConfigError with fewer than 20
        rounds, or with a round that takes no time.
        """
        took = np.asarray(seconds, np.float64)
        made = np.ones_like(took) if tokens is None else np.asarray(tokens, np.float64)
        if len(took) < FEWEST_ROUNDS or len(made) != len(took):
            counts = f"{len(took)} rounds ({len(made)} with tokens)"
            raise ConfigError(f"{counts}: allowed: {FEWEST_ROUNDS} or more")
        if not (took > 0).all() or not made.sum() > 0:
            told = f"a round of {took.min():g} s, {made.sum():g} tokens"
            raise ConfigError(f"{told}: allowed: above 0")
        blocks = num_blocks(len(took))
        time, done = (
            np.array([part.sum() for part in np.array_split(of, blocks)]) for of in (took, made)
        )
        return cls(float(done.sum() / time.sum()), ratio_variance(done, time), blocks - 1)

    @classmethod
    def of_row(cls, row: Row) -> Rate:
        """Of a result row alone: the luck of its draws and the spread of its rounds, added up.

        Draws: sampling_sd, which the predictor has from the job's laws; without it the standard
        error of accept_histogram's mean. Rounds: (p90 − p50)/1.28 or (p99 − p50)/2.33, whichever is
        more, over √n: what neighbouring rounds have in common is not seen. ConfigError where a row
        lacks them, or has fewer than 20 rounds.
        """
        try:
            count, rate = int(row["num_rounds"]), float(row["tok_per_s"])
            clock = clock_error(row["round_us"], count)
            luck = row.get("sampling_sd")
            is_told = luck is not None and not math.isnan(luck)  # NaN: null, in a table
            draws = float(luck or 0.0) if is_told else length_error(row["accept_histogram"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"row {row.get('run_id')!r}: no interval: {error!r}") from error
        if count < FEWEST_ROUNDS or not 0 < rate < math.inf:
            told = f"row {row.get('run_id')!r}: {count} rounds, {rate:g} tok/s"
            raise ConfigError(f"{told}: allowed: {FEWEST_ROUNDS} or more, above 0")
        return cls(rate, draws**2 + clock**2, count - 1, from_rounds=False)

    @classmethod
    def of_repeats(cls, rates: Sequence[Rate]) -> Rate:
        """The median of several, as sure as the least sure of them, since seeds may be equal."""
        return cls(
            value=statistics.median(rate.value for rate in rates),
            variance=max(rate.variance for rate in rates),
            freedom=min(rate.freedom for rate in rates),
            from_rounds=all(rate.from_rounds for rate in rates),
        )


def num_blocks(num_rounds: int) -> int:
    """How many blocks a run of so many rounds is cut into."""
    return min(NUM_BLOCKS, num_rounds // _PER_BLOCK)


def ratio_variance(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """The variance of log(Σ above / Σ below) over blocks [n], by the delta method."""
    left = above / above.mean() - below / below.mean()
    return float(left @ left) / (len(left) * (len(left) - 1))


def clock_error(round_us: Mapping[str, float], count: int) -> float:
    """Relative standard error of the mean round, from its percentiles."""
    spread = max(0.0, *((round_us[name] - round_us["p50"]) / z for name, z in _SPREADS))
    mean = float(round_us["mean"])
    return spread / (mean * math.sqrt(count)) if mean > 0 else 0.0


def length_error(histogram: Sequence[int]) -> float:
    """Of the mean acceptance length of n rounds: standard deviation / (mean·√n)."""
    counts = np.asarray(histogram, np.float64)
    lengths = np.arange(len(counts)) + 1.0
    total = float(counts.sum())
    if not total > 0:
        raise ValueError("accept_histogram is empty")
    mean = float(lengths @ counts) / total
    variance = float((lengths - mean) ** 2 @ counts) / total
    return math.sqrt(variance / total) / mean


def student_t(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t. SciPy is imported here: a run does not need it."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, 0.975))


def rate_of(row: Mapping[str, Any], rounds: Rounds | None) -> Rate:
    """The row's tok_per_s and how sure it is: by its rounds, or where they were not kept by what
    the row says of them. ConfigError: fewer than 20 rounds, or a row that lacks what `run` writes.
    """
    told = Rate.of_row(row)
    if rounds is None:
        return told
    found = Rate.of_rounds(rounds.seconds, rounds.tokens)
    return Rate(told.value, found.variance, found.freedom)
