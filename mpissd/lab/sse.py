"""Parses server-sent events, following WHATWG's HTML standard (section 9.2)."""

import re
from collections.abc import Iterator
from typing import NamedTuple

DONE = "[DONE]"  # the data of the event that ends a stream in OpenAI's API
# Reading JSON may raise these exceptions if the JSON has another structure than expected.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


class StreamEvent(NamedTuple):
    """One server-sent event. kind: its type, which is "message" unless the stream names another."""

    kind: str
    data: str


class EventStream:
    """A parser of the events in one HTTP response, whose bytes may be split anywhere."""

    def __init__(self) -> None:
        self._parts = list[bytes]()  # received parts of an incomplete line
        self._is_first = True  # whether no line has ended yet
        self._ends_in_return = False  # If so, an LF at the start of the next bytes ends no line.
        self._kind = "message"
        self._data = list[str]()

    def push(self, new: bytes) -> Iterator[StreamEvent]:
        """Takes the next bytes of the response; yields the events that these bytes complete."""
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
