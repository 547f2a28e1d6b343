"""The roofline: products, forwards and collectives against the ceilings of the same job."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from analysis.figures.common import need
from analysis.load import Data, Row
from analysis.probed import Forward, forwards, tables
from analysis.select import plain, short
from analysis.style import BLACK, BLUE, MARKERS, ORANGE, RED, SERIES, SKY, Poster

_BYTES = 2  # Bytes of a 16-bit number.


def roofline(data: Data) -> Poster:
    """Left: flop/s over flop/byte of products and whole forwards. Right: all-reduces, links."""
    profiles = [p for p in data.profiles if p["tables"].get("products")]
    profiles = [p for p in profiles if p.get("backend") != "emulated"]
    need(profiles, "profiles/*.json that `mpissd probe` measured on this machine")
    poster = Poster(9.4)
    grid = poster.add_gridspec(2, 2, width_ratios=(1.55, 1))
    left = poster.add_subplot(grid[:, 0], title="products and forwards")
    upper = poster.add_subplot(grid[0, 1], title="all-reduces, inside CUDA graphs")
    lower = poster.add_subplot(grid[1, 1], title="lead ↔ draft")
    _roof(poster, left, profiles)
    _products(poster, left, profiles)
    _forwards(poster, left, profiles)
    runs = _runs(poster, left, data.rows)
    _collectives(poster, upper, profiles)
    _links(poster, lower, profiles)
    names = ", ".join(sorted({p["name"] for p in profiles}))
    text = (
        f"{profiles[0]['device_name']} (measured by mpissd probe: {names}) · "
        f"{', '.join(sorted({p['dtype'] for p in profiles}))} · GEMM-only forwards, no LM head, "
        "context 0, batch rows M = 1 … 64. Ceilings: read-only stream over each rank's weights, "
        "and an 8192-cubed product, in the same jobs. Bytes of a product: weights, input, output; "
        "of a forward: its weights; by the kernel that jobs of so many rows run. In runs: "
        f"t_target_s of {runs} rows, all-reduces included. Bars: interquartile range. Dotted: the "
        "message at the best rate that any of them reached"
    )
    for ax, loc, size, ncols in (
        (left, "lower right", 11.5, 1),
        (upper, "upper left", 9, 2),
        (lower, "upper left", 9, 2),
    ):
        if ax.get_legend_handles_labels()[0]:  # A machine without GPUs has no all-reduce.
            ax.legend(frameon=False, loc=loc, fontsize=size, ncols=ncols)
    heading = "Roofline: what the machine gives, what the forwards take"
    return poster.finish(heading, text, legend=False)


def _roof(poster: Poster, ax: Axes, profiles: list[Row]) -> None:
    read = max(p["numbers"]["read_bytes_per_s"]["value"] for p in profiles)
    peak = max(p["numbers"]["peak_flops_per_s"]["value"] for p in profiles)
    x = np.array([0.5, peak / read, 1000.0])
    y = np.minimum(x * read, peak) / 1e12
    label = f"measured ceiling: {read / 1e12:.2f} TB/s, {peak / 1e12:.0f} Tflop/s"
    poster.line(ax, label, x, y, color=BLACK, linewidth=2)
    ax.set(xscale="log", yscale="log", xlabel="flop per byte moved", ylabel="Tflop/s per GPU")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.set_xlim(0.5, 1000)


def _products(poster: Poster, ax: Axes, profiles: list[Row]) -> None:
    x, y = [], []
    for profile in profiles:
        for table in profile["tables"]["products"]:
            k, n = table["k"], table["n"]
            for rows, seconds in table["seconds"].items():
                m = int(rows)
                flops = 2.0 * m * k * n
                x.append(flops / (_BYTES * (k * n + m * (k + n))))
                y.append(flops / seconds / 1e12)
    poster.line(
        ax,
        "one cuBLAS product",
        x,
        y,
        color=SKY,
        marker=".",
        linestyle="none",
        markersize=6,
        alpha=0.8,
    )


def _forwards(poster: Poster, ax: Axes, profiles: list[Row]) -> None:
    measured = sorted(forwards(profiles).items(), key=lambda item: not item[0].fuse)
    seen: dict[str, Forward] = {}
    for key, table in measured:
        if not key.lm_head and not key.kv_tokens:
            seen.setdefault(f"{short(key.model)} forward, T={key.tp}", table)
    looks = zip((BLUE, RED, *SERIES[2:]), MARKERS, strict=False)
    for (label, table), (color, marker) in zip(sorted(seen.items()), looks, strict=False):
        rows = np.array(sorted(table.seconds))
        seconds = np.array([table.seconds[m] for m in rows])
        y = 2.0 * rows * table.params / seconds / 1e12
        spread = np.array([table.spread[m] for m in rows]) / 2
        poster.line(
            ax,
            label,
            2 * rows / _BYTES,
            y,
            low=y * (1 - spread),
            high=y * (1 + spread),
            color=color,
            marker=marker,
            markersize=7,
            linewidth=1.2,
        )


def _runs(poster: Poster, ax: Axes, rows: pd.DataFrame) -> int:
    """Draws the verifications of rows by their floor's bytes and flops; returns the number of
    rows."""
    if "floor_flops" not in rows:
        return 0
    runs = rows[(rows["t_target_s"] > 0) & (rows["floor_flops"] > 0) & (rows["floor_bytes"] > 0)]
    runs = runs[plain(runs) & ~runs["lm_head"].astype(bool) & (runs["context"] == 0)]
    x = runs["floor_flops"] / runs["floor_bytes"]
    y = runs["floor_flops"] / runs["t_target_s"] / 1e12
    if len(runs):
        poster.line(
            ax,
            "verification in a run",
            x,
            y,
            color=ORANGE,
            marker="*",
            markeredgecolor=BLACK,
            markeredgewidth=0.6,
            markersize=11,
            linestyle="none",
            zorder=5,
        )
    return len(runs)


def _collectives(poster: Poster, ax: Axes, profiles: list[Row]) -> None:
    rate = 0.0
    styles = {"oneshot": RED, "nccl": BLUE}
    measured = tables(profiles, "all_reduces", "name", "ranks", "graph")
    for table in sorted(measured, key=lambda t: (t["name"], t["ranks"])):
        if not table["graph"]:
            continue
        x = np.array(sorted(int(b) for b in table["seconds"]))
        y = np.array([table["seconds"][str(b)] for b in x])
        spread = np.array([(table.get("spread") or {}).get(str(b), 0.0) for b in x]) / 2
        rate = max(rate, float((x / y).max()))
        ranks = table["ranks"]
        poster.line(
            ax,
            f"all-reduce {table['name']}, {ranks} ranks",
            x / 1024,
            y * 1e6,
            low=y * 1e6 * (1 - spread),
            high=y * 1e6 * (1 + spread),
            color=styles.get(table["name"], BLACK),
            marker="o" if ranks == 2 else "s",
            linestyle="-" if ranks == 2 else "--",
            linewidth=1.8,
            markersize=6,
        )
    _message_axis(ax, rate, "µs")


def _links(poster: Poster, ax: Axes, profiles: list[Row]) -> None:
    rate = 0.0
    for table in tables(profiles, "links", "name", "idle_s"):
        name = f"round trip {table['name']}" + (", after 5 ms" if table["idle_s"] else "")
        x = np.array(sorted(int(b) for b in table["seconds"]))
        y = np.array([table["seconds"][str(b)] for b in x])
        rate = max(rate, float((x / y).max()))
        poster.line(
            ax,
            name,
            x / 1024,
            y * 1e6,
            color=SERIES[2 + 2 * (table["name"] == "mpi")],
            marker="v" if table["idle_s"] else "P",
            linewidth=1.8,
            markersize=6,
            linestyle="--" if table["idle_s"] else "-",
        )
    _message_axis(ax, rate, "µs")


def _message_axis(ax: Axes, rate: float, unit: str) -> None:
    """Sets log axes and draws the ceiling: a message's time at the best rate measured."""
    ax.set(xscale="log", yscale="log", xlabel="message, KB", ylabel=unit)
    ax.set_xscale("log", base=4)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_ylim(top=ax.get_ylim()[1] * 3)
    if rate:
        low, high = ax.get_xlim()
        x = np.geomspace(low, high, 20)
        bottom = ax.get_ylim()[0]
        ax.plot(x, x * 1024 / rate * 1e6, ":", color=BLACK, linewidth=1.4, zorder=1)
        ax.set(xlim=(low, high))
        ax.set_ylim(bottom=bottom)
