"""The speculation cache: maps a predicted verification outcome to the branch that was grown for it.

A key is (round, request id, epoch, k, t*): the outcome v = (k, t*) of verifying round `round`
(Kumar, Dao, May 2026, §3). The cache holds the keys of one round only; a key of an older round
never matches.
"""

from __future__ import annotations

from collections.abc import Iterable

Key = tuple[int, int, int, int, int]


class SpeculationCache:
    """A dictionary from outcome keys to lanes, a lane being one branch of the current growth."""

    def __init__(self) -> None:
        self._lanes: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def fill(self, keys: Iterable[Key]) -> None:
        """Replaces the contents: lane n answers the n-th key."""
        self._lanes = {key: lane for lane, key in enumerate(keys)}

    def lookup(self, key: Key) -> int | None:
        """Returns the lane that answers this outcome, or None for a miss."""
        return self._lanes.get(key)

    def clear(self) -> None:
        """Removes all keys: every lookup misses until the next fill."""
        self._lanes = {}
