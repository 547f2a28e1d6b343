"""Acceptance statistics as other engines write them become counts of rounds by k."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.spec.acceptance import read_histogram, resolve_acceptance

# 100 drafts of one engine, 20 of another; at least 1, 2, 3 tokens accepted.
METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 360.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 20.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="1"} 1.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",model_name="m",position="2"} 0.0
"""
VLLM = {"metrics": {"speculative_decoding": {"acceptance_histogram": [39, 1, 0, 3]}}}
SGLANG = {"text": "…", "meta_info": {"spec_verify_ct": 6, "spec_accept_histogram": [1, 2, 3]}}


def written(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "stats"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("content", "counts"),
    [
        (METRICS, [30, 39, 31, 20]),
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
        METRICS.replace('position="1"', 'position="7"'),
        METRICS.replace("80.0", "8.0"),  # more reached position 1 than position 0
        METRICS.replace("100.0", "NaN"),
        METRICS + METRICS.replace('model_name="', 'model_name="another-'),
        "\n".join(line for line in METRICS.splitlines() if "per_pos" not in line),
    ],
)
def test_anything_else_is_one_line_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(ConfigError) as raised:
        read_histogram(path)
    assert str(path) in str(raised.value)


def test_the_law_of_a_vllm_server_has_its_marginal_rates(tmp_path: Path) -> None:
    law = resolve_acceptance(f"histogram:{written(tmp_path, METRICS)}", 3)
    reached = [90 / 120, 51 / 120, 20 / 120]
    assert law.hazards == pytest.approx((reached[0], 51 / 90, 20 / 51))
    assert law.mean_accepted == pytest.approx(sum(reached))  # vLLM's mean length
