"""Result rows that can be compared, and their files, for the tests of mpissd.lab.tables."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpissd.common.row import Row

SHARED = {"workload": "gemm", "seed": 0, "token_digest": "f00d", "num_rounds": 60, "world_size": 1}


def ar(**changed: Any) -> Row:
    row = {
        "schema": 1, "run_id": "ar", "mode": "ar", "backend": "cupy", "device_name": "A GPU",
        "dtype": "float16", "tp": 1, "num_drafts": 0, "all_reduce": "solo", "graph": True,
        "fuse": False, "lm_head": False, "context": 0, "target": "llama-3.1-8b", "draft": None,
        "lookahead": 0, "batch_size": 1, "acceptance": None, "tok_per_s": 62.5,
        "accept_histogram": [1000], "round_us": times(16_000), "t_target_s": 0.016, "T_SD": None,
        "provenance": {"command": ["run"], "ranks": [{"device": "A GPU"}]},
    }  # fmt: skip
    return Row.from_dict(row | SHARED | changed)


def sd(run_id: str, **changed: Any) -> Row:
    """SD at K = 4 and alpha = .9."""
    row = ar() | {
        "mode": "sd", "run_id": run_id, "draft": "llama-3.2-1b", "lookahead": 4,
        "acceptance": "alpha:0.9", "tok_per_s": 131.6, "t_target_s": 0.0151, "T_SD": 1.06,
        "accept_histogram": [1000, 900, 810, 729, 6561], "round_us": times(31_100),
    }  # fmt: skip
    return row | changed


def times(us: float) -> dict[str, float]:
    """Rounds that all take as long."""
    return dict.fromkeys(("mean", "p50", "p90", "p99"), us)


def write(path: Path, *rows: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(dict(row)) + "\n" for row in rows))
    return path
