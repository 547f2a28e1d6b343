"""The layout of the messages of a round, and the checks of received messages.

A message is a header of thirteen 32-bit numbers, declared in Header, and a body of int32. The body
holds rows of an Outcome, of a Speculation or of both (PLAN), distributions (PROPOSALS), prompts
(PROMPT), tokens imposed on the models (START), or ready branches (BRANCHES). A receiver checks the
header against what it expects, and the message against its checksum. A difference raises
ProtocolError with both values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from operator import le
from struct import Struct
from typing import NamedTuple
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import (
    MOST_FORCED,
    MOST_SAMPLING,
    Control,
    Ints,
    Outcome,
    ReadyBranches,
    Request,
    Sampling,
    Speculation,
)

VERSION = 0x5D07
MOST = int(np.iinfo(np.int32).max)
_BY_CRC = 1 << 16  # largest body, in int32, whose CRC is computed directly; others are folded
_FOLD = 1 << 10  # the number of int32 to which XOR folds a larger body before its CRC
# The int32 before a prompt's tokens: (their number, answer tokens, size of Sampling).
_PROMPT_HEAD = 3


class Kind(IntEnum):
    """The kinds of messages; the number is also the MPI tag."""

    OUTCOME = 1
    SPECULATION = 2
    PLAN = 3
    PROPOSALS = 4
    PROMPT = 5
    HELLO = 6  # a draft's first message on a socket: the limits of its messages
    START = 7  # rank 0 to other target ranks: start a round that the GPUs run without the host
    BRANCHES = 8  # a draft to rank 0: whole branches, for its cache
    CHALLENGE = 9  # on a socket with a key: a random number
    PROOF = 10  # on a socket with a key: the sender knows it


class Header(NamedTuple):
    """A message's header, with its fields in the order in which they are sent. checksum: CRC of all
    that follows it. rows: the number of rows, distributions or prompts. size: int32 in the body.
    stop, lookahead, width, fill: sent with an outcome: whether to stop, and the next round's
    limits, set by the target's rank 0 (Control; −1: None). weights: the version of the draft's
    weights. taken: sent with an outcome: the version of branches that rank 0 took from its cache
    (−1: it asks the draft). BRANCHES: stop ends them; lookahead: their own round's."""

    checksum: int
    version: int
    kind: int
    group: int
    round: int
    rows: int
    size: int
    stop: int = 0
    lookahead: int = -1
    width: int = -1
    fill: int = 0
    weights: int = 0
    taken: int = -1


_HEADER = Struct("=I12i")
HEADER = _HEADER.size // 4  # the size of a header in int32


@dataclass(frozen=True)
class LinkShape:
    """The limits of the messages between a target group and its draft; equal on all ranks involved.

    group: the number of the target group. batch: the largest batch size b. lookahead: the most
    drafted tokens of a sequence. vocab: V if distributions of sampled tokens are sent, else 0.
    prompt_tokens: the most prompt tokens of a sequence; 0 if sequences have no prompts. forced: the
    most numbers that START imposes on a sequence's round. branches: the most branches of a sequence
    that the draft sends to rank 0's cache; 0: rank 0 has none.
    """

    group: int
    batch: int
    lookahead: int
    _: KW_ONLY
    vocab: int = 0
    prompt_tokens: int = 0
    forced: int = 0
    branches: int = 0

    @property
    def sampled(self) -> bool:
        """Whether drafted tokens are sent with q, the probability with which each was drawn."""
        return self.vocab > 0

    @property
    def speculation_width(self) -> int:
        """The number of int32 that one sequence's drafted tokens take in a message."""
        return Speculation.width(self.lookahead, self.sampled)

    @property
    def branch_width(self) -> int:
        """The number of int32 that a ready branch takes in a message."""
        return ReadyBranches.KEY + self.speculation_width

    def capacity(self, kind: Kind) -> int:
        """Returns the size in int32 of this kind's largest body, without forced tokens. An
        outcome has a row for each of up to `batch` sequences that leave and as many that join."""
        outcome = 2 * Outcome.WIDTH
        each = {
            Kind.OUTCOME: outcome,
            Kind.SPECULATION: self.speculation_width,
            Kind.PLAN: outcome + self.speculation_width,
            Kind.PROPOSALS: self.lookahead * self.vocab,
            Kind.PROMPT: _PROMPT_HEAD + self.prompt_tokens + MOST_SAMPLING // 4,
            Kind.START: self.forced,
            Kind.BRANCHES: self.branches * self.branch_width,
        }
        return self.batch * each[kind]


class Message:
    """The preallocated buffer `array` of one message, int32 [HEADER + capacity], with space for
    tokens that grammars force. usual: how many int32 are sent if none are forced. Methods that read
    raise ProtocolError for a message that is not as expected."""

    def __init__(self, kind: Kind, shape: LinkShape, capacity: int | None = None) -> None:
        """Allocates the buffer. capacity: int32 of the body (None: what `shape` allows)."""
        self.kind, self.shape = kind, shape
        size = shape.capacity(kind) if capacity is None else capacity
        self.usual = HEADER + size
        if kind in (Kind.OUTCOME, Kind.PLAN):
            size += shape.batch * MOST_FORCED * Outcome.WIDTH
        self.array: Ints = np.zeros(HEADER + size, np.int32)
        self._bytes = self.array.data.cast("B")
        self._words = self._bytes.cast("I")
        self._same = VERSION, int(kind), shape.group
        self._least = Header(0, *self._same, -1, 0, 0)
        most = Header(2**32 - 1, *self._same, MOST, size, size)
        if kind in (Kind.OUTCOME, Kind.PLAN):
            most = most._replace(stop=1, lookahead=shape.lookahead, width=MOST, fill=MOST)
        if kind == Kind.OUTCOME:
            most = most._replace(taken=MOST)
        if kind == Kind.BRANCHES:
            most = most._replace(stop=1, lookahead=shape.lookahead)
        drafted = kind in (Kind.SPECULATION, Kind.BRANCHES)
        self._most = most._replace(weights=MOST) if drafted else most

    def write(
        self,
        round_: int,
        count: int,
        parts: Sequence[NDArray[np.int32]] = (),
        *,
        stop: bool = False,
        control: Control | None = None,
        weights: int = 0,
        taken: int | None = None,
    ) -> int:
        """Writes a message with the body `parts`; returns its size in int32, header included."""
        end = HEADER
        for part in parts:
            start, end = end, end + part.size
            self.array[start:end] = part.reshape(-1)
        fields = *self._same, round_, count, end - HEADER, stop
        lookahead = width = -1
        fill = 0
        if control is not None:
            lookahead = -1 if control.lookahead is None else control.lookahead
            width = -1 if control.width is None else control.width
            fill = control.prefill_rows
        limits = lookahead, width, fill
        version = -1 if taken is None else taken
        _HEADER.pack_into(self._bytes, 0, 0, *fields, *limits, weights, version)
        self._words[0] = self._checksum(end - HEADER)
        return end

    def header(self, round_: int | None = None, count: int | None = None) -> Header:
        """Returns the header of the received message after checking it. round_, count: the expected
        round and number of rows (None: any). The error names each field that does not fit."""
        header = Header._make(_HEADER.unpack_from(self._bytes))
        fits = all(map(le, self._least, header)) and all(map(le, header, self._most))
        if fits and round_ in (None, header.round) and count in (None, header.rows):
            return header
        least, most = self._least._asdict(), self._most._asdict()
        for name, value in (("round", round_), ("rows", count)):
            if value is not None:
                least[name] = most[name] = value
        wrong = []
        for name, value in header._asdict().items():
            low, high = least[name], most[name]
            if not low <= value <= high:
                limit = f"expected {high}" if low == high else f"allowed {low}..{high}"
                wrong.append(f"{name} is {value}, {limit}")
        raise self.refused(header, ", ".join(wrong))

    def body(self, header: Header, width: int | None = None) -> Ints:
        """Returns a copy of the body, [rows, width] or flat, after checking its checksum."""
        if width is not None and header.size != header.rows * width:
            raise self.refused(
                header, f"{header.size} numbers, expected {header.rows} rows of {width}"
            )
        computed = self._checksum(header.size)
        if header.checksum != computed:
            raise self.refused(
                header, f"checksum is {header.checksum:#010x}, expected {computed:#010x}"
            )
        body: Ints = self.array[HEADER : HEADER + header.size].copy()
        return body if width is None else body.reshape(header.rows, width)

    def refused(self, header: Header, what: str) -> ProtocolError:
        """Returns the error about a received message. what: the wrong and the expected value."""
        return ProtocolError(f"round {header.round}: {self.kind.name} message refused: {what}")

    def _checksum(self, size: int) -> int:
        if size <= _BY_CRC:
            return crc32(self._bytes[4 : 4 * (HEADER + size)])
        body = self.array[HEADER : HEADER + size]
        # XOR folds the body to 1,024 numbers, which change if any one number of the body changes.
        whole = size // _FOLD * _FOLD
        folded: Ints = np.bitwise_xor.reduce(body[:whole].reshape(-1, _FOLD), axis=0)
        folded[: size - whole] ^= body[whole:]
        return crc32(folded.data, crc32(self._bytes[4 : 4 * HEADER]))


def write_outcome(
    message: Message,
    outcome: Outcome,
    stop: bool = False,
    speculation: Speculation | None = None,
    taken: int | None = None,
) -> int | None:
    """Writes an outcome into the message; with a speculation, writes a plan: the outcome that the
    other target ranks apply and the tokens that they verify next. taken: of an outcome to the
    draft, Outcome.taken. Returns its size in int32, or None for the usual one."""
    parts = [outcome.rows, *([] if speculation is None else [speculation.rows])]
    count = len(outcome.rows)
    control = outcome.control
    end = message.write(outcome.round, count, parts, stop=stop, control=control, taken=taken)
    return end if end > message.usual else None


def read_outcome(message: Message, round_: int | None = None) -> tuple[Outcome, bool]:
    """Returns a copy of the received outcome, and whether the receiver has to stop."""
    header = message.header(round_)
    rows = message.body(header, Outcome.WIDTH)
    taken = None if header.taken < 0 else header.taken
    return Outcome(header.round, rows, control=_control(header), taken=taken), bool(header.stop)


def _control(header: Header) -> Control:
    lookahead, width = (None if n < 0 else n for n in (header.lookahead, header.width))
    return Control(lookahead, width, header.fill)


def write_speculation(message: Message, speculation: Speculation) -> None:
    """Writes the drafted tokens of a round into the message."""
    rows = speculation.rows
    message.write(speculation.round, len(rows), [rows], weights=speculation.version)


def read_speculation(message: Message, round_: int, count: int) -> Speculation:
    """Returns a copy of the received drafted tokens of round `round_` for `count` sequences."""
    header, shape = message.header(round_, count), message.shape
    rows = message.body(header, shape.speculation_width)
    return Speculation(round_, rows, sampled=shape.sampled, version=header.weights)


def write_branches(message: Message, ready: ReadyBranches, *, stop: bool = False) -> int:
    """Writes ready branches, the last ones if `stop`; returns the message's size in int32."""
    control = Control(ready.levels)
    count = len(ready.rows)
    parts = [ready.rows]
    version = ready.version
    return message.write(ready.round, count, parts, stop=stop, control=control, weights=version)


def read_branches(message: Message) -> tuple[ReadyBranches, bool]:
    """Returns a copy of the received branches, and whether they are the last."""
    header = message.header()
    rows = message.body(header, message.shape.branch_width)
    levels = _control(header).lookahead
    return ReadyBranches(header.round, rows, header.weights, levels), bool(header.stop)


def read_plan(message: Message, round_: int) -> tuple[Outcome, Speculation, bool]:
    """Returns (outcome of round_ - 1, tokens drafted for round_, whether to stop), as received."""
    header, shape = message.header(round_ - 1), message.shape
    body, end = message.body(header), header.rows * Outcome.WIDTH
    rows = body[:end].reshape(header.rows, Outcome.WIDTH)
    outcome, width = Outcome(header.round, rows, control=_control(header)), shape.speculation_width
    if len(body) - end != outcome.num_live * width:
        what = f"{len(body) - end} numbers, expected {outcome.num_live} rows of {width}"
        raise message.refused(header, what)
    drafted = body[end:].reshape(outcome.num_live, width)
    return outcome, Speculation(round_, drafted, sampled=shape.sampled), bool(header.stop)


def write_proposals(message: Message, round_: int, rows: Sequence[NDArray[np.float32]]) -> int:
    """Writes the distributions from which sampled tokens were drawn, float32 [V] for each token.
    Returns the message's size in int32, the header included."""
    return message.write(round_, len(rows), [row.view(np.int32) for row in rows])


def read_proposals(message: Message, round_: int, count: int) -> NDArray[np.float32]:
    """Returns a copy of the `count` distributions of round `round_`, float32 [count, V]."""
    return message.body(message.header(round_, count), message.shape.vocab).view(np.float32)


def write_prompts(message: Message, outcome: Outcome) -> int:
    """Writes the prompts of the sequences that an outcome admits, in their order. Returns the
    message's size in int32, the header included."""
    fresh, parts = outcome.fresh.tolist(), list[Ints]()
    for id_, epoch, *_ in fresh:
        request = outcome.prompts[id_, epoch]
        packed = json.dumps(request.sampling.to_dict(), ensure_ascii=False).encode()
        packed += b" " * (-len(packed) % 4)
        sizes = len(request.prompt), request.answered, len(packed) // 4
        parts.append(np.array([*sizes, *request.prompt], np.int32))
        parts.append(np.frombuffer(packed, np.int32))
    return message.write(outcome.round, len(fresh), parts)


def read_prompts(message: Message, outcome: Outcome) -> Outcome:
    """Returns the outcome with the prompts, from `message`, of the sequences that it admits."""
    fresh = outcome.fresh.tolist()
    header = message.header(outcome.round, len(fresh))
    body = message.body(header)
    prompts = dict[tuple[int, int], Request]()
    for id_, epoch, _, _, last in fresh:
        head, body = body[:_PROMPT_HEAD].tolist(), body[_PROMPT_HEAD:]
        size, answered, words = head if len(head) == _PROMPT_HEAD else (-1, 0, 0)
        if not (0 <= size <= len(body) - words and words >= 0):
            raise message.refused(header, f"{len(body)} numbers after {head}, expected a prompt")
        tokens, packed, body = np.split(body, [size, size + words])
        try:
            sampling = Sampling.from_dict(json.loads(packed.tobytes().decode()))
        except (ValueError, RecursionError) as error:
            raise message.refused(header, f"{error}, expected a Sampling in JSON") from error
        prompt = tuple(tokens.tolist())
        prompts[id_, epoch] = Request(id_, last, epoch, prompt, sampling, answered)
    return Outcome(outcome.round, outcome.rows, prompts, outcome.control, outcome.taken)
