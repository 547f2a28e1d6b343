"""Adds the rounds of a run to the measured limits: its delays from outcome to verification.

    python -m mpissd.lab.limits.rounds OUT TRACE     (results/h200-limit/measure.sh runs it)

It takes the last row of OUT/runs.jsonl and the trace of that run, and adds rows to OUT (bars.py).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.row import Row
from mpissd.lab.limits.bars import add

_SKIPPED = 1  # The first round, which admits the sequences and is a miss.


def hit_paths(trace: Mapping[str, Any], tp: int) -> dict[str, NDArray[np.float64]]:
    """Returns seconds of every hit round from two instants to the launch on the last target rank.

    "over": from when the lead's host saw that the previous forward was over and its ids copied.
    "outcome": from when the lead had that forward's (k, t*). Both are on the lead's clock.
    """
    ends: dict[tuple[int, str], dict[int, float]] = defaultdict(dict)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["tid"] == 0 and event["pid"] < tp:
            place = event["pid"], event["name"]
            ends[place][event["args"]["round"]] = event["ts"] + event["dur"]
    rounds = sorted(ends[0, "launch"])[_SKIPPED:]
    launched = np.array([[ends[rank, "launch"][r] for r in rounds] for rank in range(tp)])
    last = launched.max(axis=0)
    starts = {"over": "device_wait", "outcome": "sample"}
    return {
        name: (last - [ends[0, phase][r - 1] for r in rounds]) * 1e-6
        for name, phase in starts.items()
    }


def rounds_of(row: Row) -> dict[str, Any]:
    """Returns the values of a run's row that the bars read."""
    times, idle = row.round_us, (row.device_us or {}).get("idle")
    return {
        "what": "rounds",
        "run_id": row.run_id,
        "mode": row.mode,
        "model": row.target,
        "tp": row.tp,
        "lookahead": row.lookahead,
        "num_rounds": times["n"],
        "stable": row.stable,
        "p99_over_p50": times["p99"] / times["p50"],
        "p50_s": times["p50"] * 1e-6,
        "tok_per_s": row.tok_per_s,
        "acceptance_length": row.acceptance_length,
        "hit_rate": row.hit_rate,
        "t_target_s": row.t_target_s,
        "floor_fraction": row.floor_fraction,
        "idle_s": None if idle is None else idle * 1e-6,
        "phases_us": row.phases_us,
    }


def last_row(out: Path) -> Row:
    """Returns the last row of OUT/runs.jsonl; raises ConfigError if there is none."""
    try:
        lines = (out / "runs.jsonl").read_text().splitlines()
        row = Row.from_dict(json.loads(lines[-1]))
    except (OSError, IndexError, ValueError) as error:
        raise ConfigError(f"{out}/runs.jsonl: no row ({error})") from error
    return row


def main(arguments: Iterable[str]) -> int:
    """Adds the run's rows and returns the exit code."""
    out, path = (Path(argument) for argument in arguments)
    row, trace = last_row(out), json.loads(path.read_text())
    if trace["otherData"]["config_digest"] != row.config_digest:
        raise ConfigError(f"{path}: not the trace of {row.run_id}")
    rows = [rounds_of(row)]
    if row.mode == "ssd":
        for start, seconds in hit_paths(trace, row.tp).items():
            p50, p99 = (float(p) for p in np.percentile(seconds, [50, 99]))
            same = {key: rows[0][key] for key in ("run_id", "model", "tp", "lookahead", "stable")}
            rows.append({"what": "hit_path", "start": start, **same, "num_rounds": len(seconds),
                         "p50_s": p50, "p99_s": p99})  # fmt: skip
    add(out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
