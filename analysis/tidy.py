"""Rows as a frame: the row's own keys (docs/row.md), and columns that figures group by.

method       AR, SD, SD inline (no draft GPU of its own), SSD
gpus         world_size: the draft's are counted
alpha        of acceptance law alpha:…, else NaN        p_hit  of hit law p_hit:…, else NaN
policy       uniform:F or geometric:B (any other list of budget B), "" unless SSD
per_gpu      tok_per_s / gpus              per_sequence  tok_per_s / batch_size
low, high    95% interval of tok_per_s (gain.interval)
round_s, forward_s, all_reduce_s, wait_s, other_s       mean parts of the lead's round
backup_cut   whether a miss is drafted shorter than K
other_draft  the drafts' device, where it is another than the lead's
real_…       tok_per_s that an SSD row would give with a real pair's hits (real_pairs.py)
step_s       t_draft_s / lookahead: one sequential draft step
"""

from __future__ import annotations

import math
import re
from typing import Any

import pandas as pd

from analysis.gain import interval
from mpissd.common.real_pairs import BESIDE, under_real_pairs
from mpissd.common.row import KEYS, RETIRED, Row
from mpissd.lab.tables.best import fan_out_text

Line = dict[str, Any]
REAL = tuple(f"real_{name}" for name in BESIDE)  # tok/s with the hits of real pairs
NEEDED = ("run_id", "mode", "device_name", "target", "tok_per_s", "round_us", "world_size", "tp")
_DEFAULTS: Line = {  # None for the other keys
    **dict.fromkeys(("num_drafts", "lookahead", "context", "seed"), 0),
    **dict.fromkeys(("lm_head", "fuse", "graph", "inline_draft"), False),
    **dict.fromkeys(("all_reduce", "dtype", "backend", "folder"), ""),
    "workload": "gemm",
    "batch_size": 1,
}
_NUMBERS = (
    "hit_rate t_target_s t_draft_s t_growth_s T_SD floor_fraction acceptance_length saguaro_c "
    "predicted_tok_per_s prediction_error expected_tok_per_s sampling_sd branch_budget "
    "tok_per_s temperature divergence round_s forward_s all_reduce_s wait_s other_s step_s"
).split()


def complete(line: Line) -> Line:
    """Adds the derived columns to a row, and defaults for keys that it lacks.

    Raises ValueError if a needed key is missing, or its value is none that a row has.
    """
    if missing := [name for name in NEEDED if line.get(name) is None]:
        raise ValueError(f"it has no {missing[0]}")
    row = Row.from_dict({**_DEFAULTS, **line})
    try:
        if not (0 < row.tok_per_s < math.inf and row.world_size >= 1):
            raise ValueError(f"{row.tok_per_s} tok/s on {row.world_size} GPUs")
        return {**dict.fromkeys((*KEYS, *RETIRED)), **row, **_derived(row)}
    except (TypeError, AttributeError, KeyError, ArithmeticError) as error:
        raise ValueError(f"not as a row's values are: {error!r}") from error


def tidy(rows: list[Line]) -> pd.DataFrame:
    """Makes a frame of complete rows; without one, figures of loads alone can be drawn."""
    known = dict.fromkeys((*KEYS, *RETIRED, *_NUMBERS, *REAL))
    frame = pd.DataFrame(rows) if rows else pd.DataFrame(columns=list(known))
    for name in (*_NUMBERS, *REAL):
        frame[name] = pd.to_numeric(frame[name], errors="coerce").astype(float)
    return frame


def _derived(row: Row) -> Line:
    low, high = interval(row)
    if not 0 < low <= high < math.inf:
        raise ValueError(f"{row.tok_per_s} tok/s with an interval of {low:g} to {high:g}")
    rate, gpus = float(row.tok_per_s), int(row.world_size)
    steps = row.lookahead or None
    draft = row.t_draft_s
    return {
        "method": _method(row),
        "gpus": gpus,
        "alpha": _law(row.acceptance, "alpha"),
        "p_hit": _law(row.hit_law, "p_hit"),
        "policy": _policy(row),
        "per_gpu": rate / gpus,
        "per_sequence": rate / int(row.batch_size),
        "low": low,
        "high": high,
        "step_s": draft / steps if draft and steps else None,
        "backup_cut": row.backup_lookahead not in (None, row.lookahead),
        "other_draft": row.other_draft_device,
        "commit": str((row.provenance or {}).get("commit") or ""),
        **_parts(row),
        **under_real_pairs(row),
    }


def _method(row: Row) -> str:
    if row.mode == "sd" and not row.num_drafts:
        return "SD inline"
    return str(row.mode).upper()


def _law(text: str | None, name: str) -> float:
    """Returns the number of a law `name:number`, or NaN for another law."""
    match = re.fullmatch(rf"{name}:([0-9.eE+-]+)", text or "")
    return float(match[1]) if match else float("nan")


def _policy(row: Row) -> str:
    if row.mode != "ssd" or not row.fan_out:
        return ""
    is_geometric = _said_fan_out(row).startswith("geometric")
    return f"geometric:{sum(row.fan_out)}" if is_geometric else fan_out_text(row.fan_out)


def _said_fan_out(row: Row) -> str:
    """Returns --fan_out as given to the sweep or on the command line; "" if neither has it."""
    flags = (row.sweep or {}).get("flags") or {}
    said = [word.split("=", 1)[1] for word in row.command if word.startswith("--fan_out=")]
    return str(flags.get("fan_out") or (said[-1] if said else ""))


def _parts(row: Row) -> Line:
    """Returns mean seconds of the lead's round: forward, all-reduces, waiting for the draft, the
    rest."""
    mean = row.round_us.get("mean")
    device, lead = row.device_us or {}, (row.phases_us or {}).get("lead") or {}
    forward, reduce = device.get("forward"), device.get("all_reduce")
    wait = lead.get("draft_wait")
    names = ("round_s", "forward_s", "all_reduce_s", "wait_s", "other_s")
    if None in (mean, forward, wait):
        return {**dict.fromkeys(names), "round_s": None if mean is None else mean / 1e6}
    other = max(0.0, mean - forward - (reduce or 0.0) - wait)
    values = (mean, forward, reduce or 0.0, wait, other)
    return {name: value / 1e6 for name, value in zip(names, values, strict=True)}
