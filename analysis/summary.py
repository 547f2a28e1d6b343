"""Tables of the report: the best of each method, and where the rows came from."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.interval import ratio
from analysis.load import Data
from analysis.notes import Notes, NothingLeft
from analysis.select import Case, cases, on_machine, plain, points

_NAMES = ("tok_per_s", "low", "high")


def best_of_each(data: Data, machine: str) -> pd.DataFrame:
    """For every pair and T of a machine: each method at its best K, at the alpha with most rows."""
    try:
        here = on_machine(Data(data.rows, (), Notes()), machine)
    except NothingLeft:
        return pd.DataFrame()
    wanted = plain(here.rows) & (here.rows["batch_size"] == 1)
    lines = []
    for case in cases(here, wanted, ["method"]):
        rows = case.rows[(case.rows["batch_size"] == 1) & case.rows["alpha"].notna()]
        ar = case.ar_on(case.tp)
        if not len(rows) or ar is None:
            continue
        alpha = rows["alpha"].value_counts().index[0]
        lines += _lines(case, rows[rows["alpha"] == alpha], ar)
    return pd.DataFrame(lines)


def _lines(case: Case, rows: pd.DataFrame, ar: pd.Series) -> list[dict[str, Any]]:
    found = [("AR", ar)]
    wide = case.ar_on(case.tp + 1)
    found += [] if wide is None else [("AR", wide)]
    for method in ("SD inline", "SD"):
        found += [(method, p) for p in _best(rows[rows["method"] == method], ["lookahead"])]
    ssd = rows[rows["method"] == "SSD"]
    for law, group in ssd.groupby("hit_law"):
        found += [(f"SSD, {law}", p) for p in _best(group, ["lookahead", "policy"])]
    return [_line(case, method, point, ar) for method, point in found]


def _best(rows: pd.DataFrame, by: list[str]) -> list[pd.Series]:
    found = points(rows, by)
    return [found.loc[found["tok_per_s"].idxmax()]] if len(found) else []


def _line(case: Case, method: str, point: pd.Series, ar: pd.Series) -> dict[str, Any]:
    gain, low, high = ratio(*(point[n] for n in _NAMES), *(ar[n] for n in _NAMES))
    share = ar["gpus"] / point["gpus"]
    drafted = method != "AR"
    return {
        "pair": case.label,
        "method": method,
        "GPUs": int(point["gpus"]),
        "α": f"{point['alpha']:g}" if drafted else "",
        "K": int(point["lookahead"]) if drafted else "",
        "hits": f"{point['hit_rate']:.2f}" if pd.notna(point["hit_rate"]) else "",
        "tok/s": float(point["tok_per_s"]),
        "per GPU": float(point["per_gpu"]),
        "gain": f"{gain:.2f}× ({low:.2f}–{high:.2f})",
        "gain per GPU": f"{gain * share:.2f}×",
        "rows": int(point["n"]),
    }


def sources(data: Data) -> pd.DataFrame:
    """A line a folder and machine: rows, when, which version, hosts, packages."""
    lines = []
    for (folder, machine), group in data.rows.groupby(["folder", "device_name"], sort=True):
        facts = [p for p in group["provenance"] if isinstance(p, dict)]
        started = sorted(str(p["started_at"]) for p in facts if p.get("started_at"))
        cuda = sorted({str((p.get("cuda") or {}).get("driver")) for p in facts if p.get("cuda")})
        commits = sorted({str(p["commit"])[:12] for p in facts if p.get("commit")})
        lines.append(
            {
                "set": folder,
                "device": machine,
                "rows": len(group),
                "from": started[0][:16] if started else "",
                "to": started[-1][:16] if started else "",
                "commits": ", ".join(commits),
                "CUDA driver": ", ".join(cuda),
                "Python": ", ".join(sorted({str(p.get("python", "")) for p in facts})),
                "MPI": ", ".join(
                    sorted({str(p.get("mpi_library", "")).split(",")[0] for p in facts})
                ),
            }
        )
    return pd.DataFrame(lines)
