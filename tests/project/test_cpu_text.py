"""The table of text on two CPU cores has the medians of its rows."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from mpissd.common.output import read_rows
from mpissd.common.row import Row
from tests.scripts import ROOT, load

FOLDER = ROOT / "results/cpu-text"
choose = load("results/cpu-text/choose.py")


def test_every_cell_is_a_median_of_the_repeats() -> None:
    methods: dict[str, list[Any]] = defaultdict(list)
    for row in map(Row.from_dict, read_rows(FOLDER / "final.jsonl")):
        methods[choose.method(row)].append(row)
    lines = (FOLDER / "README.md").read_text("utf-8").replace("*", "").splitlines()
    assert len(methods) == 6
    for name, rows in methods.items():
        (line,) = (line for line in lines if line.startswith(f"| {name} |"))
        cores, speed, _, *others = choose.numbers(rows, 1.0).split(" | ")
        others[1] = others[1].removeprefix("0")  # hits, as the text writes them
        assert [cell.strip() for cell in line.split("|")[3:-1]] == [cores, speed, *others]
        assert others[2] == f"{sorted(1e3 * row.t_target_s for row in rows)[1]:.1f} ms"
