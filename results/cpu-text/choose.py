"""What measure.sh needs beside its sweeps: the prompts, the best of each method, the table.

python results/cpu-text/choose.py prompts N | grid OUT | file | table OUT
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpissd.common.output import read_rows
from mpissd.common.presets import files_of, split_pair
from mpissd.common.row import Row

DATA = Path(__file__).resolve().parents[2] / "tests/data/prompts"
NUM_CHAT, NUM_CODE = 16, 8  # of people's prompts
HEADS = "at,cores,tok/s,× AR T=1,tokens a round,hits,target forward,draft of K".split(",")
VARIED = ("mode", "num_drafts", "lookahead", "fan_out", "backup")  # in the grids
MODES = {"ar": "AR", "sd": "SD", "ssd": "SSD"}


def prompts(count: int) -> list[str]:
    """Every 12th chat prompt and every 20th of HumanEval's; one of three is code."""
    chat, code = ((DATA / f"{name}.jsonl").read_text("utf-8") for name in ("chat", "humaneval"))
    first, second = chat.splitlines()[::12], code.splitlines()[::20]
    lines = [
        line
        for n in range(NUM_CODE)
        for line in (*first[2 * n : 2 * n + NUM_CHAT // NUM_CODE], second[n])
    ]
    return lines[:count]


def rows_of(folder: Path) -> list[Row]:
    return [Row.from_dict(line) for line in read_rows(folder / "runs.jsonl")]


def method(row: Row) -> str:
    """The use of the cores: its name in the table."""
    inline = " inline" if row.mode == "sd" and not row.num_drafts else ""
    drafts = f" D={row.num_drafts}" if row.num_drafts else ""
    return f"{MODES[row.mode]}{inline} T={row.tp}{drafts}"


def flags(row: Row) -> dict[str, str]:
    """What its sweep's grid said of a row."""
    told = (row.sweep or {})["flags"]
    return {name: str(told[name]) for name in VARIED if name in told}


def best_of(rows: Iterable[Row]) -> dict[str, Row]:
    """The fastest row of each method."""
    found: dict[str, Row] = {}
    for row in rows:
        told = method(row)
        if told not in found or row.tok_per_s > found[told].tok_per_s:
            found[told] = row
    return found


def grid(folder: Path) -> str:
    """The grid of each method's fastest configuration."""
    blocks = []
    for name, row in best_of(rows_of(folder)).items():
        lines = (f"{flag} = {value}" for flag, value in flags(row).items())
        blocks.append("\n".join([f"[{name.replace('=', '')}]", *lines]))
    return "\n\n".join(blocks)


def table(out: Path) -> str:
    """The table: each method at its best, then llama.cpp; medians over the repeats."""
    methods: dict[str, list[Row]] = defaultdict(list)
    for name in ("final", "final_t2"):
        for row in rows_of(out / name):
            methods[method(row)].append(row)
    base = statistics.median(row.tok_per_s for row in methods["AR T=1"])
    lines = [f"| | {' | '.join(HEADS)} |", "| --- | --- " + "| ---: " * 7 + "|"]
    for name, rows in sorted(methods.items(), key=lambda one: one[1][0].world_size):
        lines.append(f"| {name} | {at(rows[0])} | {numbers(rows, base)} |")
    lines += [rival(found, base) for found in rivals(out / "llama.jsonl")]
    return "\n".join(lines)


def at(row: Row) -> str:
    known = flags(row)
    told = [f"K={row.lookahead}"] if row.lookahead else []
    return " ".join([*told, *(known[name] for name in ("fan_out", "backup") if name in known)])


def numbers(rows: list[Row], base: float) -> str:
    """A row's cells behind its name; one core a rank."""
    speeds, one = [row.tok_per_s for row in rows], rows[0]
    speed = statistics.median(speeds)
    spread = f" ({min(speeds):.1f}–{max(speeds):.1f})" if len(speeds) > 1 else ""
    hits = "" if one.hit_rate is None else f"{one.hit_rate:.2f}"
    times = [[row.t_target_s for row in rows], [row.t_draft_s for row in rows]]
    cells = [str(one.world_size), f"{speed:.1f}{spread}", f"{speed / base:.2f}"]
    cells += [f"{one.acceptance_length:.2f}", hits]
    cells += ["" if None in of else f"{statistics.median(of) * 1e3:.1f} ms" for of in times]
    return " | ".join(cells)


def rivals(path: Path) -> list[list[dict[str, float]]]:
    """llama.cpp's rows by its number of threads."""
    found: dict[int, list[dict[str, float]]] = defaultdict(list)
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        found[row["threads"]].append(row)
    return [found[threads] for threads in sorted(found)]


def rival(rows: list[dict[str, float]], base: float) -> str:
    speed, one = statistics.median(row["tok_per_s"] for row in rows), rows[0]
    name = f"llama.cpp ({one['version']}), {one['file']}"
    return f"| {name} | | {one['threads']} | {speed:.1f} | {speed / base:.2f} | 1 | | | |"


def main(what: str, *given: str) -> None:
    if what == "prompts":
        print("\n".join(prompts(int(given[0]))))
    elif what == "grid":
        print(grid(Path(given[0])))
    elif what == "file":
        print(files_of(split_pair("smollm2")[0]))
    else:
        print(table(Path(given[0])))


if __name__ == "__main__":
    main(*sys.argv[1:])
