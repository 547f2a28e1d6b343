#!/usr/bin/env python3
"""Runs what `plan` advises, and its rivals, on emulated devices: is the advice the best of them?

    results/emulated-advisor/advisor.py OUT [--cells=20] [--seed=1] [--table]

A cell is one machine, pair, number of GPUs, law and batch. Five configurations of it are run: the
advice, the best AR and SD (or SSD, where SD is advised), and the two nearest alternatives of the
mode that is advised. All have the cell's seed, hence the same text and the same luck at each of its
positions. The advice and the closest to it are run a second time, when each has been run once.
Ranks that sleep through modelled forwards need their cores when they wake: a run beside
which other programs took more than a tenth of the machine is not kept, and tried again later.

The cells and what was advised are kept in OUT/cells.json, rows in OUT/runs.jsonl, so an interrupted
study goes on where it stopped; --table only prints what is there. The bar: in every cell the advice
is within 2% of the best that was measured, or no different from it (95% interval). Some five
minutes on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(path) for path in Path(__file__).resolve().parents[1:3]]  # study, mpissd

from study import flags_of, rows_of, run_alone  # noqa: E402

from mpissd.common.compare import compare_rates  # noqa: E402
from mpissd.common.config import parse_flags  # noqa: E402
from mpissd.common.rates import Rate, Rounds, rate_of  # noqa: E402
from mpissd.engine.backend.profile import load_profile  # noqa: E402
from mpissd.lab.predict.advice import Advice  # noqa: E402
from mpissd.lab.predict.advisor import plan  # noqa: E402
from mpissd.lab.predict.costs import HostCosts  # noqa: E402
from mpissd.lab.predict.places import placements  # noqa: E402
from mpissd.lab.predict.search import Choice  # noqa: E402
from mpissd.lab.tables.load import load_rounds  # noqa: E402

MACHINES = [  # device, pair, GPUs
    ("h100", "8b/1b", 2),
    ("h200", "8b/1b", 2),
    ("h200", "70b/1b", 2),
    ("h100", "8b/1b", 3),
    ("h100", "70b/1b", 3),
]
RUN_S = 0.7  # of modelled rounds a run, but …
FEWEST, MOST, AR = 40, 120, 25  # … so many rounds; AR draws nothing


@dataclass(frozen=True)
class Cell:
    """One question to the advisor. laws: flags of `run`; rivals: the advice first."""

    number: int
    device: str
    pair: str
    gpus: int
    laws: dict[str, str]
    rivals: tuple[Choice, ...]

    @classmethod
    def draw(cls, number: int, seed: int) -> Cell:
        """Cell `number` of a study."""
        rng = random.Random(f"{seed}-{number}")
        device, pair, gpus = MACHINES[number % len(MACHINES)]
        laws = {"pair": pair, "alpha": f"{rng.choice([0.4, 0.6, 0.7, 0.8, 0.9])}"}
        laws["acceptance_fast"] = f"alpha:{rng.choice([0.1, 0.2, 0.4])}"
        laws["batch_size"] = f"{rng.choice([1, 1, 2, 4])}"
        if rng.random() < 0.5:
            laws["p_hit"] = f"{rng.choice([0.2, 0.5, 0.8, 0.95])}"
        else:
            laws |= {"hit_a": f"{rng.uniform(0.5, 1):.2f}", "hit_r": f"{rng.uniform(0.6, 1.4):.2f}"}
        config, profile = parse_flags(laws), load_profile(device)
        advice = plan(config, HostCosts(), placements(config, profile, gpus), gpus)
        return cls(number, device, pair, gpus, laws, _rivals(advice))

    def flags(self, choice: Choice) -> list[str]:
        """Of `mpissd run`, without --out."""
        flags = {**self.laws, **choice.flags(), "rounds": str(num_rounds(choice))}
        flags |= {"seed": str(self.number), "backend": "emulated", "device": self.device}
        return [f"--{name}={value}" for name, value in flags.items()]


def _rivals(advice: Advice) -> tuple[Choice, ...]:
    """The advice, two alternatives, and the best of the other modes."""
    drafted = [choice for choice in advice.by_method if choice.mode != "lookup"]
    others = {choice.mode: choice for choice in reversed(drafted)}
    others.pop(advice.best.mode, None)
    return (advice.best, *advice.alternatives, *others.values())


def cells_of(out: Path, count: int, seed: int) -> list[Cell]:
    """The cells of OUT/cells.json: what was advised when the study began; drawn where there are
    none yet."""
    path = out / "cells.json"
    if not path.exists():
        return [Cell.draw(number, seed) for number in range(count)]
    return [
        Cell(**{**cell, "rivals": tuple(Choice(**choice) for choice in cell["rivals"])})
        for cell in json.loads(path.read_text())
    ]


def save(cells: list[Cell], out: Path) -> None:
    """Keeps them for the next call."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(asdict(cell)) for cell in cells)
    (out / "cells.json").write_text(f"[\n{lines}\n]\n")


def num_rounds(choice: Choice) -> int:
    """Rounds of a run."""
    if choice.mode == "ar":
        return AR
    return max(FEWEST, min(MOST, int(RUN_S / choice.round_us * 1e6)))


def measure(out: Path, cells: list[Cell]) -> None:
    """Runs what OUT does not hold yet: all rivals of a cell in turn, then the best two again."""
    done = [flags_of(row) for row in rows_of(out)]
    for cell in cells:
        for turn, choice in turns(cell):
            flags = cell.flags(choice)
            if done.count(tuple(flags)) > turn:
                continue
            state = run_alone(choice.gpus, flags, out)
            done += [tuple(flags)] * (state == "")
            print(f"{cell.number + 1}/{len(cells)} {name_of(choice)}{state}", file=sys.stderr)


def turns(cell: Cell) -> Iterator[tuple[int, Choice]]:
    """(how often it was run before, choice), in the order in which they run."""
    yield from ((0, choice) for choice in cell.rivals)
    yield from ((1, choice) for choice in sorted(cell.rivals, key=lambda c: -c.tok_per_s)[:2])


@dataclass(frozen=True)
class Measured:
    """A choice and its runs. rate: the median run, as sure as the least sure; unlucky: what its
    draws are worth beside the laws' mean, by the predictor (predicted / expected)."""

    choice: Choice
    rate: Rate
    luck: float

    @classmethod
    def of(cls, choice: Choice, rows: list[dict], rounds: dict[str, Rounds]) -> Measured:
        """From the runs of one choice."""
        rates = [rate_of(row, rounds.get(row["run_id"])) for row in rows]
        luck = statistics.median(1 + row["sampling_error"] for row in rows)
        return cls(choice, Rate.of_repeats(rates), luck)

    @property
    def expected(self) -> float:
        """tok/s with the luck of the draws taken out."""
        return self.rate.value / self.luck


def table(cells: list[Cell], rows: list[dict], rounds: dict[str, Rounds]) -> str:
    """The study's verdict as Markdown, a line a cell."""
    lines = [
        "| machine, pair, GPUs | law, b | advised | tok/s | best measured | behind "
        "| behind, without luck |",
        "|---|---|---|---|---|---|---|",
    ]
    by_flags: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        by_flags.setdefault(flags_of(row), []).append(row)
    near, alike, fair, full = 0, 0, 0, 0
    for cell in cells:
        measured = [
            Measured.of(c, by_flags[key], rounds)
            for c in cell.rivals
            if (key := tuple(cell.flags(c))) in by_flags
        ]
        if len(measured) < len(cell.rivals):
            continue
        full += 1
        advised, best = measured[0], max(measured, key=lambda m: m.rate.value)
        behind = 1 - advised.rate.value / best.rate.value
        is_real = compare_rates(advised.rate, best.rate).is_real
        luckless = 1 - advised.expected / max(m.expected for m in measured)
        near += behind <= 0.02
        alike += behind > 0.02 and not is_real
        fair += luckless <= 0.02
        lines.append(
            f"| {cell.device}, {cell.pair}, {cell.gpus} | {law_of(cell)} "
            f"| {name_of(advised.choice)} | {advised.rate.value:.0f} "
            f"| {'the same' if best is advised else name_of(best.choice)} "
            f"| {behind:.1%}{'' if is_real or best is advised else ' (no difference)'} "
            f"| {luckless:.1%} |"
        )
    lines += [
        "",
        f"Within 2% of the best measured in {near} of {full} cells, and no different from it in "
        f"{alike} more;",
        f"within 2% of it without the luck of the draws in {fair}.",
    ]
    return "\n".join(lines)


def law_of(cell: Cell) -> str:
    """The cell's laws, in short."""
    laws = cell.laws
    hits = f"p_hit {laws['p_hit']}" if "p_hit" in laws else f"A {laws['hit_a']}, r {laws['hit_r']}"
    fast = laws["acceptance_fast"].partition(":")[2]
    return f"alpha {laws['alpha']} ({fast} fast), {hits}, b={laws['batch_size']}"


def name_of(choice: Choice) -> str:
    """A choice, in short."""
    where = f"T={choice.tp}" + " D=1" * (choice.num_drafts == 1)
    if choice.mode == "ar":
        return f"AR {where}"
    if choice.mode == "sd":
        return f"SD {where} K={choice.lookahead}"
    backup = f"{choice.backup} {choice.backup_lookahead}"
    return f"SSD {where} K={choice.lookahead} {choice.fan_out} {backup} {choice.on_late}"


def main() -> int:
    """Measures what is missing, prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    os.environ.setdefault("PYTHON", sys.executable)
    cells = cells_of(given.out, given.cells, given.seed)
    if not given.table:
        save(cells, given.out)
        measure(given.out, cells)
    rows = rows_of(given.out)
    print(table(cells, rows, load_rounds([given.out], rows) if rows else {}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
