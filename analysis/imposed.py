"""The price of imposed hits: the branches that the default hit law would need for the same rate."""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from analysis.load import Data
from analysis.probed import forward
from analysis.select import Case
from analysis.times import Times
from mpissd.common.real_pairs import DEFAULT, least_uniform

_MOST = 4096  # branches


def price(data: Data, case: Case, ssd: pd.DataFrame) -> str:
    """Returns a caption's text on the branches needed by each imposed p_hit; "" without imposed
    hits.

    It also has the closed formula's tok/s with the most branches, relative to its tok/s as run.
    """
    rates = sorted(ssd.loc[ssd["p_hit"] > 0, "p_hit"].unique())
    if not rates:
        return ""
    first = ssd.iloc[0]
    rows = int(first["lookahead"]) + 1
    hazards = [float(first["alpha"])] * (rows - 1)
    needed = {h: least_uniform(float(h), hazards, DEFAULT, _MOST // rows) for h in rates}
    finite = {h: rows * least for h, least in needed.items() if least is not None}
    needs = [f"{count} for {h:g}" for h, count in finite.items()]
    gain = _forecast(data, case, first, max(finite), finite[max(finite)]) if finite else None
    if gain is not None:
        needs[-1] += f" (tok/s {gain:.2f}× of these by the closed formula)"
    never = [f"{h:g}" for h, least in needed.items() if least is None]
    needs += [f"no number does for {', '.join(never)}"] * bool(never)
    run = f"{first['branch_budget']:.0f}"
    return f"{case.label}: hits imposed on {run} branches; the default law needs {', '.join(needs)}"


def _forecast(data: Data, case: Case, row: pd.Series, p_hit: float, branches: int) -> float | None:
    """Returns the closed formula's gain if a growth step has so many rows, at b = 1.

    The step is the probed draft forward; the result is None if no probed profile has it.
    """
    times, step = Times.of(case), _step_s(data, case, branches)
    if times is None or step is None:
        return None
    wide = replace(times, grow=max(times.grow, step))
    at = float(row["alpha"]), int(row["lookahead"]), p_hit
    return wide.ssd(*at) / times.ssd(*at)


def _step_s(data: Data, case: Case, rows: int) -> float | None:
    """Returns the seconds of the draft's probed forward with so many rows, or None."""
    curve = forward(data, case, case.draft, 1)
    return curve.at(rows) if curve is not None and max(curve.seconds) >= rows else None
