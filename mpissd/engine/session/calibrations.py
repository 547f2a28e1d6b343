"""Cache of calibration measurements, shared by the configurations that run on one machine.

Forwards are timed once for each row count of a model, host costs once for each configuration that
differs in more than its seed. A result row records the age of the measurements it was predicted
from.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from datetime import datetime, timezone
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

Value = TypeVar("Value")


class Calibrations:
    """Measurements by owner and key; an owner's entries are dropped when it is collected."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Any, dict[Hashable, tuple[Any, datetime]]]
        self._known = WeakKeyDictionary()
        self._asked: list[datetime] = []

    def restart(self) -> None:
        """Starts a new list of used measurements, which `since` reports on."""
        self._asked.clear()

    @property
    def since(self) -> str:
        """Time of the oldest measurement used since `restart`, as ISO 8601 in UTC."""
        return min(self._asked).isoformat(timespec="milliseconds")

    def once(self, owner: Any, key: Hashable, measure: Callable[[], Value]) -> Value:
        """Returns the value of `measure` for (owner, key), from the cache if it was called before.

        A value is as old as the oldest measurement that `measure` itself used. If `measure` is
        collective, all ranks must call `once` with the same keys in the same order.
        """
        known = self._known.setdefault(owner, {})
        if key not in known:
            before = len(self._asked)
            value = measure()
            known[key] = value, min([datetime.now(timezone.utc), *self._asked[before:]])
        value, at = known[key]
        self._asked.append(at)
        result: Value = value
        return result
