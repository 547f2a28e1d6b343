"""Prints the gallery of docs/figures.md: each figure with a sentence whose numbers are its own.

docs/tables.py writes them into the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from analysis.__main__ import draw
from analysis.figures.study import CHAT, CODE, Place, gain_of
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
        f"{rates[1]:.0f}, SD with a GPU for the draft {rates[2]:.0f}, AR {ar:.0f} (products "
        "without the LM head, so faster than in figure 8; SSD and SD of one seed)."
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
    """Tells what more branches give: on chat at 8B, and under imposed acceptance at 70B."""
    title = "8B/1B, T=1+1, K=3, whole transformers: "
    panels = [title + row for row in ("hit", "growth", "tok")]
    few, many = ([_y(table, of, "recording of chat", n) for of in panels] for n in (8, 16))
    title, name = "70B/1B, T=2+1, K=7, α=0.8, products: ", "geometric: F by expected hits"
    panels = [title + row for row in ("hit", "growth", "tok")]
    less, most = ([_y(table, of, name, n) for of in panels] for n in (8, 48))
    return (
        f"8B, K = 3, chat: 16 branches instead of 8 raise hits from {few[0]:.0%} to {many[0]:.0%} "
        f"and tok/s from {few[2]:.0f} to {many[2]:.0f}; growing them takes {many[1]:.2f} "
        f"times as long as a verification, not {few[1]:.2f}, so more would not be hidden. 70B, K = "
        f"7, alpha .8, products: 48, not 8, raise hits from {less[0]:.0%} to {most[0]:.0%} and "
        f"tok/s from {less[2]:.0f} to {most[2]:.0f}; growing them takes {most[1]:.2f} of a "
        "verification."
    )


def latency(table: pd.DataFrame) -> str:
    """Tells the parts of SSD's round of 8B, and those of a tree's round."""
    ours = table[table["panel"].str.startswith("8B/1B")]
    ssd = ours[ours["series"].str.match(r"SSD, .*lead")].set_index("part")["ms"]
    tree, one = (
        ours[ours["series"].str.match(f"{name}.*lead")].set_index("part")["ms"]
        for name in ("tree inline", "tree in one forward")
    )
    drafting = "drafting, or finishing a hit"
    return (
        f"8B, chat, two GPUs: SSD verifies on one in {ssd['target forward']:.1f} ms, "
        f"{ssd.sum():.1f} in all; a tree verifies on both in {tree.iloc[:2].sum():.1f} and drafts "
        f"for {tree[drafting]:.1f}, in one forward for {one[drafting]:.1f}, {one.sum():.1f} in all."
    )


def window(table: pd.DataFrame) -> str:
    """Tells how many draft forwards fit in a verification of eight rows."""
    names = "8B on 2 GPUs", "8B on 1 GPU", "70B on 4 GPUs", "70B on 2 GPUs"
    at = [_y(table, "", name, 8) for name in names]
    return (
        f"K = 7: while 8B verifies on two GPUs, {at[0]:.1f} forwards of the 1B draft fit, on one "
        f"{at[1]:.1f}: not all 7; while 70B does on four {at[2]:.1f}, on two {at[3]:.1f}: all fit."
    )


def roofline(table: pd.DataFrame) -> str:
    """Tells the share of the memory ceiling that forwards of one row reach."""
    names = "70B forward, T=1", "8B forward, T=1", "8B forward, T=4", "1B forward, T=1"
    part = [_y(table, "", name, 1) for name in names]
    return (
        f"A forward of one row reads its weights at {part[0]:.0%} (70B), {part[1]:.0%} (8B) and "
        f"{part[3]:.0%} (1B) of the measured rate of memory, 8B over four GPUs at {part[2]:.0%}."
    )


def batch(table: pd.DataFrame) -> str:
    """Tells the gains of 8B for one sequence, four, and the most sequences."""
    best = "SSD, over SD inline on all GPUs, each at its best K and backup"
    gains = [_y(table, "8B/1B", "SSD, over SD", b) for b in (1, 4, 32)]
    inline = [_y(table, "8B/1B", best, b) for b in (1, 4, 32)]
    return (
        f"8B, products only: SSD over SD is {gains[0]:.2f}× for one sequence, {gains[1]:.2f}× for "
        f"four and {gains[2]:.2f}× for 32, since a miss delays all; over SD inline on the same two "
        f"GPUs it is {inline[0]:.2f}×, {inline[1]:.2f}× and, if misses take a lookup, "
        f"{inline[2]:.2f}× (one sequence: five seeds, more: one)."
    )


def pareto(table: pd.DataFrame) -> str:
    """Tells the ends of the frontier of 8B."""
    table = table[table["panel"].str.startswith("8B/1B")]
    front = table[table["series"] == "frontier"]
    inline = table[(table["series"] == "SD inline, T+1 GPUs") & (table["b"] == 1)]["x"].iloc[0]
    return (
        f"8B on two GPUs, products with LM head: for one SSD ({front['x'].max():.0f} tok/s) "
        f"and SD inline over both ({inline:.0f}) are equal within their interval; for 4 and 16 SD "
        f"inline leads, for 32 SSD with a fast backup ({front['y'].max():.0f} tok/s a GPU for all "
        "32, one seed; whole transformers: figure 7). 70B has no frontier, as SD inline was not "
        "measured in batches."
    )


def whole(data: Data) -> str:
    """Tells what whole transformers are predicted to give in a batch on two GPUs."""
    place = Place("", "8b/1b", 2, (1, 2), {"batch_size": 4})
    chat, code = (gain_of(place.uses(data.cells, law, False))[0] for law in (CHAT, CODE))
    return (
        f" Whole transformers are predicted to lose: for four sequences SSD makes {chat:.2f} "
        f"(chat) and {code:.2f} (code) of the strongest use of two GPUs ([map](map.md))."
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
        text = sentence(item.poster.table()) + whole(data) * (name == "batch")
        yield f"## {number}. {item.poster.heading}\n\n{text}\n\n![{item.name}]({path})\n"


if __name__ == "__main__":
    print("\n".join(lines(load([ROOT / "results"]))))
