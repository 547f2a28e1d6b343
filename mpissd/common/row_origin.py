"""Where a result row comes from: its devices, its sweep, and its command line."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Origin:
    """The part of common.row.Row that reads its provenance."""

    num_drafts: int
    tp: int
    device_name: str
    draft_device_name: str | None
    provenance: Mapping[str, Any]
    absent: frozenset[str]

    @property
    def draft_device(self) -> str | None:
        """Device name of the first draft rank; None if there is none or it is unknown."""
        if not self.num_drafts:
            return None
        if "draft_device_name" not in self.absent:
            return self.draft_device_name
        ranks, place = self._origin("ranks"), self.tp
        if not isinstance(ranks, list) or type(place) is not int or not 0 <= place < len(ranks):
            return None
        return ranks[place].get("device") if isinstance(ranks[place], Mapping) else None

    @property
    def other_draft_device(self) -> str | None:
        """Device name of the first draft rank if it differs from the lead's, else None."""
        name = self.draft_device
        return None if name == self.device_name else name

    @property
    def sweep(self) -> dict[str, Any] | None:
        """The row's sweep: its id, task, repeat and flags; None in a row of `run`."""
        sweep = self._origin("sweep")
        return sweep if isinstance(sweep, dict) else None

    @property
    def command(self) -> list[str]:
        """The words of the command line that wrote the row."""
        return [str(word) for word in self._origin("command") or ()]

    def _origin(self, name: str) -> Any:
        return (self.provenance or {}).get(name)
