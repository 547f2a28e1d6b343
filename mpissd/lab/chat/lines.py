"""The messages between the two halves of a chat: a JSON object a line, through pipes.

Front to ranks: {"ask": messages, "mode": name}, {"stop": true}, {"leave": true} (mpirun does not
pass the end of its stdin on). Ranks to front: {"ready": text}, {"pieces": [[text, source], …],
"margin": text}, {"end": {…}} (Ending), {"refused": text}.
"""

from __future__ import annotations

import json
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

_CHUNK = 1 << 16


@dataclass(frozen=True)
class Ending:
    """The end of an answer: why ("stop_token", "stop", "length" or "stopped" by the user), and
    numbers. prompt_tokens: of the whole conversation; reused: those whose KV was there already."""

    ended: str
    text: str
    summary: str
    num_tokens: int
    num_rounds: int
    seconds: float
    prompt_tokens: int
    reused: int


def packed(message: Mapping[str, Any]) -> bytes:
    """Returns a message as a line."""
    return json.dumps(message, ensure_ascii=False).encode() + b"\n"


class Inbox:
    """Messages that arrive on a file descriptor. Lines that are none are passed to `other`."""

    def __init__(self, file: BinaryIO | int, other: Any = None) -> None:
        self._descriptor = file if isinstance(file, int) else file.fileno()
        self._rest = b""
        self._found: list[dict[str, Any]] = []
        self._other = other
        self.is_closed = False

    def take(self, wait_s: float | None = None) -> dict[str, Any] | None:
        """Returns the next message; None if none came in wait_s seconds (None: waits for one), or
        if the other side has left."""
        while not self._found and not self.is_closed:
            if not select.select([self._descriptor], [], [], wait_s)[0]:
                return None
            self._read()
        return self._found.pop(0) if self._found else None

    def _read(self) -> None:
        new = os.read(self._descriptor, _CHUNK)
        self.is_closed = not new
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            message = _parsed(line)
            if message is not None:
                self._found.append(message)
            elif self._other is not None and line.strip():
                self._other(line.decode(errors="replace"))


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
