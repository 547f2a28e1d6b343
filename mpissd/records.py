"""What was measured, round by round, and the digests that say two runs emitted the same."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.rounds import Ints, Outcome, Speculation

SCHEMA = 1


@dataclass
class RoundRecords:
    """Raw rows of the measured rounds; the batch may shrink, so rows are (round, sequence)."""

    lookahead: int
    stop_token: int | None = None
    round_s: list[float] = field(default_factory=list)  # wall, appended by who owns the clock
    t_target_s: list[float] = field(default_factory=list)
    _outcomes: list[Ints] = field(default_factory=list)
    _speculations: list[Ints] = field(default_factory=list)

    def add(
        self, t_target_s: float, speculation: Speculation, outcome: Outcome
    ) -> None:
        """One round; keeps the arrays as they are and reads them when the run is over."""
        self.t_target_s.append(t_target_s)
        self._speculations.append(speculation.rows)
        self._outcomes.append(outcome.rows)

    def __len__(self) -> int:
        return len(self._outcomes)

    def sequences(self) -> NDArray[np.int64]:
        """[n, 8]: round, id, epoch, num_accepted, bonus, source, hit, num_draft."""
        counts = [len(rows) for rows in self._speculations]
        rounds = np.repeat(np.arange(len(counts)), counts)
        outcomes = _stack([o[: len(s)] for o, s in self._pairs()], Outcome.WIDTH)
        heads = _stack([s[:, :3] for s in self._speculations], 3)
        columns = [rounds, outcomes[:, 0], outcomes[:, 1], outcomes[:, 3], outcomes[:, 4]]
        return np.column_stack([*columns, heads]).astype(np.int64)

    def _pairs(self) -> list[tuple[Ints, Ints]]:
        return list(zip(self._outcomes, self._speculations, strict=True))

    def num_rows(self) -> NDArray[np.int64]:
        """Rows of each round's target forward, Σ(num_draft + 1)."""
        return np.array([int(s[:, 2].sum()) + len(s) for s in self._speculations], np.int64)

    def tokens(self) -> dict[int, list[int]]:
        """Emitted tokens by request id, in order: the accepted drafts, then the bonus.

        A sequence ends with its stop token; what came behind it in the same round is dropped.
        """
        emitted: dict[int, list[int]] = {}
        for outcome, speculation in self._pairs():
            for row, drafts in zip(outcome.tolist(), speculation[:, 3:].tolist(), strict=False):
                emitted.setdefault(row[0], []).extend([*drafts[: row[3]], row[4]])
        if self.stop_token is not None:
            for tokens in emitted.values():
                if self.stop_token in tokens:
                    del tokens[tokens.index(self.stop_token) + 1 :]
        return emitted


def _stack(parts: Sequence[NDArray[Any]], width: int) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros((0, width), np.int32)


def outcome_digest(sequences: NDArray[np.int64]) -> str:
    """SHA-256 (first 16 hex) of (round, id, k, t*) in order: equal decisions, equal digest."""
    decided = np.ascontiguousarray(sequences[:, [0, 1, 3, 4]])
    return hashlib.sha256(decided.tobytes()).hexdigest()[:16]


def token_digest(tokens: dict[int, list[int]], count: int) -> str:
    """SHA-256 (first 16 hex) of the first `count` tokens of every sequence."""
    state = hashlib.sha256()
    for request_id in sorted(tokens):
        first = np.array([request_id, *tokens[request_id][:count]], np.int64)
        state.update(first.tobytes())
    return state.hexdigest()[:16]


def percentiles_us(seconds: Sequence[float]) -> dict[str, float | int | None]:
    """{mean, p50, p90, p99, n} in microseconds; None without samples."""
    if not len(seconds):
        return {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}
    us = np.asarray(seconds) * 1e6
    p50, p90, p99 = np.percentile(us, [50, 90, 99])
    return {
        "mean": round(float(us.mean()), 3),
        "p50": round(float(p50), 3),
        "p90": round(float(p90), 3),
        "p99": round(float(p99), 3),
        "n": len(us),
    }


def median(values: NDArray[Any] | Sequence[float]) -> float | None:
    """The median of the values that are numbers; None where there is none."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return float(np.median(array)) if len(array) else None


def is_stable(seconds: Sequence[float], tolerance: float, blocks: int = 5) -> bool | None:
    """Whether the median varies by at most `tolerance` (relative) over interleaved blocks.

    Rounds are dealt to the blocks in turn, each deal begins one block later: so every block has its
    share of a drift, of a burst and of every n-th round, and is a repeat of the run in little. What
    differs then is a median that another run would not give again: two levels that take turns by
    chance, or noise too wide for so few rounds. A drift leaves it stable; it widens the interval of
    compare.compare, whose blocks follow each other. None with fewer than 10 samples a block.
    """
    if len(seconds) < 10 * blocks:
        return None
    times, number = np.asarray(seconds, np.float64), np.arange(len(seconds))
    dealt = (number + number // blocks) % blocks
    medians = [float(np.median(times[dealt == block])) for block in range(blocks)]
    return max(medians) - min(medians) <= tolerance * float(np.median(medians))
