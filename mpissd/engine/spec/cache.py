"""The speculation cache: predicted verification outcome → the branch grown for it.

A key is (round, request id, epoch, k, t*): the outcome v = (k, t*) of verifying round `round`
(Kumar, Dao, May 2026, §3). One generation lives at a time; a key of an older round never matches.
"""

from __future__ import annotations

from collections.abc import Iterable

Key = tuple[int, int, int, int, int]


class SpeculationCache:
    """A dictionary of lanes: which branch of the growth answers which outcome."""

    def __init__(self) -> None:
        self._lanes: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def fill(self, keys: Iterable[Key]) -> None:
        """Starts a new generation; lane n answers the n-th key."""
        self._lanes = {key: lane for lane, key in enumerate(keys)}

    def lookup(self, key: Key) -> int | None:
        """The lane that answers this outcome, or None: a miss."""
        return self._lanes.get(key)

    def clear(self) -> None:
        """Forgets the generation: every lookup misses until the next fill."""
        self._lanes = {}
