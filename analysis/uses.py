"""SSD against the other uses of as many GPUs (mpissd/lab/tables/claims.py), from the rows of a
case."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes

from analysis.gain import records
from analysis.select import Case, best_point
from analysis.style import BLACK, GREEN, GREY, ORANGE, SKY, Poster
from mpissd.common.compare import Comparison
from mpissd.common.rivals import Family
from mpissd.lab.tables.best import setting_of
from mpissd.lab.tables.claims import Claim, judged

_EXPECTED = {"ar": GREY, "sd": SKY, "lookup": GREEN, "suffix": ORANGE}


def best_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the best K and policy."""
    by = ["lookahead", "policy"]
    if rows.empty:
        return rows
    best = best_point(rows, by)
    return rows[(rows[by] == best[by]).all(axis=1)]


def claim_of(case: Case, ssd: pd.DataFrame) -> Claim | None:
    """Returns the claim of one SSD configuration's rows; None without another use.

    Every row of the case at their alpha and batch size may be the other use; those on more GPUs
    only tell what to expect of uses that were not measured.
    """
    alpha, batch_size = ssd["alpha"].iloc[0], ssd["batch_size"].iloc[0]
    sd = case.rows[case.rows["mode"] == "sd"]
    rivals = pd.concat([sd, case.wide, case.beyond])
    rivals = pd.concat([case.ar, rivals[(rivals["alpha"] == alpha) | (rivals["mode"] == "ar")]])
    rows = records(rivals[rivals["batch_size"] == batch_size])
    own = records(ssd)
    found = judged(setting_of(own[0]), [*rows, *own])
    return found[0] if found and found[0].gain is not None else None


def best_a_gpu(claim: Claim) -> Comparison | None:
    """Returns SSD's gain a GPU over the other use with most tok/s a GPU."""
    use = max(claim.others, key=lambda use: use.per_gpu)
    over = claim.ssd.cell.over(use.cell)
    return None if over is None else over.scaled(use.family.gpus / claim.gpus)


def over_strongest(claim: Claim) -> Comparison | None:
    """Returns SSD's gain over the fastest other use, measured on any visit or expected."""
    fastest = claim.others[0]
    rates = [one.rate for one in claim.unknown if one.rate is not None]
    over = claim.ssd.cell.over(fastest.cell)
    share = fastest.tok_per_s / max([fastest.tok_per_s, *rates])
    return None if over is None else over.scaled(share)


def expected_lines(poster: Poster, ax: Axes, claims: Iterable[tuple[float, Claim]]) -> None:
    """Draws, dashed, what is expected of each use that was not measured, over alpha."""
    lines: dict[Family, list[tuple[float, float]]] = {}
    for alpha, claim in claims:
        for one in claim.unknown:
            if one.rate is not None and one.why == "not measured":
                lines.setdefault(one.family, []).append((alpha, one.rate))
    for family, points in lines.items():
        if len(points) < 2:
            continue
        style = {"color": _EXPECTED.get(family.mode, BLACK), "linestyle": "--", "linewidth": 2}
        poster.line(ax, f"{family} (expected, not measured)", *zip(*points, strict=True), **style)
