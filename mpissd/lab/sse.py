"""Parses server-sent events as WHATWG's HTML standard (section 9.2) interprets an event stream."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

DONE = "[DONE]"  # data of the event that ends a stream of OpenAI's API
# What JSON of another form than expected raises when it is read.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class StreamEvent(NamedTuple):
    """A server-sent event; kind is "message" if the stream names no other."""

    kind: str
    data: str


class EventStream:
    """The events of one response, whose bytes may arrive in any pieces."""

    def __init__(self) -> None:
        self._parts = list[bytes]()  # of the line that is still incomplete
        self._is_first = True  # whether no line has ended yet
        self._ends_in_return = False  # whether the last bytes ended in CR, to which LF may belong
        self._kind = "message"
        self._data = list[str]()

    def push(self, new: bytes) -> Iterator[StreamEvent]:
        """Takes the next bytes; yields the events that they complete."""
        if not new:
            return
        if self._ends_in_return:
            new = new.removeprefix(b"\n")
        self._ends_in_return = new.endswith(b"\r")
        *lines, rest = re.split(rb"\r\n|\r|\n", new)
        if lines:
            lines[0] = b"".join([*self._parts, lines[0]])
            self._parts = []
        self._parts.append(rest)
        for line in lines:
            text = line.decode(errors="replace")
            text = text.removeprefix("\ufeff") if self._is_first else text  # a byte order mark
            self._is_first = False
            field, _, value = text.partition(":")
            if field == "data":
                self._data.append(value.removeprefix(" "))
            elif field == "event":
                self._kind = value.removeprefix(" ") or "message"
            elif not text:
                if self._data:
                    yield StreamEvent(self._kind, "\n".join(self._data))
                self._kind = "message"
                self._data = []
