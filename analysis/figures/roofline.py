"""Figures of measured forwards and all-reduces against the limits of the hardware (roofline)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from ..rows import Data
from ..select import plain, short
from ..style import BLACK, GREY, SERIES, YELLOW, Poster, label_points, need, plain_ticks

_BYTES = 2  # Bytes of a 16-bit number.
_OF_RANKS = {1: "o", 2: "s", 4: "D", 8: "^"}
_TRANSPORTS = {"nccl": SERIES[3], "oneshot": SERIES[5], "mpi": SERIES[6]}
Profile = Mapping[str, Any]
Ceiling = Callable[[Any], Any]


def roofline(data: Data) -> Poster:
    """Left: the speed of forwards as a share of the roofline (y) by flop/byte (x). Right: the time
    of all-reduces and messages by size."""
    real = [p for p in data.profiles if p.get("backend") != "emulated"]
    # Profiles until 2026-11-24 also have times of single matrix products.
    profiles = [p for p in real if p["tables"].get("products")]
    profiles = profiles or [p for p in real if p["tables"].get("forwards")]
    need(profiles, "profiles/*.json that `mpissd probe` measured on this machine")
    poster = Poster(8.8)
    grid = poster.add_gridspec(2, 2, width_ratios=(1.45, 1))
    left = poster.add_subplot(grid[:, 0], title="products and forwards")
    upper = poster.add_subplot(grid[0, 1], title="all-reduces, inside CUDA graphs")
    lower = poster.add_subplot(grid[1, 1], title="round trip lead ↔ draft")
    ceiling = _roof(poster, left, profiles)
    _products(poster, left, profiles, ceiling)
    _forwards(poster, left, profiles, ceiling)
    runs = _runs(poster, left, data.rows, ceiling)
    reduces = [t for t in tables(profiles, "all_reduces", "name", "ranks", "graph") if t["graph"]]
    reduces.sort(key=lambda table: (table["name"], table["ranks"]))
    names = (f"{table['name']}, {table['ranks']} ranks" for table in reduces)
    marks = (_OF_RANKS.get(table["ranks"], "X") for table in reduces)
    _messages(poster, upper, zip(names, marks, reduces, strict=True))
    links = list(tables(profiles, "links", "name", "idle_s"))
    names = (t["name"] + ", after 5 ms" * bool(t["idle_s"]) for t in links)
    marks = ("v" if table["idle_s"] else "s" for table in links)
    _messages(poster, lower, zip(names, marks, links, strict=True))
    text = (
        f"{profiles[0]['device_name']} (measured by mpissd probe, {len(profiles)} profiles) · "
        f"{', '.join(sorted({p['dtype'] for p in profiles}))} · GEMM-only, no LM head, context 0, "
        "M = 1 … 64 rows. Ceilings: a stream over the weights, an 8192-cubed product, the best "
        f"rate of a message. Verifications: {runs} rows. Bars: interquartile range"
    )
    for ax in poster.axes:  # A panel may be empty: with one rank there are no all-reduces.
        ax.set_visible(bool(ax.get_legend_handles_labels()[0]))
    return poster.finish("How near are forwards and messages to the machine's ceilings?", text)


def window(data: Data) -> Poster:
    """The number of draft steps that last as long as one verification (y), by its rows K + 1 (x).

    A line is a target on T GPUs. Above the dashed line all K draft steps of a hit are hidden."""
    probed = forwards(p for p in data.profiles if p.get("backend") != "emulated")
    probed = {k: f for k, f in sorted(probed.items()) if not k.kv_tokens and not k.lm_head}
    few = {k: [m for m in sorted(f.seconds) if m <= 16] for k, f in probed.items()}
    wide = {k: f for k, f in probed.items() if few[k][:1] == [1] and len(few[k]) > 2}
    alone = {k: f for k, f in wide.items() if k.tp == 1}
    least = min((f.params for f in alone.values()), default=0)
    drafts = [k.model for k, f in alone.items() if f.params == least]
    targets = {(short(k.model), k.tp): f for k, f in wide.items() if k.model not in drafts}
    need(targets, "profiles/*.json with forwards of a target and a draft, each of 1 and more rows")
    draft, step_s = next((k.model, f.seconds) for k, f in alone.items() if f.params == least)
    poster = Poster(6.6)
    ((ax,),) = poster.panels(1, 1)
    models = sorted({model for model, _ in targets})
    labels = []
    for (model, tp), forward in targets.items():
        rows = [m for m in sorted(forward.seconds) if 2 <= m <= 16]
        color = SERIES[models.index(model) % len(SERIES)]
        style = {"color": color, "marker": _OF_RANKS.get(tp, "X")}
        y = [forward.seconds[m] / step_s[1] for m in rows]
        poster.line(ax, f"{model} on {tp} GPU{'s' * (tp > 1)}", rows, y, **style)
        n = rows.index(8) if 8 in rows else -1
        labels.append((f"{y[n]:.1f}", rows[n], y[n]))
    rows = np.arange(2, 17)
    poster.line(ax, "K draft forwards", rows, rows - 1, color=BLACK, linestyle="--", linewidth=1.6)
    ax.set(yscale="log", ylabel=f"{short(draft)} forwards in one verification")
    ax.set_xscale("log", base=2)
    ax.set_xticks([2, 4, 8, 16], ["1", "3", "7", "15"])
    ax.set_xlabel("lookahead K (a verification of K + 1 rows)")
    plain_ticks(ax.yaxis)
    label_points(ax, labels)
    text = f"{data.profiles[0]['device_name']}, measured by mpissd probe: products, no LM head. "
    text += "Above the dashed line all K forwards of a branch are done before the verification"
    if 16 in step_s:
        text += f". A forward of 16 branches takes {step_s[16] / step_s[1]:.2f} times as long"
    return poster.finish("How many draft forwards fit inside one verification?", text)


def _roof(poster: Poster, ax: Axes, profiles: list[Profile]) -> Ceiling:
    """Draws the roofline of the profiles' device; returns a function from flop/byte to the largest
    possible flop/s."""
    read, peak = (
        max(p["numbers"][name]["value"] for p in profiles)
        for name in ("read_bytes_per_s", "peak_flops_per_s")
    )
    x = np.array([0.5, peak / read, 1000.0])
    label = f"measured ceiling: {read / 1e12:.2f} TB/s, {peak / 1e12:.0f} Tflop/s"
    poster.line(ax, label, x, np.ones(3), color=BLACK, linewidth=2)
    ax.set(xscale="log", xlabel="flop per byte moved", ylabel="share of the measured ceiling")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:.0%}")
    ax.set(xlim=(0.5, 1000), ylim=(0, 1.1))
    return lambda x: np.minimum(x * read, peak)


def _products(poster: Poster, ax: Axes, profiles: list[Profile], ceiling: Ceiling) -> None:
    measured = [
        (table["k"], table["n"], int(m), seconds)
        for profile in profiles
        for table in profile["tables"].get("products", ())
        for m, seconds in table["seconds"].items()
    ]
    if not measured:
        return
    k, n, m, seconds = np.array(measured, float).T
    flops = 2.0 * m * k * n
    moved = _BYTES * (k * n + m * (k + n))
    style = {"color": GREY, "marker": ".", "linestyle": "none", "markersize": 4, "alpha": 0.6}
    y = flops / seconds / ceiling(flops / moved)
    poster.line(ax, "one cuBLAS product", flops / moved, y, **style)


def _forwards(poster: Poster, ax: Axes, profiles: list[Profile], ceiling: Ceiling) -> None:
    fused_first = sorted(forwards(profiles).items(), key=lambda item: not item[0].fuse)
    seen: dict[tuple[str, int], Forward] = {}
    for key, table in fused_first:
        if not key.lm_head and not key.kv_tokens:
            seen.setdefault((short(key.model), key.tp), table)
    models = sorted({model for model, _ in seen})
    for (model, tp), table in sorted(seen.items()):
        label = f"{model} forward, T={tp}"
        color = SERIES[models.index(model) % len(SERIES)]
        style = {"color": color, "marker": _OF_RANKS.get(tp, "X"), "markersize": 7}
        style["linewidth"] = 1.2
        rows = np.array(sorted(table.seconds))
        y = 2.0 * rows * table.params / np.array([table.seconds[m] for m in rows]) / ceiling(rows)
        spread = np.array([table.spread[m] for m in rows]) / 2
        ends = {"low": y * (1 - spread), "high": y * (1 + spread)}
        poster.line(ax, label, 2 * rows / _BYTES, y, **ends, **style)


def _runs(poster: Poster, ax: Axes, rows: pd.DataFrame, ceiling: Ceiling) -> int:
    """Draws a point for the measured verifications of runs, by the bytes and flops that they need;
    returns the number of rows drawn."""
    runs = rows[(rows["t_target_s"] > 0) & plain(rows) & ~rows["lm_head"].astype(bool)]
    numbers = runs[["floor_flops", "floor_bytes"]].astype(float)
    is_known = (numbers > 0).all(axis=1) & (runs["context"] == 0)
    numbers = numbers[is_known]
    x = numbers["floor_flops"] / numbers["floor_bytes"]
    y = numbers["floor_flops"] / runs.loc[is_known, "t_target_s"] / ceiling(x)
    if len(x):
        rim = {"markeredgecolor": BLACK, "markeredgewidth": 0.6, "markersize": 7, "zorder": 2}
        style = {"color": YELLOW, "marker": "*", "linestyle": "none", **rim}
        poster.line(ax, "verification in a run", x, y, **style)
    return len(x)


def _messages(poster: Poster, ax: Axes, curves: Iterable[tuple[str, str, Profile]]) -> None:
    """Draws the times of messages by size, and the shortest possible time: that at the best rate
    measured. curves: (label, marker, {bytes: seconds} of one kind of transfer)."""
    rate = 0.0
    for label, marker, table in curves:
        x = np.array(sorted(int(b) for b in table["seconds"]))
        y = np.array([table["seconds"][str(b)] for b in x])
        rate = max(rate, float((x / y).max()))
        spread = np.array([(table.get("spread") or {}).get(str(b), 0.0) for b in x]) / 2
        ends = {"low": y * 1e6 * (1 - spread), "high": y * 1e6 * (1 + spread)}
        ends = ends if table.get("spread") else {}
        look = {"color": _TRANSPORTS.get(table["name"], BLACK), "marker": marker}
        poster.line(ax, label, x / 1024, y * 1e6, linewidth=1.8, markersize=6, **ends, **look)
    ax.set(xscale="log", yscale="log", xlabel="message, KB", ylabel="time, µs")
    ax.set_xscale("log", base=4)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_ylim(top=ax.get_ylim()[1] * 3)
    if rate:
        (low, high), bottom = ax.get_xlim(), ax.get_ylim()[0]
        x = np.geomspace(low, high, 20)
        label = "at the best rate of a message"
        ax.plot(x, x * 1024 / rate * 1e6, color=BLACK, linestyle=":", zorder=1, label=label)
        ax.set(xlim=(low, high))
        ax.set_ylim(bottom=bottom)


class Key(NamedTuple):
    """Identifies a forward in a profile: the model, T, and the options of the forward."""

    model: str
    tp: int
    fuse: bool
    lm_head: bool
    kv_tokens: int


@dataclass(frozen=True)
class Forward:
    """A measured forward: the bytes of a rank's weights, and the seconds and their relative
    interquartile range for each row count."""

    params: int
    seconds: dict[int, float]
    spread: dict[int, float]


def forwards(profiles: Iterable[Profile]) -> dict[Key, Forward]:
    """Returns all forwards in the profiles; if several profiles have one, it is from the newest.
    Each row count has the kernel that a job with so many rows uses: an entry with `most_rows` is
    used up to that number."""
    merged: dict[Key, Forward] = {}
    for profile in _newest(profiles):
        here: dict[Key, Forward] = {}
        entries = profile["tables"].get("forwards", ())
        for entry in sorted(entries, key=lambda e: -(e.get("most_rows") or math.inf)):
            name = Key(*(entry.get(field) for field in Key._fields))
            forward = here.setdefault(name, Forward(int(entry["params"]), {}, {}))
            limit = entry.get("most_rows") or math.inf
            spread = entry.get("spread") or {}
            for rows in (int(m) for m in entry["seconds"] if int(m) <= limit):
                forward.seconds[rows] = float(entry["seconds"][str(rows)])
                forward.spread[rows] = float(spread.get(str(rows), 0.0))
        merged = {**here, **merged}
    return merged


def tables(profiles: Iterable[Profile], name: str, *identity: str) -> Iterator[Profile]:
    """Yields the entries of the table `name` in all profiles; if several entries have the same
    values of the keys `identity`, only the newest."""
    seen = set()
    for profile in _newest(profiles):
        for entry in profile["tables"].get(name, ()):
            if (names := tuple(entry[i] for i in identity)) not in seen:
                seen.add(names)
                yield entry


def _newest(profiles: Iterable[Profile]) -> list[Profile]:
    """Sorts profiles by the time at which they were measured, newest first, unknown times last."""

    def start(profile: Profile) -> str:
        return str((profile.get("provenance") or {}).get("started_at") or "")

    return sorted(profiles, key=start, reverse=True)
