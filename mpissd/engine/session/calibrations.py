"""What a machine has measured of itself so far, for the configurations to come.

Forwards are timed once for each row count of a model, host costs once for each configuration that
differs in more than its draws. A row says since when what it was predicted from is known.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import datetime, timezone
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Value = TypeVar("Value")


class Calibrations:
    """Measurements by what they are of, kept as long as that lives."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[Hashable, tuple[Any, datetime]]]
        self._known = WeakKeyDictionary()
        self._asked: list[datetime] = []

    def restart(self) -> None:
        """`since` counts what is asked for from here on."""
        self._asked.clear()

    @property
    def since(self) -> str:
        """When the oldest measurement was made that was asked for since restart (ISO 8601, UTC)."""
        return min(self._asked).isoformat(timespec="milliseconds")

    def once(self, owner: Any, key: Hashable, measure: Callable[[], Value]) -> Value:
        """What `measure` found for (owner, key), now or earlier.

        It is as old as the oldest that `measure` asked for itself.

        Where it is collective, its ranks have to ask for the same things in the same order.
        """
        known = self._known.setdefault(owner, {})
        if key not in known:
            before = len(self._asked)
            value = measure()
            known[key] = value, min([datetime.now(timezone.utc), *self._asked[before:]])
        value, at = known[key]
        self._asked.append(at)
        found: Value = value
        return found
