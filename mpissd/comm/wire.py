"""The bytes of a message: a header of six int32, then the rows of an outcome or a speculation.

Header: version, kind, target-group id, round, count, flags. What arrives is checked against what
was expected, and a difference is a ProtocolError that names both values.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from mpissd.errors import ProtocolError
from mpissd.rounds import Event, Ints, Outcome, Speculation

VERSION = 0x5D01
HEADER = 6
_FIELDS = ("version", "kind", "group", "round", "count", "flags")
STOP = 1
# of (event, num_accepted)
_OUTCOME_LIMITS = np.array([Event.RELEASE, np.iinfo(np.int32).max], np.uint32)


class Kind(IntEnum):
    """What a message holds; also its MPI tag."""

    OUTCOME = 1
    SPECULATION = 2
    PLAN = 3
    TRUNK = 4
    PROPOSALS = 5


class Buffer:
    """One preallocated message; holds at most `capacity` int32 behind its header."""

    def __init__(self, kind: Kind, group: int, capacity: int) -> None:
        self.kind = kind
        self.array: Ints = np.zeros(HEADER + capacity, np.int32)
        self.array[:3] = VERSION, kind, group
        self.body = self.array[HEADER:]
        self._expected = VERSION, int(kind), group

    def write_header(self, round_: int, count: int, flags: int = 0) -> None:
        """Stamps the round, the number of rows and the flags."""
        self.array[3:HEADER] = round_, count, flags

    def read_header(self, round_: int | None = None) -> tuple[int, int, int]:
        """(round, count, flags) of what arrived.

        Raises ProtocolError: another version, kind, group or round, or a count that can't be.
        """
        version, kind, group, got_round, count, flags = self.array[:HEADER].tolist()
        if (version, kind, group) != self._expected or round_ not in (None, got_round):
            raise self._refused(round_)
        if not 0 <= count <= len(self.body) or flags not in (0, STOP):
            raise self._refused(round_)
        return got_round, count, flags

    def _refused(self, round_: int | None) -> ProtocolError:
        got = dict(zip(_FIELDS, self.array[:HEADER].tolist(), strict=True))
        names = dict(zip(_FIELDS, (*self._expected, round_), strict=False))
        wrong = {n: (got[n], want) for n, want in names.items() if want not in (None, got[n])}
        detail = ", ".join(f"{n} is {a}, expected {b}" for n, (a, b) in wrong.items())
        where = f"round {got['round']}: {self.kind.name} message refused: "
        return ProtocolError(where + (detail or f"count {got['count']}, flags {got['flags']}"))


def write_outcome(buffer: Buffer, outcome: Outcome, stop: bool = False) -> None:
    """Packs an outcome (one copy)."""
    count = len(outcome.rows)
    buffer.write_header(outcome.round, count, STOP if stop else 0)
    buffer.body[: count * Outcome.WIDTH] = outcome.rows.reshape(-1)


def read_outcome(buffer: Buffer, round_: int | None = None) -> tuple[Outcome, bool]:
    """The outcome that arrived, copied out of the buffer, and whether it says stop."""
    got, count, flags = buffer.read_header(round_)
    rows = _rows(buffer, 0, count, Outcome.WIDTH)
    if (rows[:, 2:4].view(np.uint32) > _OUTCOME_LIMITS).any():  # unsigned: negatives are huge
        raise ProtocolError(f"round {got}: malformed outcome rows {rows.tolist()}")
    return Outcome(got, rows), flags == STOP


def write_speculation(buffer: Buffer, speculation: Speculation) -> None:
    """Packs a speculation (one copy)."""
    rows = speculation.rows
    buffer.write_header(speculation.round, len(rows))
    buffer.body[: rows.size] = rows.reshape(-1)


def read_speculation(
    buffer: Buffer, round_: int, count: int, lookahead: int, *, sampled: bool = False
) -> Speculation:
    """The speculation of round `round_` for `count` sequences, copied out of the buffer."""
    _, got, _ = buffer.read_header(round_)
    if got != count:
        raise ProtocolError(
            f"round {round_}: {buffer.kind.name} of {got} sequences, expected {count}"
        )
    rows = _rows(buffer, 0, count, Speculation.width(lookahead, sampled))
    speculation = Speculation(round_, rows, sampled=sampled)
    _check(speculation, lookahead)
    return speculation


def write_plan(buffer: Buffer, outcome: Outcome, speculation: Speculation, stop: bool) -> None:
    """Packs what the followers need: the outcome to commit and the speculation to verify."""
    write_outcome(buffer, outcome, stop)
    start = outcome.rows.size
    buffer.body[start : start + speculation.rows.size] = speculation.rows.reshape(-1)


def read_plan(
    buffer: Buffer, round_: int, lookahead: int, *, sampled: bool = False
) -> tuple[Outcome, Speculation, bool]:
    """The (outcome, speculation, stop) of a plan; the plan of round r carries outcome r-1."""
    outcome, stop = read_outcome(buffer, round_ - 1)
    width = Speculation.width(lookahead, sampled)
    rows = _rows(buffer, outcome.rows.size, outcome.num_live, width)
    speculation = Speculation(round_, rows, sampled=sampled)
    _check(speculation, lookahead)
    return outcome, speculation, stop


def write_proposals(buffer: Buffer, round_: int, rows: Sequence[NDArray[np.float32]]) -> int:
    """Packs recorded distributions [V], one a proposal that was not certain; the size in int32."""
    buffer.write_header(round_, len(rows))
    for n, row in enumerate(rows):
        buffer.body[n * len(row) : (n + 1) * len(row)] = row.view(np.int32)
    return HEADER + sum(len(row) for row in rows)


def check_proposals(buffer: Buffer, round_: int, count: int) -> None:
    """ProtocolError unless the `count` rows of round `round_` arrived."""
    _, got, _ = buffer.read_header(round_)
    if got != count:
        raise ProtocolError(f"round {round_}: PROPOSALS of {got} rows, expected {count}")


def read_proposals(buffer: Buffer, round_: int, count: int, vocab: int) -> NDArray[np.float32]:
    """The `count` recorded distributions of round `round_`, [count, V], copied out."""
    check_proposals(buffer, round_, count)
    rows = _rows(buffer, 0, count, vocab).view(np.float32)
    if not (np.isfinite(rows).all() and (rows >= 0).all()):
        raise ProtocolError(f"round {round_}: PROPOSALS hold a number that is no probability")
    return rows


def _rows(buffer: Buffer, start: int, count: int, width: int) -> Ints:
    stop = start + count * width
    if stop > len(buffer.body):
        raise ProtocolError(
            f"round {int(buffer.array[3])}: {buffer.kind.name} of {count} rows of {width}, "
            f"the buffer holds {len(buffer.body)} numbers"
        )
    rows: Ints = buffer.body[start:stop].copy().reshape(count, width)
    return rows


def _check(speculation: Speculation, lookahead: int) -> None:
    lengths = speculation.num_draft
    if (lengths.view(np.uint32) > lookahead).any():
        raise ProtocolError(
            f"round {speculation.round}: num_draft {lengths.tolist()}, allowed 0..{lookahead}"
        )
    if speculation.sampled:
        q = speculation.q[np.arange(lookahead) < lengths[:, None]]
        if not ((q > 0) & (q <= 1)).all():
            raise ProtocolError(f"round {speculation.round}: q {q.tolist()}, allowed above 0 to 1")
