"""Prints a table of docs/hosts.md, or draws its figure, from rows in this folder.

    python -m results.hosts.tables gains|uses|alone
    python -m results.hosts.tables figure FOLDER

wire-MS.jsonl has the rows of two hosts with MS milliseconds of delay each way, local.jsonl those of
one host in the same visit, sharded-MS.jsonl those whose target spans both hosts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from mpissd.common.output import read_rows
from mpissd.common.row import flat
from results import pages
from results.pages import Lines, head, line, share

HERE = Path(__file__).resolve().parent
Row = dict[str, Any]
Rates = dict[str, float]  # by the checksum of a file of prompts: tok/s
DELAYS = ("0", "0.05", "0.2", "0.5", "1", "2.5", "5")
CHAIN, ONE_FORWARD = "SSD K=2", "SSD in one forward K=2"
REMOTE = [
    f"{CHAIN}, 3 branches, hits at the lead",
    f"{CHAIN}, 6 branches, hits at the lead",
    f"{CHAIN}, 6 branches, hits at the draft",
    f"{ONE_FORWARD}, 3 branches, hits at the lead",
    f"{ONE_FORWARD}, 3 branches, hits at the draft",
    f"{ONE_FORWARD}, 6 branches, hits at the lead",
    "SD K=2",
]


def use_of(row: Row) -> str:
    """Returns the name of what a row ran: its mode, way of drafting, K, and where hits are."""
    inline = " inline" if row["mode"] == "sd" and not row["num_drafts"] else ""
    words = [row["mode"].upper() + inline]
    if row["backup"] == "fast":
        words = ["lookup"]
    elif row["tree_nodes"]:
        words = [f"tree of {row['tree_nodes']}"]
    if row["parallel_drafting"]:
        words.append("in one forward")
    if row["lookahead"]:
        words.append(f"K={row['lookahead']}")
    name = " ".join(words)
    if row["mode"] != "ssd":
        return name
    return f"{name}, {row['branch_budget']} branches, hits at the {row['cache']}"


def rates(name: str) -> dict[str, Rates]:
    """Returns the tok/s of each use in the file `name`, by the checksum of its prompts."""
    found: dict[str, Rates] = {}
    for row in map(flat, read_rows(HERE / f"{name}.jsonl")):
        found.setdefault(use_of(row), {})[row["prompts_sha256"]] = row["tok_per_s"]
    return found


def typical(of: Rates) -> float:
    """Returns the median tok/s over the files of prompts."""
    return median(of.values())


def fastest(uses: dict[str, Rates]) -> str:
    """Returns the use with the largest median."""
    return max(uses, key=lambda use: typical(uses[use]))


def round_trips() -> dict[str, float]:
    """Returns the round trips in ms that were measured by ping, by delay each way."""
    return dict(json.loads((HERE / "round_trips.json").read_text()))


def ratio(of: Rates, base: Rates) -> str:
    """Formats the median of the ratios by file of prompts, with the smallest and the largest."""
    ratios = [of[prompts] / base[prompts] for prompts in of]
    low, high = (share(bound, 2) for bound in (min(ratios), max(ratios)))
    return f"{share(median(ratios), 2)} ({low}–{high})"


def uses() -> Lines:
    """Yields the table of tok/s by round trip."""
    trips = round_trips()
    yield from head("round trip, ms", *(share(trips[delay], 2) for delay in DELAYS))
    here = {delay: rates(f"wire-{delay}") for delay in DELAYS}
    for use in REMOTE:
        yield line([use, *(f"{typical(here[delay][use]):.0f}" for delay in DELAYS)])


def gains() -> Lines:
    """Yields the table of the fastest SSD by round trip over the fastest use of one host, where
    both may draft in one forward, and where neither may."""
    names = ("SSD", "tok/s", "over one host", "a token a forward on both sides: tok/s", "over one")
    yield from head("round trip, ms", *names)
    local = rates("local")
    chains = {use: of for use, of in local.items() if "one forward" not in use}
    trips = round_trips()
    for delay in DELAYS:
        here = {use: of for use, of in rates(f"wire-{delay}").items() if use.startswith("SSD")}
        best = fastest(here)
        chain = fastest({use: of for use, of in here.items() if use.startswith(CHAIN)})
        cells = [best]
        for use, rivals in ((best, local), (chain, chains)):
            cells += [f"{typical(here[use]):.0f}", ratio(here[use], rivals[fastest(rivals)])]
        yield line([share(trips[delay], 2), *cells])


def alone() -> Lines:
    """Yields the table of tok/s of one host alone, and of both hosts for the target."""
    yield from head("use", "hosts", "round trip, ms", "tok/s, median", "smallest", "largest")
    for use, of in sorted(rates("local").items(), key=lambda item: -typical(item[1])):
        numbers = (typical(of), min(of.values()), max(of.values()))
        yield line([use, 1, "–", *(f"{number:.0f}" for number in numbers)])
    trips = round_trips()
    for delay in DELAYS:
        if (HERE / f"sharded-{delay}.jsonl").exists():
            for use, of in rates(f"sharded-{delay}").items():
                yield line([use, 2, share(trips[delay], 2), f"{typical(of):.0f}", "–", "–"])


def figure(folder: Path) -> None:
    """Draws tok/s (y) by the round trip (x) as FOLDER/hosts.png."""
    from analysis.style import BLUE, GREY, ORANGE, RED, Poster, save, themed

    trips = round_trips()
    x = [trips[delay] for delay in DELAYS]
    local = rates("local")
    with themed():
        poster = Poster(7.4, 9.0)
        ((ax,),) = poster.panels(1, 1)
        looks = (5, RED, "-"), (3, ORANGE, "-"), (4, ORANGE, ":"), (6, BLUE, "-")
        for number, color, line_style in looks:
            use = REMOTE[number]
            by_delay = [list(rates(f"wire-{delay}")[use].values()) for delay in DELAYS]
            poster.line(
                ax, use, x, map(median, by_delay), low=map(min, by_delay), high=map(max, by_delay),
                color=color, linestyle=line_style, marker="o",
            )  # fmt: skip
        for use, line_style in ((fastest(local), "-"), ("AR", ":")):
            rate = typical(local[use])
            ax.axhline(rate, color=GREY, linestyle=line_style, label=f"one host: {use}")
        ax.set(xscale="log", xlabel="round trip, ms", ylabel="tok/s", ylim=(50, None))
        ax.set_xticks(x, [f"{trip:.2g}" for trip in x], minor=False)
        ax.minorticks_off()
        first = flat(read_rows(HERE / "local.jsonl")[0])
        text = (
            f"SmolLM2-135M-Instruct and its shipped draft, a core each of {first['device_name']}, "
            "MPI over TCP. Medians of five files of four prompts, bars from the smallest to the "
            "largest"
        )
        poster.finish("What does distance cost a draft on another host?", text)
        save(poster, folder / "hosts", ["png"])


TABLES = {of.__name__: of for of in (gains, uses, alone)}


def main(words: Sequence[str]) -> int:
    """Prints a table or draws the figure; returns the exit code."""
    if words[:1] == ["figure"] and len(words) == 2:
        figure(Path(words[1]))
        return 0
    return pages.printed(TABLES, __doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
