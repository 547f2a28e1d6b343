"""Tables of the report: the best configuration of each method, and the sources of the rows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.gain import gain
from analysis.load import Data
from analysis.notes import Notes, NothingLeft
from analysis.select import Case, cases, on_machine, plain, points
from analysis.uses import beside, best_rows, others
from mpissd.common.rivals import Family


def best_of_each(data: Data, machine: str) -> pd.DataFrame:
    """Returns each method at its best K for every pair and T, at the alpha with most rows."""
    if machine not in set(data.rows["device_name"]):  # it has loads alone
        return pd.DataFrame()
    try:
        here = on_machine(Data(data.rows, (), Notes()), machine)
    except NothingLeft:
        return pd.DataFrame()
    wanted = plain(here.rows) & (here.rows["batch_size"] == 1)
    lines = []
    for case in cases(here, wanted, ["method"]):
        rows = case.rows[(case.rows["batch_size"] == 1) & case.rows["alpha"].notna()]
        ar = _ar(case, case.tp)
        if not len(rows) or not len(ar):
            continue
        alpha = rows["alpha"].value_counts().index[0]
        wide = case.wide[(case.wide["batch_size"] == 1) & (case.wide["alpha"] == alpha)]
        lines += _lines(case, pd.concat([rows[rows["alpha"] == alpha], wide]), ar)
    return pd.DataFrame(lines)


def _ar(case: Case, gpus: int) -> pd.DataFrame:
    return case.ar[(case.ar["gpus"] == gpus) & (case.ar["batch_size"] == 1)]


def _lines(case: Case, rows: pd.DataFrame, ar: pd.DataFrame) -> list[dict[str, Any]]:
    cells = [("AR", ar), ("AR", _ar(case, case.tp + 1))]
    for name in ("SD inline", "SD"):
        groups = rows[rows["method"] == name].groupby("tp")
        cells += [(name, best_rows(group)) for _, group in groups]
    ssd = rows[rows["method"] == "SSD"]
    cells += [(f"SSD, {law}", best_rows(group)) for law, group in ssd.groupby("hit_law")]
    return [_line(case, method, cell, ar) for method, cell in cells if len(cell)]


def _line(case: Case, method: str, cell: pd.DataFrame, ar: pd.DataFrame) -> dict[str, Any]:
    point = points(cell, ["method"]).iloc[0]
    comparison = gain(cell, ar)
    share = ar["gpus"].iloc[0] / point["gpus"]
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
        "gain": "" if cell is ar else comparison.claim,
        "gain per GPU": "" if cell is ar else comparison.scaled(share).claim,
        "over the best other use": _over(case, cell) if method.startswith("SSD") else "",
        "rows": int(point["n"]),
    }


def _over(case: Case, ssd: pd.DataFrame) -> str:
    """Formats SSD's gain over the best other use of its GPUs, or over the fastest measured one."""
    rivals = others(case, float(ssd["alpha"].iloc[0]))
    if rivals.fastest is None:
        return "none measured"
    gain = beside(ssd, rivals)
    claim = gain.interval if rivals.missing else gain.claim
    gained = f"{claim} of {Family.of(rivals.fastest)}"
    imposed = " (hits imposed: no branch was paid for)" * bool(ssd["p_hit"].notna().all())
    missing = f", the fastest measured: no claim (not measured: {rivals.not_known})"
    return gained + imposed + missing * bool(rivals.missing)


def sources(data: Data) -> pd.DataFrame:
    """Returns a line for each folder and machine: rows, loads or pools, dates, versions,
    packages."""
    return pd.DataFrame([*_of_runs(data), *_of_loads(data), *_of_pools(data)])


def _of_pools(data: Data) -> list[dict[str, Any]]:
    groups = data.pools.groupby(["folder", "device_name"], sort=True)
    return [
        {"set": f"{folder} (pools, simulated)", "device": machine, "rows": len(group)}
        for (folder, machine), group in groups
    ]


def _of_loads(data: Data) -> list[dict[str, Any]]:
    lines = []
    for (folder, machine), group in data.loads.groupby(["folder", "device_name"], sort=True):
        times = sorted(str(time)[:16] for time in group["time"])
        line = {"set": f"{folder} (loads)", "device": machine, "rows": len(group)}
        lines.append({**line, "from": times[0], "to": times[-1]})
    return lines


def _of_runs(data: Data) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    if data.rows.empty:
        return lines
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
    return lines
