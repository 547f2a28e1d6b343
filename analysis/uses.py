"""Compares SSD with other uses of as many GPUs (mpissd/common/rivals.py), from the rows of a
case."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd
from matplotlib.axes import Axes

from analysis.gain import gain
from analysis.real_pair import REAL
from analysis.select import Case, best_point, ranked_by
from analysis.style import Poster
from mpissd.common.compare import Comparison
from mpissd.common.rivals import Family, Others, families, other_uses, tps_of, widest

BESIDE = "SSD over the fastest other use"  # The name of the series whose numbers findings.py reads.


@dataclass(frozen=True)
class RowsUse:
    """A mode on T + D GPUs at its own best K, with the rows of that configuration.

    tok_per_s: its rank, either for all GPUs together or for each GPU.
    """

    mode: str
    tp: int
    num_drafts: int
    tok_per_s: float
    rows: pd.DataFrame = field(repr=False)


def best_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Returns the rows of the best K and policy."""
    by = ["lookahead", "policy"]
    if rows.empty:
        return rows
    best = best_point(rows, by)
    return rows[(rows[by] == best[by]).all(axis=1)]


def others(
    case: Case, alpha: float, batch_size: int = 1, *, per_gpu: bool = False
) -> Others[RowsUse]:
    """Ranks the other uses of T + 1 GPUs, over every T and D that was measured.

    per_gpu: by tok/s a GPU; then AR and SD inline on T must be known, and wider uses are optional.
    """
    drafted = pd.concat([case.rows[case.rows["mode"] == "sd"], case.wide])
    rows = pd.concat([case.ar, drafted[drafted["alpha"] == alpha]])
    rows = rows[rows["batch_size"] == batch_size]
    gpus = case.tp + 1
    wanted = families(case.tp, gpus) if per_gpu else widest(gpus, tps_of(case.target, gpus))
    return other_uses("ssd", gpus, _uses(rows, per_gpu), wanted)


def keep_beside(
    poster: Poster, ax: Axes, case: Case, alpha: float, ssd: pd.DataFrame, *, per_gpu: bool
) -> None:
    """Records SSD's gain at an alpha, the use it is compared with, and the uses that were not
    measured."""
    rivals = others(case, alpha, per_gpu=per_gpu)
    if rivals.fastest is not None:
        over = beside(ssd, rivals, per_gpu=per_gpu)
        share = over.speedup / ssd["tok_per_s"].median()
        poster.keep(
            ax,
            BESIDE,
            x=alpha,
            y=over.speedup,
            low=over.low,
            high=over.high,
            headline=over.is_headline,
            rival=str(Family.of(rivals.fastest)),
            gpus=case.tp + 1,
            missing=rivals.not_known,
            **{name: share * ssd[name].median() for name in REAL},
        )


def beside(ssd: pd.DataFrame, rivals: Others[RowsUse], *, per_gpu: bool = False) -> Comparison:
    """Returns the gain of one configuration's rows over the fastest other use, which must exist."""
    assert rivals.fastest is not None
    rows = rivals.fastest.rows
    share = rows["gpus"].iloc[0] / ssd["gpus"].iloc[0] if per_gpu else 1.0
    return gain(ssd, rows).scaled(share)


def _uses(rows: pd.DataFrame, per_gpu: bool) -> list[RowsUse]:
    """Ranks uses by the predicted mean where predictions hold, as best_point does."""
    cells = [best_rows(group) for _, group in rows.groupby(["mode", "tp", "num_drafts"])]
    column = ranked_by(pd.concat(cells)) if cells else ""
    return [_use(cell, column, per_gpu) for cell in cells]


def _use(cell: pd.DataFrame, column: str, per_gpu: bool) -> RowsUse:
    first = cell.iloc[0]
    share = int(first["gpus"]) if per_gpu else 1
    place = Family(str(first["mode"]), int(first["tp"]), int(first["num_drafts"]))
    rate = float(cell[column].median()) / share
    return RowsUse(place.mode, place.tp, place.num_drafts, rate, cell)
