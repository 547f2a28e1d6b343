"""What was measured, round by round, and the digests that say two runs emitted the same."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.rounds import Ints, Outcome, Speculation
from mpissd.tape import SPILL_ROUNDS, Tape

SCHEMA = 1


class RoundRecords:
    """Raw rows of the measured rounds; the batch may shrink, so rows are (round, sequence)."""

    def __init__(self, lookahead: int, stop_token: int | None = None) -> None:
        self.lookahead, self.stop_token = lookahead, stop_token
        self.round_s = Tape("d")  # wall, appended by who owns the clock
        self.t_target_s = Tape("d")
        self._new_outcomes: list[Any] = []  # Ints of the newest rounds, as they came
        self._new_speculations: list[Any] = []
        self._counts, self._outcomes, self._speculations = Tape("i"), Tape("i"), Tape("i")
        self._width = Speculation.HEAD  # of a row of _speculations
        self._times = self.round_s, self.t_target_s

    def add(self, t_target_s: float, speculation: Speculation, outcome: Outcome) -> None:
        """One round; keeps the arrays as they are, and packs those of some hundred at once."""
        self.t_target_s.tail.append(t_target_s)
        self._new_speculations.append(speculation.rows)
        self._new_outcomes.append(outcome.rows)
        if len(self._new_outcomes) == SPILL_ROUNDS:
            self._pack()
            for tape in (*self._times, self._counts, self._outcomes, self._speculations):
                tape.spill()

    def _pack(self) -> None:
        """Moves the newest rounds to the tapes."""
        outcomes, speculations = self._new_outcomes, self._new_speculations
        if not outcomes:
            return
        counts = [len(rows) for rows in speculations]
        if counts != [len(rows) for rows in outcomes]:
            outcomes = [rows[:count] for rows, count in zip(outcomes, counts, strict=True)]
        self._width = speculations[0].shape[1]
        drafted = b"".join(speculations)
        assert len(drafted) == 4 * self._width * sum(counts), "rows of several widths"
        self._counts.extend(np.array(counts, np.int32).tobytes())
        self._outcomes.extend(b"".join(outcomes))
        self._speculations.extend(drafted)
        self._new_outcomes, self._new_speculations = [], []

    def __len__(self) -> int:
        return len(self.t_target_s)

    def _read(self) -> tuple[Ints, Ints, Ints]:
        """(round of each row, outcome rows, speculation rows)."""
        self._pack()
        rounds = np.repeat(np.arange(len(self), dtype=np.int32), self._counts.read())
        outcomes = self._outcomes.read().reshape(-1, Outcome.WIDTH)
        return rounds, outcomes, self._speculations.read().reshape(-1, self._width)

    def sequences(self) -> NDArray[np.int64]:
        """[n, 8]: round, id, epoch, num_accepted, bonus, source, hit, num_draft."""
        rounds, outcomes, speculations = self._read()
        columns = [rounds, *outcomes[:, [0, 1, 3, 4]].T, *speculations[:, : Speculation.HEAD].T]
        return np.column_stack(columns).astype(np.int64)

    def num_rows(self) -> NDArray[np.int64]:
        """Rows of each round's target forward, Σ(num_draft + 1)."""
        rounds, _, speculations = self._read()
        rows = np.bincount(rounds, weights=speculations[:, 2] + 1.0, minlength=len(self))
        return rows.astype(np.int64)

    def tokens(self) -> dict[int, list[int]]:
        """Emitted tokens by request id, in order: the accepted drafts, then the bonus.

        A sequence ends with its stop token; what came behind it in the same round is dropped.
        """
        return {request_id: found.tolist() for request_id, found in self.token_arrays().items()}

    def token_arrays(self) -> dict[int, Ints]:
        """The same, as arrays."""
        _, outcomes, speculations = self._read()
        accepted = outcomes[:, 3]
        table = np.column_stack(
            [speculations[:, Speculation.HEAD :][:, : self.lookahead], outcomes[:, 4]]
        )
        table[np.arange(len(table)), accepted] = outcomes[:, 4]
        order = np.argsort(outcomes[:, 0], kind="stable")
        is_emitted = np.arange(table.shape[1]) <= accepted[:, None]
        emitted = table[order][is_emitted[order]]
        ids, first = np.unique(outcomes[order, 0], return_index=True)
        ends = np.cumsum(accepted[order] + 1)[first[1:] - 1]
        parts = np.split(emitted, ends) if len(ids) else []
        return {
            request_id: self._up_to_the_stop(part)
            for request_id, part in zip(ids.tolist(), parts, strict=True)
        }

    def _up_to_the_stop(self, emitted: Ints) -> Ints:
        if self.stop_token is None:
            return emitted
        found = np.flatnonzero(emitted == self.stop_token)
        return emitted[: found[0] + 1] if len(found) else emitted


def outcome_digest(sequences: NDArray[np.int64]) -> str:
    """SHA-256 (first 16 hex) of (round, id, k, t*) in order: equal decisions, equal digest."""
    decided = np.ascontiguousarray(sequences[:, [0, 1, 3, 4]])
    return hashlib.sha256(decided.tobytes()).hexdigest()[:16]


def token_digest(tokens: Mapping[int, Sequence[int] | Ints], count: int) -> str:
    """SHA-256 (first 16 hex) of the first `count` tokens of every sequence."""
    state = hashlib.sha256()
    for request_id in sorted(tokens):
        first = np.asarray(tokens[request_id][:count], np.int64)
        state.update(np.int64(request_id).tobytes() + first.tobytes())
    return state.hexdigest()[:16]


def percentiles_us(seconds: Sequence[float] | NDArray[Any]) -> dict[str, float | int | None]:
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


def is_stable(seconds: Sequence[float] | Tape, tolerance: float, blocks: int = 5) -> bool | None:
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
