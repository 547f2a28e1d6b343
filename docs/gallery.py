"""Prints the gallery of docs/figures.md: each figure with a sentence whose numbers are its own.

docs/tables.py writes them into the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from analysis.__main__ import draw
from analysis.rows import Data, load

ROOT = Path(__file__).resolve().parents[1]
MACHINE = "NVIDIA H200"


def _y(table: pd.DataFrame, panel: str, series: str, x: float | None = None) -> float:
    """Returns the y of a figure's point: of the only one, or at x."""
    at = table[table["panel"].str.startswith(panel) & (table["series"] == series)]
    at = at if x is None else at[at["x"] == x]
    (value,) = at["y"]
    return float(value)


def throughput(table: pd.DataFrame) -> str:
    """8B/1B at alpha .8, each at its best K."""
    best = "own best K, all GPUs"
    rates = [_y(table, best, name, 0.8) for name in ("SSD", "SD inline, 2 GPUs", "SD")]
    ar = _y(table, best, "AR, 2 GPUs")
    return (
        f"At alpha .8 on two GPUs SSD makes {rates[0]:.0f} tok/s, SD inline over both "
        f"{rates[1]:.0f}, SD with a GPU for the draft {rates[2]:.0f}, AR {ar:.0f} (products; "
        "SSD and SD of one seed)."
    )


def cache_hits(table: pd.DataFrame) -> str:
    """The gains over SD if no round and if every round hits."""
    name = "SSD, hits imposed, over SD"
    small, large = ([_y(table, pair, name, p) for p in (0, 1)] for pair in ("8B/1B", "70B/1B"))
    return (
        f"Without a hit SSD is as fast as SD ({small[0]:.2f}×), if every round hits "
        f"{small[1]:.2f}× at 8B and {large[1]:.2f}× at 70B (products, hits imposed)."
    )


def fan_out(table: pd.DataFrame) -> str:
    """What doubling the branches of 8B gives on chat."""
    title, name = "8B/1B, T=1+1, K=3, whole transformers: ", "recording of chat"
    rows = ("hit", "growth", "tok")
    few, many = ([_y(table, title + row, name, n) for row in rows] for n in (8, 16))
    return (
        f"8B, K = 3, chat: 16 branches instead of 8 raise hits from {few[0]:.0%} to {many[0]:.0%} "
        f"and tok/s from {few[2]:.0f} to {many[2]:.0f}; growing them takes {many[1]:.2f} "
        f"times as long as a verification, not {few[1]:.2f}, so more would not be hidden."
    )


def latency(table: pd.DataFrame) -> str:
    """The parts of SSD's round of 8B, beside the tree's."""
    ours = table[table["panel"].str.startswith("8B/1B")]
    ssd = ours[ours["series"].str.match(r"SSD, .*lead")].set_index("part")["ms"]
    tree = ours[ours["series"].str.match(r"tree inline.*lead")].set_index("part")["ms"]
    waits, drafts = ssd["waiting for the other rank"], tree["drafting, or finishing a hit"]
    return (
        f"8B, chat, two GPUs: SSD verifies on one in {ssd['target forward']:.1f} ms and waits "
        f"{waits:.1f} for the draft's GPU, {ssd.sum():.1f} in all; a tree verifies on both in "
        f"{tree.iloc[:2].sum():.1f} and drafts for {drafts:.1f}, {tree.sum():.1f} in all."
    )


def window(table: pd.DataFrame) -> str:
    """Draft forwards in a verification of eight rows."""
    names = "8B on 2 GPUs", "8B on 1 GPU", "70B on 4 GPUs", "70B on 2 GPUs"
    at = [table[(table["series"] == name) & (table["x"] == 8)]["y"].iloc[0] for name in names]
    return (
        f"While 8B verifies K = 7 tokens on two GPUs, {at[0]:.1f} forwards of the 1B draft fit, on "
        f"one {at[1]:.1f}; of 70B on four {at[2]:.0f}, on two {at[3]:.0f}, so that all K steps fit."
    )


def roofline(table: pd.DataFrame) -> str:
    """The share of the memory ceiling that forwards of few rows reach."""
    roof = table[table["series"].str.startswith("measured ceiling")].iloc[0]
    per_byte = roof["y"] / roof["x"]
    names = "70B forward, T=1", "8B forward, T=1", "8B forward, T=4", "1B forward, T=1"
    at = [table[(table["series"] == name) & (table["x"] == 1)]["y"].iloc[0] for name in names]
    part = [y / per_byte for y in at]
    return (
        f"A forward of one row reads its weights at {part[0]:.0%} (70B), {part[1]:.0%} (8B) and "
        f"{part[3]:.0%} (1B) of the measured rate of memory, 8B over four GPUs at {part[2]:.0%}."
    )


def batch(table: pd.DataFrame) -> str:
    """The gains at one and at most sequences of 8B."""
    one, many = (_y(table, "8B/1B", "SSD, over SD", b) for b in (1, 32))
    best = "SSD, over SD inline on all GPUs, each at its best K and backup"
    inline = [_y(table, "8B/1B", best, b) for b in (1, 4, 32)]
    return (
        f"8B: SSD over SD falls from {one:.2f}× for one sequence to {many:.2f}× for 32, since a "
        f"miss delays all; over SD inline on the same two GPUs it is {inline[0]:.2f}×, for four "
        f"sequences {inline[1]:.2f}×, for 32 with a lookup after misses (fast) {inline[2]:.2f}× "
        "(one sequence: five seeds, more: one)."
    )


def pareto(table: pd.DataFrame) -> str:
    """The ends of the frontier of 8B."""
    front = table[table["panel"].str.startswith("8B/1B") & (table["series"] == "frontier")]
    fast, full = front["x"].max(), front["y"].max()
    inline = table[table["panel"].str.startswith("8B/1B") & (table["b"] == 1)]
    inline = inline[inline["series"] == "SD inline, T+1 GPUs"]["x"].iloc[0]
    return (
        f"8B on two GPUs: for one sequence SSD ({fast:.0f} tok/s) and SD inline over both "
        f"({inline:.0f}) are equal within their interval; for 4 and 16 SD inline leads, for 32 SSD "
        f"with a fast backup ({full:.0f} tok/s a GPU, one seed). 70B has no frontier, as SD inline "
        "was not measured in batches."
    )


SHOWN: dict[str, Callable[[pd.DataFrame], str]] = {
    of.__name__: of
    for of in (throughput, cache_hits, fan_out, latency, window, roofline, batch, pareto)
}


def lines(data: Data) -> Iterator[str]:
    """Yields the Markdown of each figure: its heading as a title, its sentence and its picture."""
    for number, (name, sentence) in enumerate(SHOWN.items(), 1):
        item = next(iter(draw(data, name, MACHINE)))
        if item.poster is None:
            raise SystemExit(f"{name}: {item.why}")
        path = f"../figures/nvidia-h200/{item.name}.png"
        text = sentence(item.poster.table())
        yield f"## {number}. {item.poster.heading}\n\n{text}\n\n![{item.name}]({path})\n"


if __name__ == "__main__":
    print("\n".join(lines(load([ROOT / "results"]))))
