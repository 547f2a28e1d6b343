"""Summarises each figure's own numbers in a sentence or two, for the report and the command line.

Each function takes the numbers that were drawn (Poster.table: panel, series, x, y, low, high, …),
so a sentence can only report what the figure shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from analysis.draft_findings import kinds
from analysis.gain import claim
from analysis.load_findings import LOAD_FINDINGS
from analysis.pool_findings import pools
from analysis.real_pair import REAL
from analysis.style import percent
from analysis.uses import BESIDE
from mpissd.common.compare import bound

Says = Callable[[pd.DataFrame], str]


def equal_gpus(numbers: pd.DataFrame) -> str:
    """Reports SSD against the best other use of as many GPUs, by pair."""
    here = numbers[numbers["series"] == BESIDE]
    pairs = here.groupby("panel", sort=False)
    return " ".join(f"{pair}: {_over(points)}" for pair, points in pairs)


def _over(points: pd.DataFrame, share: str = "") -> str:
    what = "fastest measured" if points["missing"].any() else "best other"
    gains = ", ".join(_beside(p) for _, p in points.iterrows())
    return f"SSD {share}against the {what} use of {points['gpus'].iloc[0]:g} GPUs: {gains}."


def throughput(numbers: pd.DataFrame) -> str:
    """Reports SSD against the best other use of as many GPUs, and per GPU, with uses not
    measured."""
    sentences = []
    for name, share in (("all GPUs", ""), ("per GPU", "per GPU ")):
        here = numbers[(numbers["panel"] == f"own best K, {name}") & (numbers["series"] == BESIDE)]
        if len(here):
            sentences.append(_over(here, share))
    return " ".join(sentences)


def _beside(point: pd.Series) -> str:
    of = f"of {point['rival']} at α={point['x']:g}"
    if missing := point["missing"]:
        gain = f"{bound(point['low'])}–{bound(point['high'])}{_real(point)} {of}"
        return f"{gain}, no claim (not measured: {missing})"
    return f"{claim(point)}{_real(point)} {of}"


def _real(point: pd.Series) -> str:
    """Returns the gain predicted with a real pair's hits, in parentheses; "" if the rows lack
    it."""
    gains = point.reindex(REAL).dropna()
    return f" ({', '.join(f'{gain:.2f}' for gain in gains)} with real hits)" if len(gains) else ""


def cache_hits(numbers: pd.DataFrame) -> str:
    """Reports the gain at the lowest and highest hit rate, and per GPU."""
    parts = []
    for panel, here in numbers.groupby("panel"):
        text = f"{panel}: over SD {_ends(here, 'over SD on the same GPUs')}"
        alone = here[here["series"] == "over SD inline, per GPU"]
        if len(alone):
            most = alone.loc[alone["y"].idxmax()]
            text += f"; per GPU at most {claim(most)} of SD without a draft GPU"
        parts.append(text)
    return ". ".join(parts) + "."


def _ends(here: pd.DataFrame, series: str) -> str:
    line = here[here["series"] == series].sort_values("x")
    if line.empty:
        return "nothing measured"
    first, last = line.iloc[0], line.iloc[-1]
    return f"{claim(first)} at p_hit {first['x']:g}, {claim(last)} at {last['x']:g}"


def fan_out(numbers: pd.DataFrame) -> str:
    """Reports how much geometric lists and more branches raise the hit rate."""
    parts = []
    for panel, here in numbers[numbers["panel"].str.endswith("hit rate")].groupby("panel"):
        both = here.pivot_table(index="x", columns="series", values="y").dropna()
        if {"geometric", "uniform"} <= set(both) and len(both):
            edge = both["geometric"] - both["uniform"]
            most = edge.idxmax()
            parts.append(
                f"{panel.split(':')[0]}: {both.index[0]:g} to {both.index[-1]:g} branches take the "
                f"hit rate from {both['uniform'].iloc[0]:.2f} to {both['uniform'].iloc[-1]:.2f}; "
                f"geometric lists add {edge[most]:.2f} at {most:g}, {edge.iloc[-1]:+.2f} at the end"
            )
    return ". ".join(parts) + "." if parts else ""


def latency(numbers: pd.DataFrame) -> str:
    """Reports how long SD and SSD wait for the draft."""
    waits = numbers[numbers["part"].str.startswith("waiting")]
    totals = (
        numbers[numbers["series"].str.endswith("lead")].groupby(["panel", "series"])["ms"].sum()
    )
    parts = []
    for panel, here in waits.groupby("panel"):
        shares = [
            f"{s.removesuffix(': lead')} {ms:.2f} of {totals[panel, s]:.2f} ms"
            for s, ms in zip(here["series"], here["ms"], strict=True)
            if s.startswith(("SD", "SSD"))
        ]
        parts.append(
            f"{str(panel).split(';')[0]}: waiting for the draft takes " + ", ".join(shares)
        )
    return ". ".join(parts) + "."


def window(numbers: pd.DataFrame) -> str:
    """Reports how many draft steps fit in a verification, by pair."""
    fit = numbers[numbers["panel"] == "draft steps that fit"].groupby("series")["y"].median()
    steps = ", ".join(f"{name} {value:.1f}" for name, value in fit.items())
    return f"Draft steps that fit in one verification: {steps}. Growth above 1 is not hidden."


def roofline(numbers: pd.DataFrame) -> str:
    """Reports the forwards' share of the read rate at one row, and the smallest all-reduce."""
    one = numbers[numbers["series"].str.contains("forward") & (numbers["x"] == 1)]
    ceiling = numbers[numbers["series"].str.startswith("measured ceiling")].iloc[0]
    rate = ceiling["y"] / ceiling["x"]
    shares = ", ".join(f"{r.series} {r.y / rate:.0%}" for r in one.itertuples())
    runs = numbers[numbers["series"] == "verification in a run"]
    if len(runs):
        reached = runs["y"] / (runs["x"] * rate)
        shares += f"; verifications in runs reach {reached.median():.0%} (median)"
    reduces = numbers[numbers["series"].str.startswith("all-reduce")]
    small = reduces[reduces["x"] == reduces["x"].min()]
    times = ", ".join(
        f"{r.series.removeprefix('all-reduce ')} {r.y:.1f} µs" for r in small.itertuples()
    )
    end = f" All-reduces of {reduces['x'].min():g} KB: {times}." if len(small) else ""
    return f"Of the measured read rate, probed forwards of one row take: {shares}.{end}"


def batch(numbers: pd.DataFrame) -> str:
    """Reports the gain over SD at the smallest and the largest batch."""
    parts = []
    for (panel, series), here in numbers.groupby(["panel", "series"]):
        if panel.endswith("over SD") and not series.startswith("_"):
            ends = here.sort_values("x").iloc[[0, -1]]
            gains = " to ".join(f"{claim(r)} at b={r['x']:g}" for _, r in ends.iterrows())
            parts.append(f"{panel.split(':')[0]}, {series}: {gains}")
    return "SSD over SD on the same GPUs: " + "; ".join(parts) + "."


def pareto(numbers: pd.DataFrame) -> str:
    """Reports the methods at both ends of the frontier.

    Methods that were measured at some batch sizes only are reported separately.
    """
    parts = []
    for panel, here in numbers.groupby("panel"):
        dots = here[(here["series"] != "frontier") & ~here["series"].str.contains("imposed")]
        sizes = dots.groupby("series")["b"].nunique()
        partial = sorted(sizes.index[sizes < sizes.max()])
        whole = dots[~dots["series"].isin(partial)]
        fast, much = whole.loc[whole["x"].idxmax()], whole.loc[whole["y"].idxmax()]
        parts.append(
            f"{panel}: of the methods measured at all b, the fastest sequence is that of "
            f"{fast['series']}, {_span(fast, 'x')} tok/s at b={fast['b']:.0f}, the most tok/s a "
            f"GPU that of {much['series']}, {_span(much)} at b={much['b']:.0f}"
        )
        parts += [_only(dots, whole, series) for series in partial]
    return ". ".join(parts) + "."


def _span(dot: pd.Series, axis: str = "y") -> str:
    """Formats a dot's number with its 95% interval; low and high are those of y."""
    low, high = (dot[axis] * dot[end] / dot["y"] for end in ("low", "high"))
    return f"{dot[axis]:.0f} ({low:.0f}–{high:.0f})"


def _only(dots: pd.DataFrame, whole: pd.DataFrame, series: str) -> str:
    """Reports a method measured only at some b, against the best other at the largest of these."""
    mine = dots[dots["series"] == series].sort_values("b")
    point, batches = mine.iloc[-1], ", ".join(f"{b:.0f}" for b in mine["b"])
    text = f"{series} only at b={batches}: {_span(point)} a GPU"
    beside = whole[whole["b"] == point["b"]]
    if beside.empty:
        return text
    best = beside.loc[beside["y"].idxmax()]
    return f"{text}, where {best['series']} gives {_span(best)}"


def drafts(numbers: pd.DataFrame) -> str:
    """Reports the time cost of depth, and the savings of the wide twin."""
    if "tokens a round" in set(numbers["panel"]):
        return _distilled(numbers)
    parts = []
    deep = numbers[numbers["series"] == "draft step"].dropna(subset=["x"]).sort_values("x")
    if len(deep) > 1:
        a, b = deep.iloc[0], deep.iloc[-1]
        parts.append(
            f"At ~350M parameters {b['x']:g} layers take {b['y'] / a['y']:.1f}× the time of "
            f"{a['x']:g}"
        )
    twins = numbers.dropna(subset=["value"]) if "value" in numbers else numbers.iloc[:0]
    changes = []
    for what, here in twins.groupby(["panel", "series"], sort=False):
        v = here.set_index("draft")["value"]
        if len(v) == 2 and not what[0].startswith("tok/s"):
            changes.append(f"{' '.join(dict.fromkeys(what))} {v.iloc[1] / v.iloc[0] - 1:+.0%}")
    faster = numbers[numbers["series"].str.endswith("wide over narrow")]
    changes += [f"tok/s of {p['series'].split(',')[0]} {claim(p)}" for _, p in faster.iterrows()]
    if changes:
        parts.append("NoFT-Wide against NoFT: " + ", ".join(changes))
    return ". ".join(parts) + "."


def _distilled(numbers: pd.DataFrame) -> str:
    """Reports each distilled draft's best tok/s and the tokens a round there, by layers."""
    parts = []
    rates = numbers[(numbers["panel"] == "tok/s") & (numbers["series"] != "AR")]
    tokens = numbers[numbers["panel"] == "tokens a round"]
    for layers, here in rates.groupby("x"):
        best = here.loc[here["y"].idxmax()]
        there = tokens[(tokens["x"] == layers) & (tokens["series"] == best["series"])]["y"]
        parts.append(f"{layers:g} layers {best['y']:.0f} ({best['series']}, {there.iloc[0]:.2f})")
    alone = numbers[numbers["series"] == "AR"]["y"]
    beside = f"; AR {alone.iloc[0]:.0f}" if len(alone) else ""
    return "At equal parameters, best tok/s (tokens a round): " + ", ".join(parts) + beside + "."


def saguaro(numbers: pd.DataFrame) -> str:
    """Reports how C = 0 raises hits and lowers tokens, by fan-out."""
    trade = numbers[numbers["panel"] == "the trade"]
    parts = []
    for series, here in trade.groupby("series", sort=False):
        low, high = here.iloc[0], here.iloc[-1]
        parts.append(
            f"{series}: {high['x']:.2f} → {low['x']:.2f} hits, {high['y']:.2f} → "
            f"{low['y']:.2f} tokens"
        )
    return "From C = 1 to the smallest C, " + "; ".join(parts) + "."


def predicted(numbers: pd.DataFrame) -> str:
    """Reports prediction errors by method: of the replay, and of the laws' mean (with random
    draws)."""
    rows = numbers.dropna(subset=["n"])
    errors = [
        f"{r.series} {percent(r.median)} (p95 {percent(r.p95)}, n = {r.n:.0f})"
        for r in rows.itertuples()
    ]
    what = (
        "Median error of the replay of each row's own draws, and where it says so of its laws' mean"
    )
    return f"{what}, both from its own job's profile: {', '.join(errors)}."


def break_even(numbers: pd.DataFrame) -> str:
    """Reports the share of the map where SSD wins, and the best gain."""
    parts = []
    for panel, here in numbers[numbers["series"] == "formula"].groupby("panel", sort=False):
        wins = (here["gain"] > 1.001).mean()
        parts.append(
            f"{panel}: SSD wins on {wins:.0%} of the map, {here['gain'].max():.2f}× at best"
        )
    return "By the formulas: " + "; ".join(parts) + "."


def heterogeneity(numbers: pd.DataFrame) -> str:
    """Reports SSD's gain with draft steps half, one, two and four times as long."""
    parts = []
    for panel, here in numbers[numbers["series"] == "SSD, raw"].groupby("panel"):
        near = [here.loc[(here["x"] - x).abs().idxmin()] for x in (0.5, 1.0, 2.0, 4.0)]
        gains = ", ".join(f"{p['y']:.2f}× at {p['x']:.2g}" for p in near)
        parts.append(f"{panel}: SSD over AR {gains} times the step")
    return "By the formulas: " + "; ".join(parts) + "."


def head(numbers: pd.DataFrame) -> str:
    """Reports T_SD and the gain, without LM head and context and with the most of them."""
    parts = []
    for panel, here in numbers.groupby("panel", sort=False):
        for series in ("T_SD / K", "SSD over SD on the same GPUs", "SSD over SD inline, per GPU"):
            line = here[here["series"] == series].sort_values("x")
            name = panel.split(":")[0]
            is_share = series == "T_SD / K"
            values = [f"{p['y']:.3g}" if is_share else claim(p) for _, p in line.iterrows()]
            if len(values) > 1:
                parts.append(f"{name}: {series} {values[0]} → {values[-1]}")
            elif values:
                parts.append(f"{name}: {series} {values[0]} (at one of them alone)")
    return "From the least to the most that a forward includes, " + "; ".join(parts) + "."


FINDINGS: dict[str, Says] = {
    f.__name__: f
    for f in (
        equal_gpus,
        throughput,
        cache_hits,
        fan_out,
        latency,
        window,
        roofline,
        batch,
        pareto,
        drafts,
        kinds,
        saguaro,
        predicted,
        break_even,
        heterogeneity,
        head,
        pools,
    )
} | LOAD_FINDINGS
