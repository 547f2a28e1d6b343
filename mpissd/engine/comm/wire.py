"""The format of a message: a header of seven int32, then the rows of an outcome or a speculation.

The header holds version, kind, id of the target group, round, count of rows, flags, and a checksum
of everything from the round on. A received header is compared with the expected one, and every
number of a row with the values that it can have. A difference raises ProtocolError with both
values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Control, Event, Ints, Outcome, Request, Source, Speculation

VERSION = 0x5D03
HEADER = 7
_FIELDS = ("version", "kind", "group", "round", "count", "flags", "checksum")
_ROUND, _COUNT, _FLAGS, _CHECKSUM = range(3, HEADER)
STOP = 1
# The flags of an OUTCOME or a PLAN also hold its Control: from these bits on, the lookahead plus
# one (0: None), the width plus one, and the rows of prompts.
_LOOKAHEAD, _WIDTH, _FILL, _END = 5, 14, 19, 31
_CONTROL = (1 << _END) - (1 << _LOOKAHEAD)
# The flags of a SPECULATION hold the version of the draft's weights from this bit on.
_VERSION = 5
MOST_FILL, MOST_WIDTH = (1 << _END - _FILL) - 1, (1 << _FILL - _WIDTH) - 2
MOST = int(np.iinfo(np.int32).max)
_BY_CRC = 1 << 16  # largest body, in int32, that the CRC takes whole; larger ones are folded first
_FOLD = 1 << 10  # numbers that are left of a folded body
_OUTCOME = ("id", "epoch", "event", "num_accepted", "bonus")
_SPECULATION = ("source", "hit", "num_draft")


class Kind(IntEnum):
    """The kinds of messages; the number is also the MPI tag."""

    OUTCOME = 1
    SPECULATION = 2
    PLAN = 3
    PROPOSALS = 4
    PROMPT = 5


class Buffer:
    """The preallocated memory of one message: a header and a body of `capacity` int32.

    lookahead, vocab: K and V, the limits of num_accepted and of tokens in a message.
    """

    def __init__(
        self, kind: Kind, group: int, capacity: int, *, lookahead: int = MOST, vocab: int = MOST
    ) -> None:
        self.kind = kind
        self.array: Ints = np.zeros(HEADER + capacity, np.int32)
        self.array[:3] = VERSION, kind, group
        self.body = self.array[HEADER:]
        # The largest value of each column of an outcome.
        self.most = MOST, MOST, int(max(Event)), lookahead, vocab - 1
        self._expected = VERSION, int(kind), group
        is_outcome = kind in (Kind.OUTCOME, Kind.PLAN)
        self._flags = (0, STOP) if is_outcome else (0,)
        has_version = kind == Kind.SPECULATION
        self._control = _CONTROL if is_outcome or has_version else 0
        self._bytes = self.array.data.cast("B")
        self._ints, self._words = self._bytes.cast("i"), self._bytes.cast("I")
        self._limits = np.array(self.most, np.uint32)
        self._tables: dict[tuple[int, int], NDArray[np.uint32]] = {}

    def write_header(self, round_: int, count: int, flags: int = 0) -> None:
        """Writes the round, the number of rows and the flags."""
        ints = self._ints
        ints[_ROUND], ints[_COUNT], ints[_FLAGS] = round_, count, flags

    def seal(self, size: int) -> None:
        """Writes the checksum of a message whose body has `size` int32."""
        self._words[_CHECKSUM] = self._checksum(size)

    def read_header(self, round_: int | None = None) -> tuple[int, int, int]:
        """Returns (round, count, flags) of the message that arrived.

        Raises ProtocolError: another version, kind, group or round than expected, or a count or
        flags that cannot be.
        """
        version, kind, group, got_round, count, flags = self._ints[:_CHECKSUM].tolist()
        if (version, kind, group) != self._expected or round_ not in (None, got_round):
            raise self._refused(round_)
        plain = flags & ~self._control
        if not 0 <= count <= len(self.body) or flags < 0 or plain not in self._flags:
            raise self._refused(round_)
        return got_round, count, flags

    def check_seal(self, size: int) -> None:
        """Raises ProtocolError if the body, of `size` int32, does not fit its checksum."""
        written, computed = self._words[_CHECKSUM], self._checksum(size)
        if written != computed:
            raise ProtocolError(
                f"round {self._ints[_ROUND]}: {self.kind.name} message refused: checksum is "
                f"{written:#010x}, expected {computed:#010x}"
            )

    def check_outcome(self, rows: Ints) -> None:
        """Raises ProtocolError if a number of an outcome's rows is out of range."""
        beyond = (
            rows.view(np.uint32) > self._limits
        )  # a negative number is huge when read as unsigned
        if np.count_nonzero(beyond):  # takes a tenth of any()
            row, column = np.argwhere(beyond)[0].tolist()
            raise ProtocolError(
                f"round {self._ints[_ROUND]}: malformed outcome row {row}: {_OUTCOME[column]} is "
                f"{rows[row, column]}, allowed 0..{self.most[column]}"
            )

    def speculation_limits(self, lookahead: int, width: int) -> NDArray[np.uint32]:
        """Returns the largest value of each column of a speculation [width]; for q, any bits."""
        if (lookahead, width) not in self._tables:
            limits = np.full(width, 2**32 - 1, np.uint32)
            limits[:3] = max(Source), 1, lookahead
            limits[3 : 3 + lookahead] = self.most[-1]
            self._tables[lookahead, width] = limits
        return self._tables[lookahead, width]

    def _checksum(self, size: int) -> int:
        start = crc32(self._bytes[4 * _ROUND : 4 * _CHECKSUM])
        if size <= _BY_CRC:
            return crc32(self._bytes[4 * HEADER : 4 * (HEADER + size)], start)
        return crc32(_folded(self.body[:size]).data, start)

    def _refused(self, round_: int | None) -> ProtocolError:
        got = dict(zip(_FIELDS, self._ints[:_CHECKSUM].tolist(), strict=False))
        names = dict(zip(_FIELDS, (*self._expected, round_), strict=False))
        wrong = {n: (got[n], want) for n, want in names.items() if want not in (None, got[n])}
        detail = ", ".join(f"{n} is {a}, expected {b}" for n, (a, b) in wrong.items())
        flags = f"flags {got['flags']}, allowed {' or '.join(map(str, self._flags))}"
        rest = f"count {got['count']}, allowed 0..{len(self.body)}; {flags}"
        return ProtocolError(
            f"round {got['round']}: {self.kind.name} message refused: {detail or rest}"
        )


def _folded(body: Ints) -> Ints:
    """Returns 1024 numbers that change when any one number of the body does."""
    whole = len(body) // _FOLD * _FOLD
    folded: Ints = np.bitwise_xor.reduce(body[:whole].reshape(-1, _FOLD), axis=0)
    folded[: len(body) - whole] ^= body[whole:]
    return folded


def write_outcome(buffer: Buffer, outcome: Outcome, stop: bool = False) -> None:
    """Writes an outcome into the buffer, with one copy."""
    buffer.seal(_lay_outcome(buffer, outcome, stop))


def _lay_outcome(buffer: Buffer, outcome: Outcome, stop: bool) -> int:
    count, size = len(outcome.rows), outcome.rows.size
    buffer.write_header(outcome.round, count, STOP * stop | _control_bits(outcome.control))
    buffer.body[:size] = outcome.rows.reshape(-1)
    return size


def read_outcome(buffer: Buffer, round_: int | None = None) -> tuple[Outcome, bool]:
    """Returns a copy of the outcome that arrived, and its stop flag.

    Raises ProtocolError for a message that is not as expected, as all functions named read_… do.
    """
    outcome, stop = _take_outcome(buffer, round_)
    buffer.check_seal(outcome.rows.size)
    buffer.check_outcome(outcome.rows)
    return outcome, stop


def _take_outcome(buffer: Buffer, round_: int | None) -> tuple[Outcome, bool]:
    got, count, flags = buffer.read_header(round_)
    outcome = Outcome(got, _rows(buffer, 0, count, Outcome.WIDTH), control=_control_of(flags))
    return outcome, bool(flags & STOP)


def _control_bits(control: Control) -> int:
    if control.lookahead is None and control.width is None and not control.fill:
        return 0
    limit, width = (0 if n is None else n + 1 for n in control[:2])
    assert limit < 1 << _WIDTH - _LOOKAHEAD and width <= MOST_WIDTH + 1, control
    return limit << _LOOKAHEAD | width << _WIDTH | min(control.fill, MOST_FILL) << _FILL


def _control_of(flags: int) -> Control:
    limit = (flags & ((1 << _WIDTH) - 1)) >> _LOOKAHEAD
    width = (flags & ((1 << _FILL) - 1)) >> _WIDTH
    return Control(limit - 1 if limit else None, width - 1 if width else None, flags >> _FILL)


def write_speculation(buffer: Buffer, speculation: Speculation) -> None:
    """Writes a speculation into the buffer, with one copy."""
    rows = speculation.rows
    buffer.write_header(speculation.round, len(rows), speculation.version << _VERSION)
    buffer.body[: rows.size] = rows.reshape(-1)
    buffer.seal(rows.size)


def read_speculation(
    buffer: Buffer, round_: int, count: int, lookahead: int, *, sampled: bool = False
) -> Speculation:
    """Returns a copy of the speculation that arrived, of round `round_` for `count` sequences."""
    _, got, flags = buffer.read_header(round_)
    if got != count:
        raise ProtocolError(
            f"round {round_}: {buffer.kind.name} of {got} sequences, expected {count}"
        )
    rows = _rows(buffer, 0, count, Speculation.width(lookahead, sampled))
    buffer.check_seal(rows.size)
    speculation = Speculation(round_, rows, sampled=sampled)
    speculation.version = flags >> _VERSION
    _check(buffer, speculation, lookahead)
    return speculation


def write_plan(buffer: Buffer, outcome: Outcome, speculation: Speculation, stop: bool) -> None:
    """Writes a plan: the outcome that followers apply and the speculation that they verify."""
    start = _lay_outcome(buffer, outcome, stop)
    stop_at = start + speculation.rows.size
    buffer.body[start:stop_at] = speculation.rows.reshape(-1)
    buffer.seal(stop_at)


def read_plan(
    buffer: Buffer, round_: int, lookahead: int, *, sampled: bool = False
) -> tuple[Outcome, Speculation, bool]:
    """Returns a copy of the plan that arrived: (outcome of round_ - 1, speculation, stop)."""
    outcome, stop = _take_outcome(buffer, round_ - 1)
    width = Speculation.width(lookahead, sampled)
    rows = _rows(buffer, outcome.rows.size, outcome.num_live, width)
    buffer.check_seal(outcome.rows.size + rows.size)
    buffer.check_outcome(outcome.rows)
    speculation = Speculation(round_, rows, sampled=sampled)
    _check(buffer, speculation, lookahead)
    return outcome, speculation, stop


def write_proposals(buffer: Buffer, round_: int, rows: Sequence[NDArray[np.float32]]) -> int:
    """Writes distributions [V], one for each proposal that was not certain.

    Returns the size of the message in int32, its header included.
    """
    buffer.write_header(round_, len(rows))
    for n, row in enumerate(rows):
        buffer.body[n * len(row) : (n + 1) * len(row)] = row.view(np.int32)
    size = sum(len(row) for row in rows)
    buffer.seal(size)
    return HEADER + size


def check_proposals(buffer: Buffer, round_: int, count: int) -> None:
    """Raises ProtocolError unless the message holds `count` distributions of round `round_`."""
    _, got, _ = buffer.read_header(round_)
    if got != count:
        raise ProtocolError(f"round {round_}: PROPOSALS of {got} rows, expected {count}")


def read_proposals(buffer: Buffer, round_: int, count: int, vocab: int) -> NDArray[np.float32]:
    """Returns a copy of the `count` distributions of round `round_`, float32 [count, V]."""
    check_proposals(buffer, round_, count)
    rows = _rows(buffer, 0, count, vocab).view(np.float32)
    buffer.check_seal(rows.size)
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


def _check(buffer: Buffer, speculation: Speculation, lookahead: int) -> None:
    rows = speculation.rows
    beyond = rows.view(np.uint32) > buffer.speculation_limits(lookahead, rows.shape[1])
    if np.count_nonzero(beyond):
        _name_what_is(beyond, buffer, speculation, lookahead)
    if speculation.sampled:
        q = speculation.q[np.arange(lookahead) < speculation.num_draft[:, None]]
        if not ((q > 0) & (q <= 1)).all():
            raise ProtocolError(f"round {speculation.round}: q {q.tolist()}, allowed above 0 to 1")


def _name_what_is(
    beyond: NDArray[np.bool_], buffer: Buffer, speculation: Speculation, lookahead: int
) -> None:
    """Raises ProtocolError for the first number beyond its limit.

    Tokens after num_draft may have any value, because no rank reads them.
    """
    rows, lengths = speculation.rows, speculation.num_draft
    where = f"round {speculation.round}: "
    if beyond[:, 2].any():
        raise ProtocolError(f"{where}num_draft {lengths.tolist()}, allowed 0..{lookahead}")
    head = Speculation.HEAD
    beyond[:, head : head + lookahead] &= np.arange(lookahead) < lengths[:, None]
    for row, column in np.argwhere(beyond)[:1].tolist():
        name = _SPECULATION[column] if column < head else f"token {column - head + 1}"
        limit = buffer.speculation_limits(lookahead, rows.shape[1])[column]
        what = f"malformed {buffer.kind.name} row {row}: {name} is {rows[row, column]}"
        raise ProtocolError(f"{where}{what}, allowed 0..{limit}")


_PROMPT_HEAD = 8
_SEED, _ASKS = 5, 7
_WANTS_LOGPROBS, _HAS_SEED = 1, 2


def prompt_capacity(batch: int, prompt_tokens: int) -> int:
    """Returns the int32 of the largest body: b prompts of prompt_tokens tokens each."""
    return batch * (_PROMPT_HEAD + prompt_tokens)


def has_prompts(outcome: Outcome) -> bool:
    """Returns whether a PROMPT message follows this outcome, in a job with prompts."""
    return len(outcome.fresh) > 0


def write_prompts(buffer: Buffer, outcome: Outcome) -> int:
    """Writes the prompts of an outcome's new sequences, in their order.

    Returns the size of the message in int32, its header included.
    """
    admitted = outcome.fresh.tolist()
    buffer.write_header(outcome.round, len(admitted))
    end = 0
    for row in admitted:
        request = outcome.prompts[row[0], row[1]]
        start, end = end, end + _PROMPT_HEAD + len(request.prompt)
        buffer.body[start] = len(request.prompt)
        sampled = np.array([request.temperature, request.top_p])
        buffer.body[start + 1 : start + _SEED] = sampled.view(np.int32)
        buffer.body[start + _SEED : start + _ASKS] = np.array([request.seed or 0], np.uint64).view(
            np.int32
        )
        buffer.body[start + _ASKS] = _prompt_flags(request)
        buffer.body[start + _PROMPT_HEAD : end] = request.prompt
    buffer.seal(end)
    return HEADER + end


def _prompt_flags(request: Request) -> int:
    return _WANTS_LOGPROBS * request.logprobs + _HAS_SEED * (request.seed is not None)


def read_prompts(buffer: Buffer, outcome: Outcome) -> Outcome:
    """Returns the outcome with the prompts of its admissions, which have arrived.

    Raises ProtocolError for a message that is not as expected, as the functions of `wire` do.
    """
    admitted = outcome.fresh.tolist()
    _, count, _ = buffer.read_header(outcome.round)
    if count != len(admitted):
        raise _malformed(outcome, f"{count} prompts", f"expected {len(admitted)}")
    parts = _prompt_parts(buffer, outcome, count)
    prompts = {
        (row[0], row[1]): _read_request(buffer, outcome, row, part)
        for row, part in zip(admitted, parts, strict=True)
    }
    return Outcome(outcome.round, outcome.rows, prompts, outcome.control)


def _prompt_parts(buffer: Buffer, outcome: Outcome, count: int) -> list[Ints]:
    """Returns a copy of each sequence's part of the body, after a look at the checksum."""
    body, end, parts = buffer.body, 0, []
    for _ in range(count):
        size = int(body[end]) if end < len(body) else 0
        start, end = end, end + _PROMPT_HEAD + size
        if size < 1 or end > len(body):
            told = f"the buffer holds {len(body)} numbers"
            raise _malformed(outcome, f"a prompt of {size} tokens at {start}", told)
        parts.append(body[start:end].copy())
    buffer.check_seal(end)
    return parts


def _read_request(buffer: Buffer, outcome: Outcome, row: list[int], part: Ints) -> Request:
    tokens, most = part[_PROMPT_HEAD:], buffer.most[-1]
    if tokens.min() < 0 or tokens.max() > most:
        raise _malformed(
            outcome, f"prompt tokens {tokens.min()}..{tokens.max()}", f"allowed 0..{most}"
        )
    if tokens[-1] != row[4]:
        raise _malformed(outcome, f"a prompt that ends in {tokens[-1]}", f"expected {row[4]}")
    temperature, top_p = part[1:_SEED].copy().view(np.float64).tolist()
    if not (0 <= temperature < math.inf and 0 < top_p <= 1):
        told = f"temperature {temperature:g}, top_p {top_p:g}"
        raise _malformed(outcome, told, "allowed 0 or more, and above 0 to 1")
    flags = int(part[_ASKS])
    if not 0 <= flags <= _WANTS_LOGPROBS + _HAS_SEED:
        raise _malformed(outcome, f"flags {flags}", f"allowed 0..{_WANTS_LOGPROBS + _HAS_SEED}")
    seed = int(part[_SEED:_ASKS].copy().view(np.uint64)[0]) if flags & _HAS_SEED else None
    sampled = temperature, top_p, seed, bool(flags & _WANTS_LOGPROBS)
    return Request(row[0], row[4], row[1], tuple(tokens.tolist()), *sampled)


def _malformed(outcome: Outcome, found: str, allowed: str) -> ProtocolError:
    return ProtocolError(f"round {outcome.round}: malformed PROMPT: {found}, {allowed}")
