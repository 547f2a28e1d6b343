"""What was left out and why: collected while rows are read and chosen, told in one line each."""

from __future__ import annotations

from mpissd.common.errors import ConfigError


class NothingLeft(ConfigError):
    """No row that a figure could be drawn from; the message says what it would need."""


class Notes:
    """Lines in the order in which they came up, each once."""

    def __init__(self) -> None:
        self._lines: dict[str, None] = {}

    def add(self, line: str) -> None:
        """Keeps a line."""
        self._lines[line] = None

    def left_out(self, count: int, what: str, why: str) -> None:
        """Keeps "left out N rows …" where there were any."""
        if count:
            self.add(f"left out {count} row{'s' if count > 1 else ''} {what}: {why}")

    @property
    def lines(self) -> tuple[str, ...]:
        """Everything that was noted."""
        return tuple(self._lines)
