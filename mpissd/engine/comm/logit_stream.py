"""Messages from the lead to a learner: tokens that a round committed, and the target's logits.

A message is int32 numbers: [sequences, columns], then for each sequence a head of six, its new
tokens and the positions of its rows, and after all sequences their logits, float32 bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints

Logits = NDArray[np.float32]
Sent = Mapping[tuple[int, int], int]  # tokens that the learner has, by (request id, epoch)
_HEAD = 6  # id, epoch, start, tokens, prompt, rows


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


class Outlet(Protocol):
    """Sends messages to a learner without ever blocking."""

    def has_room(self) -> bool:
        """Returns whether another message may be sent."""

    def send(self, numbers: Ints) -> None:
        """Starts to send a message, which the caller must not change; for it there is room."""


def write(lessons: Sequence[Lesson], logits: Sequence[Logits]) -> Ints:
    """Returns a message; logits: of each lesson's rows in order, float32 [V] each."""
    columns = len(logits[0]) if logits else 0
    parts: list[Ints] = [np.array([len(lessons), columns], np.int32)]
    for one in lessons:
        sizes = len(one.tokens), one.prompt, len(one.at)
        head = [one.request_id, one.epoch, one.start, *sizes]
        parts += [np.array(head, np.int32), one.tokens, one.at]
    return np.concatenate([*parts, *(row.view(np.int32) for row in logits)])


def read(message: Ints) -> list[Lesson]:
    """Returns the lessons of a message; raises ProtocolError for one of another size."""
    count, columns = message[:2].tolist()
    found, at = list[tuple[list[int], Ints, Ints]](), 2
    for _ in range(count):
        head = message[at : at + _HEAD].tolist()
        tokens, rows = head[3], head[5]
        at += _HEAD
        found.append((head, message[at : at + tokens], message[at + tokens : at + tokens + rows]))
        at += tokens + rows
    total = sum(head[5] for head, _, _ in found)
    if len(message) != at + total * columns:
        raise ProtocolError(f"lessons of {len(message)} numbers, expected {at + total * columns}")
    logits = message[at:].view(np.float32).reshape(total, columns)
    ends = np.cumsum([0, *(head[5] for head, _, _ in found)]).tolist()
    return [
        Lesson(
            head[0],
            head[1],
            head[2],
            tokens,
            head[4],
            places,
            (),
            logits[ends[n] : ends[n + 1]],
        )
        for n, (head, tokens, places) in enumerate(found)
    ]
