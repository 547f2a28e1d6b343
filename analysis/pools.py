"""Rows of sized pools (results/pools) as a frame.

method       AR, SD inline, or SSD: with a draft each where targets is 1, else shared by so many
pair         target/draft
per_gpu      tok/s over the GPUs of one draft's targets and the draft
token_ms     milliseconds a token of a sequence
theory       tok/s over these GPUs by queueing theory, of a pool
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

Line = dict[str, Any]
COLUMNS = (
    "device_name backend pair acceptance hit_law mode method tp num_drafts batch_size targets gpus "
    "lookahead fan_out tok_per_s per_gpu token_ms hit_rate wait_us theory folder time"
).split()
_NEEDED = ("device_name", "pair", "mode", "tp", "batch_size", "targets", "gpus", "tok_per_s")


def complete(line: Mapping[str, Any], folder: Path) -> Line:
    """Returns a line's columns; raises ValueError for a row that figures cannot use."""
    if missing := [name for name in _NEEDED if line.get(name) is None]:
        raise ValueError(f"it has no {missing[0]}")
    try:
        theory = line.get("theory_tok_per_s")
        return {
            **{name: line.get(name) for name in COLUMNS},
            "backend": "emulated",
            "method": "SD inline" if line["mode"] == "sd" else str(line["mode"]).upper(),
            "per_gpu": line["tok_per_s"] / line["gpus"],
            "token_ms": 1e3 * line["targets"] * line["batch_size"] / line["tok_per_s"],
            "theory": None if theory is None else theory / line["gpus"],
            "folder": str(folder),
            "time": "",
        }
    except (TypeError, ZeroDivisionError) as error:
        raise ValueError(f"not as a pool's values are: {error!r}") from error


def tidy_pools(lines: list[Line]) -> pd.DataFrame:
    """Returns the frame; without lines it has the columns alone."""
    frame = pd.DataFrame(lines, columns=COLUMNS)
    return frame.astype({"device_name": "object"})
