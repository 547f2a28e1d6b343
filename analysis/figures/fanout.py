"""The fan-out sweep: hits, growth and gain over the branch budget, uniform against geometric."""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.figures.common import GAINS, caption, draw_gains, need, no_claim
from analysis.gain import gains_over
from analysis.load import Data
from analysis.select import Case, cases, plain, points, richest
from analysis.style import BLUE, RED, Poster, parity

_KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"color": BLUE, "marker": "s"},
    "geometric": {"color": RED, "marker": "^"},
}


def fan_out(data: Data) -> Poster:
    """x = branches ΣF; y = hit rate, growth over a verification, and gain over AR (raw and per
    GPU)."""
    rows = data.rows
    wanted = plain(rows) & (rows["batch_size"] == 1)
    wanted &= (rows["mode"] != "ssd") | (rows["hit_law"].fillna("").str.startswith("power"))
    shown = [(case, _sweep(case)) for case in cases(data, wanted, ["policy"])]
    shown = [(case, ssd) for case, ssd in shown if _is_sweep(ssd)]
    shown = shown[:3]
    need(shown, "SSD, uniform and geometric, at three or more branch budgets of one power law")
    poster = Poster(11.2)
    grid = poster.panels(3, len(shown), sharex="col", sharey="row")
    for column, (case, ssd) in zip(grid.T, shown, strict=True):
        first = ssd.iloc[0]
        law = str(first["hit_law"]).removeprefix("power:").replace(",", ", ").replace("=", " ")
        column[0].set_title(f"{case.label}+1, K={first['lookahead']}, α={first['alpha']:g}, {law}")
        for ax, what in zip(column, ("hit rate", "growth", "gain over AR"), strict=True):
            ax.set_label(f"{case.label}+1: {what}")
        for kind, look in _KINDS.items():
            _series(poster, column, case, ssd[ssd["kind"] == kind], kind, look)
        if ssd["t_growth_s"].isna().all():
            reason = "never grown to its end: the outcome came first"
            column[1].text(
                0.5, 0.4, reason, transform=column[1].transAxes, ha="center", fontsize=12
            )
        parity(column[2], 1.0, "AR")
        column[2].set_xlabel("branch budget ΣF")
    grid[0, 0].set_ylim(0, 1)
    for ax in grid[1]:
        parity(ax, 1.0, "one verification")
    grid[1, 0].set_ylim(bottom=0)
    for ax, label in zip(
        grid[:, 0],
        ("hit rate", "growth T_p, in\nverifications", "gain over AR, ×"),
        strict=True,
    ):
        ax.set_ylabel(label)
    used = [ssd for _, ssd in shown] + [c.ar[c.ar["gpus"] == c.tp] for c, _ in shown]
    growth = "Growth: glue and K steps over all branches, where they ran to their end"
    text = caption(data, used, growth, GAINS, no_claim(used))
    return poster.finish("Fan-out: what more branches buy", text)


def _sweep(case: Case) -> pd.DataFrame:
    ssd = case.method("SSD", batch_size=1)
    ssd = ssd.assign(kind=ssd["policy"].str.split(":").str[0])
    return richest(ssd, ["alpha", "lookahead", "hit_law"], ["kind", "branch_budget"])


def _is_sweep(ssd: pd.DataFrame) -> bool:
    budgets = ssd.groupby("kind")["branch_budget"].nunique()
    return bool(len(budgets) == len(_KINDS) and budgets.max() >= 3)


def _series(
    poster: Poster, column: Any, case: Case, rows: pd.DataFrame, kind: str, look: dict[str, Any]
) -> None:
    medians = points(rows, ["branch_budget"])
    ar = case.ar[(case.ar["gpus"] == case.tp) & (case.ar["batch_size"] == 1)]
    if not len(medians):
        return
    x = medians["branch_budget"]
    poster.line(column[0], kind, x, medians["hit_rate"], **look)
    grown = medians["t_growth_s"] / medians["t_target_s"]
    poster.line(column[1], kind, x[grown.notna()], grown.dropna(), **look)
    if not len(ar):
        return
    share = case.tp / (case.tp + 1)
    for name, factor, style in ((kind, 1.0, "-"), (f"{kind}, per GPU", share, ":")):
        gain = gains_over(rows, ar, "branch_budget", factor)
        draw_gains(poster, column[2], name, gain, linestyle=style, **look)
