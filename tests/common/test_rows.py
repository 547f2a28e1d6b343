"""What rows say of their drafts' device, also those of before there was a key for it."""

from __future__ import annotations

from typing import Any

import pytest

from mpissd.common.rows import draft_device, other_draft_device

RANKS = [{"device": "A"}, {"device": "A"}, {"device": "B"}]
OWN = {"device_name": "A", "num_drafts": 1, "tp": 2}


@pytest.mark.parametrize(
    ("row", "device", "other"),
    [
        ({**OWN, "draft_device_name": "A"}, "A", None),
        ({**OWN, "draft_device_name": "B"}, "B", "B"),
        ({**OWN, "provenance": {"ranks": RANKS}}, "B", "B"),
        ({**OWN, "draft_device_name": "A", "provenance": {"ranks": RANKS}}, "A", None),
        ({**OWN, "provenance": {"ranks": RANKS[:2]}}, None, None),
        ({**OWN, "provenance": {"ranks": [1, 2, 3]}}, None, None),
        ({**OWN, "provenance": None}, None, None),
        ({**OWN, "tp": "2", "provenance": {"ranks": RANKS}}, None, None),
        ({**OWN, "num_drafts": 0, "draft_device_name": None}, None, None),
        ({}, None, None),
    ],
)
def test_the_draft_s_device(row: dict[str, Any], device: str | None, other: str | None) -> None:
    assert (draft_device(row), other_draft_device(row)) == (device, other)
