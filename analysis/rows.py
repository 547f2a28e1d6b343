"""Reads the data of the figures: result rows as one pandas frame, and device profiles.

The frame has a line for each measured result row. Its columns are `row` (the row itself), the row's
keys (docs/row.md), and these, by which figures group rows:

method       AR, SD, SD inline (no draft GPU of its own), SSD
gpus         world_size: the draft's are counted
alpha        of acceptance model alpha:…, else NaN      p_hit  of hit model p_hit:…, else NaN
policy       uniform:F or geometric:B (any other list of budget B), "" unless SSD
per_gpu      tok_per_s / gpus              per_sequence  tok_per_s / batch_size
low, high    tok_per_s; in points, the least and the most of the runs
round_s, forward_s, all_reduce_s, wait_s, other_s       mean parts of the lead's round
backup_cut   whether a miss is drafted shorter than K
other_draft  the drafts' device if it is another than the lead's
step_s       t_draft_s / lookahead: one sequential draft step
folder, commit    where the row's file is, and what wrote it

A line that cannot be read is left out with a note: file, line and reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from mpissd.common.errors import ConfigError
from mpissd.common.row import KEYS, NEEDED, RETIRED, Row
from mpissd.lab.tables.load import LeftOut, placed_rows
from mpissd.lab.tables.uses import Family, fan_out_text, flags_of, number_of

Line = dict[str, Any]
_DEFAULTS: Line = {  # None for the other keys
    **dict.fromkeys(("num_drafts", "context", "seed"), 0),
    **dict.fromkeys(("lm_head", "fuse", "graph", "inline_draft"), False),
    **dict.fromkeys(("all_reduce", "dtype", "backend"), ""),
    "workload": "gemm",
    "batch_size": 1,
}
_NUMBERS = (
    "hit_rate t_target_s t_draft_s t_growth_s T_SD floor_fraction acceptance_length saguaro_c "
    "prediction_error expected_tok_per_s branch_budget tok_per_s temperature divergence "
    "round_s forward_s all_reduce_s wait_s other_s step_s alpha p_hit per_gpu per_sequence low high"
).split()
_OTHERS = "row folder method gpus policy backup_cut other_draft commit".split()
_OF_CELLS = ["device_name", "pair", "law", "batch_size", "host"]


class NothingLeft(ConfigError):
    """Raised if a figure finds no rows to draw; the message names the rows that it needs."""


@dataclass(frozen=True)
class Data:
    """The data of the figures: a frame of result rows, and device profiles made by `probe`. notes:
    texts on rows that were left out, to which figures add. cells: a frame of configurations with
    predicted tok/s (results/extra-gpu/cells.py). replays: a frame of rows over all prompts of a
    recording, without times (all.jsonl)."""

    rows: pd.DataFrame
    profiles: tuple[Line, ...] = ()
    notes: list[str] = field(default_factory=list)
    cells: pd.DataFrame = field(default_factory=lambda: pd.DataFrame(columns=_OF_CELLS))
    replays: pd.DataFrame = field(default_factory=lambda: tidy([]))


def load(paths: Iterable[str | Path]) -> Data:
    """Reads the files of rows among `paths`, and all runs*.jsonl, cells.jsonl and profiles/*.json
    below folders. Raises ConfigError if a path does not exist, NothingLeft if no row is usable."""
    places = [Path(path) for path in paths]
    for path in places:
        if not os.path.exists(path):  # false also for names that no file can have
            raise ConfigError(f"results {str(path)!r}: no such file or folder")
    left_out = LeftOut()
    rows = placed_rows(places, left_out, (*NEEDED, "round_us"))
    notes = left_out.lines
    if not rows:
        why = "; ".join(notes[-3:]) or "no runs*.jsonl there"
        raise NothingLeft(f"results {', '.join(map(str, places))}: no row is left: {why}")
    files = [file for path in places for file in sorted(path.rglob("cells.jsonl"))]
    cells = [pd.read_json(file, lines=True) for file in files] or [pd.DataFrame(columns=_OF_CELLS)]
    frame = tidy(complete(row, file.parent) for file, row in rows)
    whole = [file for path in places if path.is_dir() for file in path.rglob("all.jsonl")]
    replays = tidy(complete(row, file.parent) for file, row in placed_rows(whole, left_out, NEEDED))
    return Data(frame, tuple(_profiles(places, notes)), notes, pd.concat(cells), replays)


def tidy(lines: Iterable[Line]) -> pd.DataFrame:
    """Makes the frame of result rows from dictionaries; it has all columns even without lines."""
    names = dict.fromkeys((*_OTHERS, *KEYS, *RETIRED, *_NUMBERS))
    frame = pd.DataFrame([{**names, **line} for line in lines], columns=list(names))
    numbers = {name: pd.to_numeric(frame[name], errors="coerce") for name in _NUMBERS}
    return frame.assign(**{name: of.astype(float) for name, of in numbers.items()}).copy()


def _profiles(places: Iterable[Path], notes: list[str]) -> Iterable[Line]:
    """Yields the device profiles that `probe` made from measurements, which contain tables."""
    for file in (file for place in places for file in sorted(place.rglob("profiles/*.json"))):
        try:
            profile = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError):
            notes.append(f"{file}: left out: cut off, or no JSON object")
            continue
        is_device = isinstance(profile, dict) and profile.get("kind") == "device"
        if is_device and isinstance(profile.get("tables"), dict):
            yield profile


def complete(line: Mapping[str, Any], folder: Path | str = "") -> Line:
    """Returns the frame's columns for one result row, with defaults for keys that the row lacks or
    that are null. folder: where the row's file is."""
    row = Row.from_dict({**line, **{k: v for k, v in _DEFAULTS.items() if line.get(k) is None}})
    rate = float(row.tok_per_s)
    gpus = int(row.world_size)
    policy = ""
    if row.mode == "ssd" and row.fan_out:
        is_geometric = str(flags_of(row).get("fan_out")).startswith("geometric")
        policy = f"geometric:{sum(row.fan_out)}" if is_geometric else fan_out_text(row.fan_out)
    # `parts` are the parts of rank 0's mean round, in µs.
    mean = row.round_us.get("mean")
    forward = (row.device_us or {}).get("forward")
    reduce = (row.device_us or {}).get("all_reduce") or 0.0
    wait = ((row.phases_us or {}).get("lead") or {}).get("draft_wait")
    parts = {"round_s": mean}
    if mean is not None and forward is not None and wait is not None:
        other = max(0.0, mean - forward - reduce - wait)
        parts |= {"forward_s": forward, "all_reduce_s": reduce, "wait_s": wait, "other_s": other}
    return {
        **dict.fromkeys((*KEYS, *RETIRED)),
        **row,
        "row": row,
        "folder": str(folder),
        "method": Family(row.mode, row.tp, row.num_drafts).name,
        "gpus": gpus,
        "alpha": number_of(row.acceptance, "alpha"),
        "p_hit": number_of(row.hit_law, "p_hit"),
        "policy": policy,
        "per_gpu": rate / gpus,
        "per_sequence": rate / int(row.batch_size),
        "low": rate,
        "high": rate,
        "step_s": row.t_draft_s / row.lookahead if row.t_draft_s and row.lookahead else None,
        "backup_cut": row.backup_lookahead not in (None, row.lookahead),
        "other_draft": row.other_draft_device,
        "commit": str((row.provenance or {}).get("commit") or ""),
        **{name: None if us is None else us / 1e6 for name, us in parts.items()},
    }
