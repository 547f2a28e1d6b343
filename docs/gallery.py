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
    """Tells the rates of 8B/1B at alpha .8, each method at its best K."""
    best = "own best K, all GPUs"
    rates = [_y(table, best, name, 0.8) for name in ("SSD", "SD inline, 2 GPUs", "SD")]
    ar = _y(table, best, "AR, 2 GPUs")
    return (
        f"At alpha .8 on two GPUs SSD makes {rates[0]:.0f} tok/s, SD inline over both "
        f"{rates[1]:.0f}, SD with a GPU for the draft {rates[2]:.0f}, AR {ar:.0f} (products; "
        "SSD and SD of one seed)."
    )


def cache_hits(table: pd.DataFrame) -> str:
    """Tells the gains over SD if no round and if every round hits."""
    name = "SSD, hits imposed, over SD"
    none, small, large = (
        _y(table, *at) for at in (("8B/1B", name, 0), ("8B/1B", name, 1), ("70B/1B", name, 1))
    )
    return (
        f"Without a hit SSD is as fast as SD ({none:.2f}×), if every round hits "
        f"{small:.2f}× at 8B and {large:.2f}× at 70B (products, hits imposed)."
    )


def fan_out(table: pd.DataFrame) -> str:
    """Tells what doubling the branches of 8B gives on chat."""
    title = "8B/1B, T=1+1, K=3, whole transformers: "
    panels = [title + row for row in ("hit", "growth", "tok")]
    few, many = ([_y(table, of, "recording of chat", n) for of in panels] for n in (8, 16))
    return (
        f"8B, K = 3, chat: 16 branches instead of 8 raise hits from {few[0]:.0%} to {many[0]:.0%} "
        f"and tok/s from {few[2]:.0f} to {many[2]:.0f}; growing them takes {many[1]:.2f} "
        f"times as long as a verification, not {few[1]:.2f}, so more would not be hidden."
    )


def latency(table: pd.DataFrame) -> str:
    """Tells the parts of SSD's round of 8B, beside those of a tree's round."""
    ours = table[table["panel"].str.startswith("8B/1B")]
    ssd = ours[ours["series"].str.match(r"SSD, .*lead")].set_index("part")["ms"]
    tree = ours[ours["series"].str.match(r"tree inline.*lead")].set_index("part")["ms"]
    return (
        f"8B, chat, two GPUs: SSD verifies on one in {ssd['target forward']:.1f} ms and waits "
        f"{ssd['waiting for the other rank']:.1f} for the draft's GPU, {ssd.sum():.1f} in all; a "
        f"tree verifies on both in {tree.iloc[:2].sum():.1f} and drafts for "
        f"{tree['drafting, or finishing a hit']:.1f}, {tree.sum():.1f} in all."
    )


def window(table: pd.DataFrame) -> str:
    """Tells how many draft forwards fit in a verification of eight rows."""
    names = "8B on 2 GPUs", "8B on 1 GPU", "70B on 4 GPUs", "70B on 2 GPUs"
    at = [_y(table, "", name, 8) for name in names]
    return (
        f"While 8B verifies K = 7 tokens on two GPUs, {at[0]:.1f} forwards of the 1B draft fit, on "
        f"one {at[1]:.1f}; of 70B on four {at[2]:.0f}, on two {at[3]:.0f}, so that all K steps fit."
    )


def roofline(table: pd.DataFrame) -> str:
    """Tells the share of the memory ceiling that forwards of one row reach."""
    roof = table[table["series"].str.startswith("measured ceiling")].iloc[0]
    per_byte = roof["y"] / roof["x"]
    names = "70B forward, T=1", "8B forward, T=1", "8B forward, T=4", "1B forward, T=1"
    part = [_y(table, "", name, 1) / per_byte for name in names]
    return (
        f"A forward of one row reads its weights at {part[0]:.0%} (70B), {part[1]:.0%} (8B) and "
        f"{part[3]:.0%} (1B) of the measured rate of memory, 8B over four GPUs at {part[2]:.0%}."
    )


def batch(table: pd.DataFrame) -> str:
    """Tells the gains of 8B for one sequence and for the most sequences."""
    single, many = (_y(table, "8B/1B", "SSD, over SD", b) for b in (1, 32))
    best = "SSD, over SD inline on all GPUs, each at its best K and backup"
    inline = [_y(table, "8B/1B", best, b) for b in (1, 4, 32)]
    return (
        f"8B: SSD over SD falls from {single:.2f}× for one sequence to {many:.2f}× for 32, since a "
        f"miss delays all; over SD inline on the same two GPUs it is {inline[0]:.2f}×, for four "
        f"sequences {inline[1]:.2f}×, for 32 with a lookup after misses (fast) {inline[2]:.2f}× "
        "(one sequence: five seeds, more: one)."
    )


def pareto(table: pd.DataFrame) -> str:
    """Tells the ends of the frontier of 8B."""
    table = table[table["panel"].str.startswith("8B/1B")]
    front = table[table["series"] == "frontier"]
    inline = table[(table["series"] == "SD inline, T+1 GPUs") & (table["b"] == 1)]["x"].iloc[0]
    return (
        f"8B on two GPUs: for one sequence SSD ({front['x'].max():.0f} tok/s) and SD inline over "
        f"both ({inline:.0f}) are equal within their interval; for 4 and 16 SD inline leads, for "
        f"32 SSD with a fast backup ({front['y'].max():.0f} tok/s a GPU, one seed). 70B has no "
        "frontier, as SD inline was not measured in batches."
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
