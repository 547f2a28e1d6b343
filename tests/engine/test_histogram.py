"""Acceptance statistics as other engines write them become counts of rounds by k."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.spec.acceptance import read_histogram

VLLM = {"metrics": {"speculative_decoding": {"acceptance_histogram": [39, 1, 0, 3]}}}
SGLANG = {"text": "…", "meta_info": {"spec_verify_ct": 6, "spec_accept_histogram": [1, 2, 3]}}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "stats"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        (VLLM, [39, 1, 0, 3]),
        ([VLLM, VLLM], [78, 2, 0, 6]),
        (json.dumps(VLLM) + "\n" + json.dumps(SGLANG) + "\n", [40, 3, 3, 3]),
        (SGLANG, [1, 2, 3]),
        (
            {"sglext": {"spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3]}},
            [11, 14, 11, 4, 0, 3],
        ),
        ({"counts": [1, 2]}, [1, 2]),
        ({"mode": "ssd", "accept_histogram": [4, 5]}, [4, 5]),
        ([7, 0, 1], [7, 0, 1]),
        ("7\n0\n1\n", [7, 0, 1]),
        ("7, 0, 1\n", [7, 0, 1]),
    ],
)
def test_counts_of_every_form(tmp_path: Path, content: Any, counts: list[int]) -> None:
    assert read_histogram(written(tmp_path, content)) == counts


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        "[0, 0]",
        "[1, -1]",
        '{"counts": [1, null]}',
        '{"counts": [1, 2]}\n{"cou',
    ],
)
def test_anything_else_is_one_line_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        read_histogram(path)
    assert str(path) in str(raised.value)
