"""A row is read and written without loss, whichever schema its line has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.row import FIELDS, Row, flat

LINES = [
    line
    for path in sorted((Path(__file__).parents[2] / "results").rglob("*.jsonl"))
    for line in path.read_text().splitlines()
]
NEWEST = max((line for line in LINES if "round_us" in line), key=lambda line: len(json.loads(line)))
UNSEEN = {
    "laws",
    "tree_nodes",
    "tree_depth",
    "lookup",
    "top_p",
    "stop",
    "grammar",
    "num_prompts",
    "prompts_sha256",
    "recording",
    "forward",
    "weights",
    "t_prefill_s",
    "time_to_first_token_s",
}
UNSEEN |= {"learners", "learner_state", "draft_versions", "acceptance_by_version", "learner"}
UNSEEN |= {"proposal_bytes_per_round", "proposal_wait_us"}  # keys that no committed row has yet
UNSEEN |= {"groups", "draft_wait_us", "per_group", "pool"}
RANKS = [{"device": "A"}, {"device": "A"}, {"device": "B"}]
OWN = {"device_name": "A", "num_drafts": 1, "tp": 2}


def test_every_committed_line_is_read_without_loss() -> None:
    for line in LINES:
        said = json.loads(line)
        row = Row.from_dict(said)
        assert dict(row) == flat(said) and row == flat(said) and len(row) == len(flat(said))


def test_a_line_is_a_configuration_and_measurements() -> None:
    row = Row.from_dict(json.loads(NEWEST))
    assert row.absent <= UNSEEN
    line = row.to_dict()
    assert line["configuration"]["context"] == row.context and "context" not in line
    assert line["tok_per_s"] == row.tok_per_s and len(Row().to_dict()) <= 70
    assert Row.from_dict(line) == row and flat(line) == row


def test_the_committed_rows_have_the_type_of_each_field() -> None:
    """Whole numbers count as numbers, lists and objects only by their kind."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list}
    rows = [Row.from_dict(json.loads(line)) for line in LINES if '"config_digest"' in line]
    for name, found in FIELDS.items():
        plain, _, null = str(found.type).partition(" | ")
        kind = kinds.get(plain.partition("[")[0], dict)
        values = [row[name] for row in rows if name in row]
        assert values or name in UNSEEN, name
        assert all(isinstance(v, kind) or (null and v is None) for v in values), name


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
