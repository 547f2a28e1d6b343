"""Messages of online learning: lessons from the lead to a learner, new weights to the draft.

A version of weights is sent in pieces, so that none of them holds up a round for long. A piece is a
header and up to PIECE bytes. The last piece completes the version. A message without bytes ends the
stream.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints

Bytes = NDArray[np.uint8]
Logits = NDArray[np.float32]
Sent = Mapping[tuple[int, int], int]  # tokens that the learner has, by (request id, epoch)
PIECE = 1 << 20  # bytes: some .3 ms to take over on one host
_PIECE_HEADER = Struct("=2q")  # version, its bytes
HEADER = _PIECE_HEADER.size


@dataclass(frozen=True)
class Lesson:
    """One sequence's training data from a round.

    tokens: the tokens at positions start … of the sequence, its prompt included. prompt: tokens of
    the prompt. at: positions whose next token the target decided. rows: the forward's rows that
    decided them, on the lead; logits: [len(at), V], on the learner.
    """

    request_id: int
    epoch: int
    start: int
    tokens: Ints
    prompt: int
    at: Ints
    rows: Sequence[int] = ()
    logits: Logits = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    @property
    def name(self) -> tuple[int, int]:
        """The sequence: (request id, epoch)."""
        return self.request_id, self.epoch


def write_lessons(lessons: Sequence[Lesson], logits: Sequence[Logits]) -> Bytes:
    """Returns a message; logits: of each lesson's rows in order, float32 [V] each."""
    rows, parts = iter(logits), []
    for one in lessons:
        own = b"".join(row.tobytes() for row in islice(rows, len(one.at)))
        arrays = one.tokens.tobytes(), one.at.tobytes(), own
        parts.append((one.request_id, one.epoch, one.start, one.prompt, *arrays))
    return np.frombuffer(pickle.dumps(parts), np.uint8)


def read_lessons(message: Bytes) -> list[Lesson]:
    """Returns the lessons of a message."""
    lessons = []
    for request_id, epoch, start, prompt, *arrays in pickle.loads(message.data):
        tokens, at = (np.frombuffer(data, np.int32) for data in arrays[:2])
        logits = np.frombuffer(arrays[2], np.float32)
        logits = logits.reshape(len(at), len(logits) // max(1, len(at)))
        lessons.append(Lesson(request_id, epoch, start, tokens, prompt, at, (), logits))
    return lessons


def pieces(version: int, data: bytes) -> Iterator[Bytes]:
    """Yields the messages of a version."""
    header = _PIECE_HEADER.pack(version, len(data))
    for start in range(0, len(data), PIECE):
        yield np.frombuffer(header + data[start : start + PIECE], np.uint8)


class Assembly:
    """Joins the pieces of one version after another, which MPI brings in order."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, message: Bytes) -> tuple[int, memoryview] | None:
        """Takes a piece; returns the version that it completes, and its bytes."""
        version, total = _PIECE_HEADER.unpack_from(message.data)
        self._data += message[HEADER:].data
        if len(self._data) < total:
            return None
        data, self._data = self._data, bytearray()
        return version, memoryview(data)
