"""Serving under open-loop load: speedup, times, goodput, throughput against latency, by rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import need
from analysis.load import Data
from analysis.loads import speedup
from analysis.style import (
    BLACK,
    GREEN,
    METHODS,
    Poster,
    parity,
    plain_ticks,
)

_LOOKS = {**METHODS, "auto": (GREEN, "P")}
_OBJECTIVE = ("ttft_s", "tpot_s")
_ORDER = ("AR", "SD inline", "SD", "SSD", "auto")
_MOST = 3
_LAWS = {"acceptance": "imposed acceptance", "hit_law": "imposed hits"}
SPEEDUP = (
    "Speedup: mean latency, from a request's arrival to its last token, of AR on the target GPUs "
    "of one server over the use's, same arrivals and answers. Bars: 95% bootstrap over blocks of "
    "successive requests"
)


def load_speedup(data: Data) -> Poster:
    """Draws the speedup over AR by rate of arrivals, a panel a target and T."""
    shown = [(name, part) for name, part in _cases(data) if _has(part, "AR", 2)]
    need(shown, "loads of AR and another method at two or more rates")
    poster = Poster(7.8)
    grid = poster.panels(1, len(shown))[0]
    for ax, (name, part) in zip(grid, shown, strict=True):
        ax.set_title(name)
        base = part[part["method"] == "AR"]
        base = base[base["gpus"] == base["gpus"].min()]
        for label, style, rows in _series(part):
            if rows["load_id"].isin(base["load_id"]).all():
                continue
            if gains := _gains(base, rows):
                x, y, low, high = zip(*gains, strict=True)
                poster.line(ax, label, x, y, low=low, high=high, **style)
        parity(ax, text="AR")
        _over_rate(ax)
    grid[0].set_ylabel("speedup over AR, ×")
    return poster.finish("Speedup over load, AR = 1", _caption(shown, SPEEDUP))


def _gains(base: pd.DataFrame, rows: pd.DataFrame) -> list[tuple[float, float, float, float]]:
    """Returns (rate, speedup, low, high) of each rate that both have."""
    found = []
    for rate, part in rows.groupby("rate"):
        gain = speedup(base[base["rate"] == rate], part)
        if gain is not None:
            found.append((float(rate), *gain))
    return found


def load_times(data: Data) -> Poster:
    """Draws time to first token and time per output token by rate: p50 solid, p99 dotted."""
    shown = [(name, part) for name, part in _cases(data) if part["rate"].nunique() >= 2]
    need(shown, "loads at two or more rates")
    poster = Poster(10.4)
    grid = poster.panels(2, len(shown), sharex="col")
    for column, (name, part) in zip(grid.T, shown, strict=True):
        column[0].set_title(name)
        for ax, key in zip(column, ("ttft", "tpot"), strict=True):
            ax.set_label(f"{name}: {key.upper()}")
            for label, style, rows in _series(part):
                medians = rows.groupby("rate")[[f"{key}_p50", f"{key}_p99"]].median() * 1e3
                poster.line(ax, label, medians.index, medians[f"{key}_p50"], **style)
                ax.plot(medians.index, medians[f"{key}_p99"], ":", color=style["color"], lw=1.2)
                for rate, value in medians[f"{key}_p99"].items():
                    poster.keep(ax, f"{label}, p99", x=float(str(rate)), y=value)
            ax.set(yscale="log")
            plain_ticks(ax.yaxis)
        _over_rate(column[1])
    grid[0, 0].set_ylabel("time to first token, ms")
    grid[1, 0].set_ylabel("time per output token, ms")
    told = "Solid: p50, dotted: p99 of requests; times count from a request's arrival"
    return poster.finish("Times of a request over load", _caption(shown, told))


def load_goodput(data: Data) -> Poster:
    """Draws the best goodput over rates against the number of GPUs, a point a use of them."""
    shown = [(name, part) for name, part in _cases(data) if part["gpus"].nunique() >= 2]
    need(shown, "loads on two or more numbers of GPUs")
    poster = Poster(7.8)
    grid = poster.panels(1, len(shown))[0]
    for ax, (name, part) in zip(grid, shown, strict=True):
        ax.set_title(name)
        uses = part.groupby("gpus")["use"].nunique()
        drawn = dict.fromkeys(uses.index, 0)  # points that stand there already
        step = 0.05 * part["gpus"].max() / len(uses)
        for label, style, rows in _series(part):
            best = rows.loc[rows["goodput_per_s"].idxmax()]
            x, y = best["gpus"], best["goodput_per_s"]
            at = x + step * (drawn[x] - (uses[x] - 1) / 2)
            drawn[x] += 1
            ax.plot([at], [y], label=label, **{**style, "linestyle": ""})
            poster.keep(ax, label, x=x, y=y, rate=best["rate"], per_gpu=y / x)
        ax.set(xlabel="GPUs, drafts counted", ylim=(0, None))
        ax.set_xticks(sorted(part["gpus"].unique()))
    grid[0].set_ylabel("good requests a second, at the best rate")
    told = f"A request is good that keeps {_objectives(shown)}"
    return poster.finish("Goodput over GPUs", _caption(shown, told))


def load_frontier(data: Data) -> Poster:
    """Draws tok/s per GPU against tokens a second of one request: above a point a rate, below,
    where all requests came at once, a point a number b of sequences together."""
    parts = {"rate": list(_cases(data)), "max_running": list(_cases(data, at_once=True))}
    shown = {by: [(n, p) for n, p in found if p[by].nunique() >= 3] for by, found in parts.items()}
    rows = {by: found for by, found in shown.items() if found}
    need(rows, "loads at three or more rates, or of all at once by three or more sequences")
    columns = max(map(len, rows.values()))
    poster = Poster(2.2 + 6.0 * len(rows))
    grid = poster.panels(len(rows), columns)
    for axes, (by, found) in zip(grid, rows.items(), strict=True):
        for ax, (name, part) in zip(axes, found, strict=False):
            ax.set_title(name if by == "rate" else f"{name}, all at once")
            _frontier(poster, ax, part, by)
        for ax in axes[len(found) :]:
            ax.remove()
        axes[0].set_ylabel("tok/s per GPU (throughput)")
    for ax in grid[-1][: len(list(rows.values())[-1])]:
        ax.set_xlabel("tokens a second of a request (1 / p50 TPOT)")
    told = "Number: requests a second that arrive; where all came at once, sequences b together"
    used = [item for found in rows.values() for item in found]
    return poster.finish("Throughput against latency under load", _caption(used, told))


def _frontier(poster: Poster, ax: Axes, part: pd.DataFrame, by: str) -> None:
    for label, style, rows in _series(part):
        keys = ["tpot_p50", "tok_per_s", "gpus"]
        medians = rows.groupby(by)[keys].median().dropna()
        x, y = 1 / medians["tpot_p50"], medians["tok_per_s"] / medians["gpus"]
        poster.line(ax, label, x, y, also={by: medians.index}, **style)
        for number, place in zip(medians.index, zip(x, y, strict=True), strict=True):
            options = {"xytext": (5, 4), "textcoords": "offset points", "fontsize": 9.5}
            ax.annotate(f"{number:g}", place, color=style["color"], **options)
    ax.set(yscale="log")
    plain_ticks(ax.yaxis)


def _cases(data: Data, *, at_once: bool = False) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yields the loads of each target, those with most rows first, _MOST at most.

    at_once: those whose requests came all at once, in place of those of a rate.
    """
    loads = data.loads[data.loads["rate"].isna() == at_once]
    for name in loads["model"].value_counts().index[:_MOST]:
        part = loads[loads["model"] == name]
        drafts = sorted(part["draft"].dropna().unique())
        yield f"{name}{' / ' + ', '.join(drafts) if drafts else ''}", part


def _series(part: pd.DataFrame) -> Iterator[tuple[str, dict[str, Any], pd.DataFrame]]:
    """Yields each use's label, look and rows: those of fewest GPUs filled, others hollow, servers
    that share the requests dashed."""
    least = part["tp"].min()
    for use, rows in sorted(part.groupby("use"), key=lambda item: _place(item[1].iloc[0])):
        first = rows.iloc[0]
        color, marker = _LOOKS.get(first["method"], (BLACK, "x"))
        look: dict[str, Any] = {"color": color, "marker": marker}
        if first["replicas"] > 1:
            look |= {"linestyle": "--", "markerfacecolor": "white", "linewidth": 1.6}
        elif first["tp"] > least:
            look |= {"linestyle": "-.", "markerfacecolor": "white", "linewidth": 1.6}
        yield str(use), look, rows


def _place(row: pd.Series) -> tuple[int, int, int]:
    known = row["method"] in _ORDER
    return row["replicas"], row["tp"], _ORDER.index(row["method"]) if known else len(_ORDER)


def _has(part: pd.DataFrame, method: str, rates: int) -> bool:
    base = part[part["method"] == method]
    return base["rate"].nunique() >= rates and part["method"].nunique() >= 2


def _over_rate(ax: Axes) -> None:
    ax.set(xscale="log", xlabel="requests a second that arrive")
    plain_ticks(ax.xaxis)


def _objectives(shown: Sequence[tuple[str, pd.DataFrame]]) -> str:
    """Returns what a request has to keep, for each target."""
    told = []
    for name, part in shown:
        for first, each in sorted({tuple(o[k] for k in _OBJECTIVE) for o in part["objective"]}):
            told.append(
                f"{name}: {1e3 * first:g} ms to the first token, {1e3 * each:g} each further"
            )
    return "; ".join(told)


def _caption(shown: Sequence[tuple[str, pd.DataFrame]], told: str) -> str:
    """Returns the conditions: hardware, what is real, and what arrived."""
    used = pd.concat([part for _, part in shown])
    names = sorted(used["device_name"].unique())
    emulated = all("emulated" in name for name in names)
    how = "EMULATED: scheduler and controller in virtual time" if emulated else "measured over HTTP"
    most, seeds = int(used["num_requests"].max()), used["seed"].nunique()
    fewest = int(used["num_requests"].min())
    count = f"{most}" if most == fewest else f"{fewest} to {most}"
    poisson = ", Poisson arrivals" if used["rate"].notna().any() else ""
    refused = int(used["num_refused"].sum())
    words = [
        f"{', '.join(names)} ({how})".replace(" (emulated)", ""),
        f"{count} requests a point{poisson}, {seeds} seed{'s' * (seeds > 1)}",
        f"at most {_most_together(used)} sequences together on a server",
        f"{refused} refused" if refused else "none refused",
        *(
            f"{what}: {_several(used[key])}"
            for key, what in _LAWS.items()
            if used[key].notna().any()
        ),
    ]
    rows = f"{len(used)} loads of {_several(used['folder'])}"
    return ". ".join([" · ".join(words), told, rows]) + "."


def _most_together(used: pd.DataFrame) -> str:
    """Returns the limit of sequences, of loads that a rate has."""
    return _several(used.loc[used["rate"].notna(), "max_running"]) or "b"


def _several(values: pd.Series) -> str:
    return ", ".join(str(each) for each in sorted(values.dropna().unique()))
