"""What a result row says, also one of an earlier version (docs/row.md has the keys)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def draft_device(row: Row) -> str | None:
    """The first draft rank's device; None without a draft rank, or where that is not known."""
    if not row.get("num_drafts"):
        return None
    if "draft_device_name" in row:
        return _text(row["draft_device_name"])
    ranks = (row.get("provenance") or {}).get("ranks")
    place = row.get("tp")
    if not isinstance(ranks, list) or type(place) is not int or not 0 <= place < len(ranks):
        return None
    return _text(ranks[place].get("device")) if isinstance(ranks[place], Mapping) else None


def other_draft_device(row: Row) -> str | None:
    """The same where it is another than the lead's; None where it is not."""
    name = draft_device(row)
    return None if name == row.get("device_name") else name


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
