"""Rows of loads (mpissd.common.load_row) as a frame, with the times of each request.

method       AR, SD, SD inline, SSD or auto
use          method, T (+ D) and, if N servers share the requests, × N: SSD 4+1, AR 1 × 2
gpus         world_size, drafts and replicas counted
rate         NaN where all requests came at once: max_running of them then decode together
latency_s, ttft_s    arrays [requests], NaN where a request was not answered
folder, commit       as in a frame of runs
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import pandas as pd

from mpissd.common.load_row import LoadRow

Line = dict[str, Any]
COLUMNS = (
    "load_id model draft mode device_name backend tp num_drafts replicas world_size rate seed "
    "prompts num_requests num_answered num_refused num_tokens tok_per_s goodput_per_s good_share "
    "method use gpus latencies ttfts ttft_p50 ttft_p99 tpot_p50 tpot_p99 latency_mean max_running "
    "objective folder time acceptance hit_law"
).split()
_NEEDED = ("load_id", "mode", "device_name", "tp", "world_size", "num_requests", "model")
_BLOCKS = 1000


def complete(line: Mapping[str, Any], folder: Path) -> Line:
    """Returns a line's columns; raises ValueError for a load that figures cannot use."""
    if missing := [name for name in _NEEDED if line.get(name) is None]:
        raise ValueError(f"it has no {missing[0]}")
    try:
        return _columns(LoadRow.from_dict(line), folder)
    except (OSError, EOFError, BadZipFile) as error:
        raise ValueError(str(error)) from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not as a load's values are: {error!r}") from error


def _columns(row: LoadRow, folder: Path) -> Line:
    with np.load(folder / "loads" / f"{row.load_id}.npz") as numbers:
        latencies, ttfts = numbers["latency_s"], numbers["ttft_s"]
    first, each, whole = row.ttft_s or {}, row.tpot_s or {}, row.latency_s or {}
    return {
        **{name: getattr(row, name) for name in COLUMNS if hasattr(row, name)},
        "replicas": row.replicas or 1,
        "method": _method(row),
        "use": _use(row),
        "gpus": row.world_size,
        "latencies": latencies,
        "ttfts": ttfts,
        "ttft_p50": first.get("p50"),
        "ttft_p99": first.get("p99"),
        "tpot_p50": each.get("p50"),
        "tpot_p99": each.get("p99"),
        "latency_mean": whole.get("mean"),
        "folder": str(folder),
        "time": row.provenance.get("time", ""),
    }


def _method(row: LoadRow) -> str:
    if row.mode == "sd" and not row.num_drafts:
        return "SD inline"
    return "auto" if row.mode == "auto" else str(row.mode).upper()


def _use(row: LoadRow) -> str:
    ranks = f"{row.tp}+{row.num_drafts}" if row.num_drafts else f"{row.tp}"
    shared = f" × {row.replicas}" if (row.replicas or 1) > 1 else ""
    return f"{_method(row)} {ranks}{shared}"


def tidy_loads(lines: list[Line]) -> pd.DataFrame:
    """Makes a frame of complete lines; it has all columns also without a line."""
    frame = pd.DataFrame(lines, columns=COLUMNS)
    frame["rate"] = pd.to_numeric(frame["rate"])
    return frame


def speedup(over: pd.DataFrame, rows: pd.DataFrame) -> tuple[float, float, float] | None:
    """Returns mean latency of `over` divided by that of `rows`, and its 95% interval.

    The rows are of the same arrivals; requests are compared in pairs that both answered. The
    interval is a bootstrap over blocks of successive requests, √n long, since requests that wait
    in one queue are alike. None: no common arrivals, or fewer than 8 pairs.
    """
    pairs = [
        (a["latencies"], b["latencies"])
        for _, a in over.iterrows()
        for _, b in rows.iterrows()
        if a["seed"] == b["seed"] and len(a["latencies"]) == len(b["latencies"])
    ]
    if not pairs:
        return None
    both = np.concatenate([np.stack(pair, axis=1) for pair in pairs])
    both = both[~np.isnan(both).any(axis=1)]
    if len(both) < 8:
        return None
    value = both[:, 0].mean() / both[:, 1].mean()
    low, high = np.percentile(_resampled(both), (2.5, 97.5))
    return float(value), float(low), float(high)


def _resampled(both: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the ratios of means of _BLOCKS resamples of blocks."""
    random = np.random.default_rng(0)
    length = max(1, int(np.sqrt(len(both))))
    count = -(-len(both) // length)
    starts = random.integers(0, len(both) - length + 1, (_BLOCKS, count))
    places = (starts[:, :, None] + np.arange(length)).reshape(_BLOCKS, -1)
    means = both[places].mean(axis=1)
    ratios: np.ndarray[Any, Any] = means[:, 0] / means[:, 1]
    return ratios
