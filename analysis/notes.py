"""Notes on rows that were left out and why, collected while reading, one line each."""

from __future__ import annotations

from mpissd.common.errors import ConfigError


class NothingLeft(ConfigError):
    """Raised if there is no row that a figure could be drawn from; the message says what is
    needed."""


class Notes:
    """A set of lines in the order in which they were added."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Adds a line, unless it is there already."""
        self._lines[line] = None

    def left_out(self, count: int, what: str, why: str) -> None:
        """Adds "left out N rows …" if N is not 0."""
        if count:
            self.add(f"left out {count} row{'s' if count > 1 else ''} {what}: {why}")

    @property
    def lines(self) -> tuple[str, ...]:
        """All lines."""
        return tuple(self._lines)
