"""The throughput of a run with its uncertainty, from its rounds or only from its row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row

NUM_BLOCKS = 20  # the most blocks into which a run is cut
_PER_BLOCK = 5  # the fewest rounds in a block
FEWEST_ROUNDS = 4 * _PER_BLOCK
NORMAL_Z = 1.959964  # The 97.5% quantile of a standard normal.
# Percentiles, and their standard normal quantiles.
_SPREADS = (("p90", 1.281552), ("p99", 2.326348))
_T = {1: 12.706205, 2: 4.302653, 3: 3.182446, 4: 2.776445, 5: 2.570582}

Samples = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class Rounds:
    """The measured rounds of a run, [n]: their seconds, and the tokens of all sequences in each."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path, row: Row) -> Rounds:
        """Reads rounds/RUN_ID.npz.

        Raises ConfigError if its arrays are missing, or if their number of rounds differs from the
        row's.
        """
        try:
            with np.load(path, allow_pickle=False) as arrays:
                seconds = np.asarray(arrays["round_s"], np.float64)
                sequences = np.asarray(arrays["sequences"], np.int64)
                tokens = _tokens(sequences, len(seconds), row.token_limit)
        except (OSError, ValueError, KeyError, IndexError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path}: no rounds of a run: {error}") from error
        if len(seconds) != row.num_rounds:
            counts = f"{len(seconds)} rounds, the row has {row.get('num_rounds')}"
            raise ConfigError(f"{path}: {counts}")
        return cls(seconds, tokens)


def _tokens(
    sequences: NDArray[np.int64], num_rounds: int, limit: int | None
) -> NDArray[np.float64]:
    """Returns the tokens of each round; tokens that a sequence emits beyond `limit` do not
    count."""
    made = np.zeros(num_rounds)
    for request_id in np.unique(sequences[:, 1]):
        own = sequences[sequences[:, 1] == request_id]
        total = np.cumsum(own[:, 3] + 1)
        counted = total if limit is None else np.minimum(total, limit)
        np.add.at(made, own[:, 0], np.diff(counted, prepend=0))
    return made


@dataclass(frozen=True)
class Rate:
    """Tokens a second, the variance of its logarithm, and that variance's degrees of freedom."""

    value: float
    variance: float
    freedom: int
    from_rounds: bool = True

    @classmethod
    def of_rounds(cls, seconds: Samples, tokens: Samples | None = None) -> Rate:
        """Computes a rate from the seconds of each round, and its tokens (None: all rounds alike).

        Neighbouring rounds are correlated (a clock, a hot device), so the run is cut into blocks;
        the variance is computed for a ratio of block sums. Raises ConfigError with fewer than 20
        rounds, or if a round takes no time.
        """
        took = np.asarray(seconds, np.float64)
        made = np.ones_like(took) if tokens is None else np.asarray(tokens, np.float64)
        if len(took) < FEWEST_ROUNDS or len(made) != len(took):
            counts = f"{len(took)} rounds ({len(made)} with tokens)"
            raise ConfigError(f"{counts}: allowed: {FEWEST_ROUNDS} or more")
        if not (took > 0).all() or not made.sum() > 0:
            values = f"a round of {took.min():g} s, {made.sum():g} tokens"
            raise ConfigError(f"{values}: allowed: above 0")
        blocks = num_blocks(len(took))
        time, done = (
            np.array([part.sum() for part in np.array_split(of, blocks)]) for of in (took, made)
        )
        return cls(float(done.sum() / time.sum()), ratio_variance(done, time), blocks - 1)

    @classmethod
    def of_row(cls, row: Row) -> Rate:
        """Estimates a rate from a result row, adding the variances of its draws and its rounds.

        Draws: sampling_sd, which the predictor computes from the job's token models, or the
        standard error of accept_histogram's mean. Rounds: (p90 − p50)/1.28 or (p99 − p50)/2.33,
        whichever is larger, over √n; correlation between neighbouring rounds is not included.
        Raises ConfigError if a row lacks these, or has fewer than 20 rounds.
        """
        try:
            count, rate = int(row.num_rounds), float(row.tok_per_s)
            times, luck = row.round_us, row.sampling_sd
            spread = max(0.0, *((times[name] - times["p50"]) / z for name, z in _SPREADS))
            mean = float(times["mean"])
            clock = spread / (mean * math.sqrt(count)) if mean > 0 else 0.0
            if luck is None or math.isnan(luck):  # In a table NaN means null.
                counts = np.asarray(row.accept_histogram, np.float64)
                lengths, total = np.arange(len(counts)) + 1.0, float(counts.sum())
                if not total > 0:
                    raise ValueError("accept_histogram is empty")
                length = float(lengths @ counts) / total
                variance = float((lengths - length) ** 2 @ counts) / total
                luck = math.sqrt(variance / total) / length
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"row {row.get('run_id')!r}: no interval: {error!r}") from error
        if count < FEWEST_ROUNDS or not 0 < rate < math.inf:
            values = f"row {row.get('run_id')!r}: {count} rounds, {rate:g} tok/s"
            raise ConfigError(f"{values}: allowed: {FEWEST_ROUNDS} or more, above 0")
        return cls(rate, luck**2 + clock**2, count - 1, from_rounds=False)

    @classmethod
    def of_repeats(cls, rates: Sequence[Rate]) -> Rate:
        """Returns the median of several rates with their largest variance.

        The variance is not divided by their number, because equal seeds are not independent.
        """
        return cls(
            value=statistics.median(rate.value for rate in rates),
            variance=max(rate.variance for rate in rates),
            freedom=min(rate.freedom for rate in rates),
            from_rounds=all(rate.from_rounds for rate in rates),
        )


def num_blocks(num_rounds: int) -> int:
    """Returns the number of blocks into which a run with this number of rounds is cut."""
    return min(NUM_BLOCKS, num_rounds // _PER_BLOCK)


def ratio_variance(above: NDArray[np.float64], below: NDArray[np.float64]) -> float:
    """Returns the variance of log(Σ above / Σ below) over blocks [n], by the delta method."""
    left = above / above.mean() - below / below.mean()
    return float(left @ left) / (len(left) * (len(left) - 1))


def student_t(freedom: int) -> float:
    """Returns the 97.5% quantile of Student's t.

    Up to 5 degrees of freedom it is read from a table; above, Cornish and Fisher's expansion is
    at most .055% low.
    """
    if freedom in _T:
        return _T[freedom]
    z, v = NORMAL_Z, float(freedom)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / v + second / v**2 + third / v**3


def student_p(t: float, freedom: int) -> float:
    """Returns Student's P(|T| >= |t|), the two-sided p-value (Abramowitz, Stegun, 26.7.3-4)."""
    angle = math.atan2(abs(t), math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, inside = (cosine if odd else 1.0), 0.0
    for n in range(1 + odd, freedom, 2):
        inside += term
        term *= cosine**2 * n / (n + 1)
    inside *= sine
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


def rate_of(row: Row, rounds: Rounds | None) -> Rate:
    """Returns the row's tok_per_s with the variance of its rounds, or of the row if none were kept.

    Raises ConfigError with fewer than 20 rounds, or if the row lacks values that `run` writes.
    """
    of_row = Rate.of_row(row)
    if rounds is None:
        return of_row
    of_rounds = Rate.of_rounds(rounds.seconds, rounds.tokens)
    return Rate(of_row.value, of_rounds.variance, of_rounds.freedom)
