"""A row is read and written without loss, whichever schema its line has."""

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.records import token_digest
from mpissd.common.row import Row, flat

LINES = [
    line
    for path in sorted((Path(__file__).parents[2] / "results").rglob("*.jsonl"))
    for line in path.read_text().splitlines()
]
NEWEST = max((line for line in LINES if "round_us" in line), key=lambda line: len(json.loads(line)))
RANKS = [{"device": "A"}, {"device": "A"}, {"device": "B"}]
OWN = {"device_name": "A", "num_drafts": 1, "tp": 2}


def test_every_committed_line_is_read_without_loss() -> None:
    for line in LINES:
        said = json.loads(line, parse_constant=pytest.fail)  # no NaN, no infinity
        row = Row.from_dict(said)
        assert dict(row) == flat(said) and row == flat(said) and len(row) == len(flat(said))


def test_a_line_is_a_configuration_and_measurements() -> None:
    row = Row.from_dict(json.loads(NEWEST))
    line = row.to_dict()
    assert line["configuration"]["context"] == row.context and "context" not in line
    assert line["tok_per_s"] == row.tok_per_s and len(Row().to_dict()) <= 70
    assert Row.from_dict(line) == row and flat(line) == row


@pytest.mark.parametrize(
    ("line", "device", "other"),
    [
        ({**OWN, "draft_device_name": "A"}, "A", None),
        ({**OWN, "draft_device_name": "B"}, "B", "B"),
        ({**OWN, "provenance": {"ranks": RANKS}}, "B", "B"),
        ({**OWN, "provenance": {"ranks": RANKS[:2]}}, None, None),
        ({**OWN, "tp": "2", "provenance": {"ranks": RANKS}}, None, None),
        ({}, None, None),
    ],
)
def test_the_draft_s_device(line: dict[str, Any], device: str | None, other: str | None) -> None:
    row = Row.from_dict(line)
    assert (row.draft_device, row.other_draft_device) == (device, other)


def test_a_token_digest_covers_the_first_tokens_of_every_sequence() -> None:
    digest = token_digest({0: [1, 2, 3], 1: [4, 5]}, 2)
    assert digest == token_digest({1: [4, 5, 6, 7], 0: [1, 2]}, 2)
    for other in ({0: [1, 2], 1: [4, 6]}, {0: [1, 2], 2: [4, 5]}, {0: [4, 5], 1: [1, 2]}):
        assert digest != token_digest(other, 2)
