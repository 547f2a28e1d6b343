"""The raw results of measured rounds, digests of their tokens, and summary statistics."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints, Outcome, Source, Speculation

_PACKED_ROUNDS = 512  # how many rounds are converted to compact arrays at a time


class RoundRecords:
    """Stores the results of measured rounds. A row is one sequence in one round; rounds may differ
    in their number of rows, as sequences end."""

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead
        # {request id: number of its tokens, the stop included} of sequences that reached a stop.
        self.ends: dict[int, int] = {}
        # The two arrays hold, for each round, its wall time and the target's forward in s.
        self.round_s = array("d")
        self.t_target_s = array("d")
        self._versions = array("i")  # the version of the draft's weights, by round
        self._new_outcomes: list[Any] = []  # rows that are not packed into _outcomes yet
        self._new_speculations: list[Any] = []
        self._counts = array("i")
        self._outcomes = array("i")
        self._speculations = array("i")
        self._width = Speculation.HEAD  # number of columns of the table _speculations

    def add(self, t_target_s: float, speculation: Speculation, outcome: Outcome) -> None:
        """Adds a round. The arrays of `speculation` and `outcome` must not change afterwards, since
        they are copied only after 512 rounds. t_target_s: seconds of the target's forward."""
        self.t_target_s.append(t_target_s)
        self._versions.append(speculation.version)
        self._new_speculations.append(speculation.rows)
        self._new_outcomes.append(outcome.rows)
        if len(self._new_outcomes) == _PACKED_ROUNDS:
            self._pack()

    def _pack(self) -> None:
        """Copies the rows of the newest rounds into compact arrays."""
        speculations = self._new_speculations
        if not speculations:
            return
        self._width = speculations[0].shape[1]
        self._counts.extend(map(len, speculations))
        self._outcomes.frombytes(b"".join(self._new_outcomes))
        self._speculations.frombytes(b"".join(speculations))
        self._new_outcomes.clear()
        speculations.clear()

    @classmethod
    def joined(cls, parts: Sequence[RoundRecords]) -> RoundRecords:
        """Returns one object with the rounds of several target groups, one group after another."""
        joined = cls(parts[0].lookahead)
        for part in parts:
            part._pack()
            joined._width = max(joined._width, part._width)
            for name, values in vars(part).items():
                if isinstance(values, array):
                    getattr(joined, name).extend(values)
            joined.ends |= part.ends
        return joined

    def __len__(self) -> int:
        return len(self.t_target_s)

    def _read(self) -> tuple[Ints, Ints, Ints]:
        """Returns three arrays with a row for each sequence in each round: the round's index [n],
        Outcome.rows [n, 5] and Speculation.rows [n, width]."""
        self._pack()
        rounds = np.repeat(np.arange(len(self), dtype=np.int32), np.array(self._counts))
        outcomes = np.array(self._outcomes).reshape(-1, Outcome.WIDTH)
        return rounds, outcomes, np.array(self._speculations).reshape(-1, self._width)

    def sequences(self) -> NDArray[np.int64]:
        """Returns int64 [n, 8], a row for each sequence in each round, with the columns round, id,
        epoch, num_accepted, bonus, source, hit, num_draft."""
        rounds, outcomes, speculations = self._read()
        columns = [rounds, *outcomes[:, [0, 1, 3, 4]].T, *speculations[:, : Speculation.HEAD].T]
        return np.column_stack(columns).astype(np.int64)

    def by_version(self) -> list[tuple[int, int, int, int]]:
        """Returns a tuple (version, sequence rounds, drafted tokens, accepted tokens) for each
        version of the draft's weights."""
        rounds, outcomes, speculations = self._read()
        versions, place = np.unique(np.array(self._versions)[rounds], return_inverse=True)
        sums = np.zeros((len(versions), 3), np.int64)
        counts = np.column_stack([np.ones_like(rounds), speculations[:, 2], outcomes[:, 3]])
        np.add.at(sums, place.reshape(-1), counts)
        return list(zip(versions.tolist(), *sums.T.tolist(), strict=True))

    def num_rows(self) -> NDArray[np.int64]:
        """Returns how many input rows the target's forward had in each round: Σ(num_draft + 1)."""
        rounds, _, speculations = self._read()
        rows = np.bincount(rounds, weights=speculations[:, 2] + 1.0, minlength=len(self))
        return rows.astype(np.int64)

    def tokens(self) -> dict[int, list[int]]:
        """Returns {request id: emitted tokens}: each round's accepted drafts, then its bonus."""
        return {request_id: tokens.tolist() for request_id, tokens in self.token_arrays().items()}

    def token_arrays(self) -> dict[int, Ints]:
        """Returns {request id: emitted tokens, as an array}: accepted drafts and bonus tokens."""
        _, outcomes, speculations = self._read()
        drafted = speculations[:, Speculation.HEAD :][:, : self.lookahead]
        return self._emitted(outcomes, drafted, outcomes[:, 4])

    def source_arrays(self) -> dict[int, Ints]:
        """Returns {request id: what drafted each emitted token, as a Source}. Bonus tokens, which
        the target itself adds to the accepted ones, have Source.NONE."""
        _, outcomes, speculations = self._read()
        drafted = np.repeat(speculations[:, :1], self.lookahead, axis=1)
        return self._emitted(outcomes, drafted, np.full(len(outcomes), Source.NONE, np.int32))

    def _emitted(self, outcomes: Ints, drafted: Ints, bonus: Ints) -> dict[int, Ints]:
        """Returns {request id: one value for each emitted token}: each round's values of accepted
        `drafted` tokens [n, K], then of the `bonus` [n]. A value: a token or Source."""
        accepted = outcomes[:, 3]
        table = np.column_stack([drafted, bonus])
        table[np.arange(len(table)), accepted] = bonus
        order = np.argsort(outcomes[:, 0], kind="stable")
        is_emitted = np.arange(table.shape[1]) <= accepted[:, None]
        emitted = table[order][is_emitted[order]]
        ids, first = np.unique(outcomes[order, 0], return_index=True)
        ends = np.cumsum(accepted[order] + 1)[first[1:] - 1]
        parts = np.split(emitted, ends) if len(ids) else []
        emitted_by_id = zip(ids.tolist(), parts, strict=True)
        return {number: part[: self.ends.get(number)] for number, part in emitted_by_id}


def is_first_round(sequences: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns a mask [n]: whether a row of `RoundRecords.sequences` is the first round of its
    sequence, which always misses the speculation cache."""
    names = (sequences[:, 1] << 32) + sequences[:, 2]
    is_first = np.zeros(len(names), np.bool_)
    is_first[np.unique(names, return_index=True)[1]] = True
    return is_first


def outcome_digest(sequences: NDArray[np.int64]) -> str:
    """Returns 16 hex digits of SHA-256 over each row's round, id, accepted tokens and bonus token,
    equal for runs with the same decisions. sequences: from RoundRecords.sequences, int64 [n, 8]."""
    decided = np.ascontiguousarray(sequences[:, [0, 1, 3, 4]])
    return hashlib.sha256(decided.tobytes()).hexdigest()[:16]


def token_digest(tokens: Mapping[int, Sequence[int] | Ints], count: int) -> str:
    """Returns 16 hex digits of SHA-256 over the first `count` tokens of each sequence."""
    state = hashlib.sha256()
    for request_id in sorted(tokens):
        first = np.asarray(tokens[request_id][:count], np.int64)
        state.update(np.int64(request_id).tobytes() + first.tobytes())
    return state.hexdigest()[:16]


def percentiles_us(seconds: Sequence[float] | NDArray[Any]) -> dict[str, float | int | None]:
    """Returns {mean, p50, p90, p99, n} of durations given in seconds: mean and percentiles in µs
    (None without samples), and n, the number of durations."""
    if not len(seconds):
        return {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}
    us = np.asarray(seconds) * 1e6
    values = [us.mean(), *np.percentile(us, [50, 90, 99])]
    names = ("mean", "p50", "p90", "p99")
    return {**{n: round(float(v), 3) for n, v in zip(names, values, strict=True)}, "n": len(us)}


def median(values: NDArray[Any] | Sequence[float]) -> float | None:
    """Returns the median of the finite values; None if there are none."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    return float(np.median(array)) if len(array) else None
