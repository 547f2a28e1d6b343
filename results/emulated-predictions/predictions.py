#!/usr/bin/env python3
"""Measures random configurations and holds the predictor against them (emulated, or on GPUs).

    results/emulated-predictions/predictions.py OUT [--cells=100] [--rounds=400] [--seed=1]
        [--gpus=N] [--table]

A cell is one machine, pair, K, law and batch, run as SD and as SSD; every row carries the
prediction made from its own job's profile. Rows go to OUT/runs.jsonl as always, so an interrupted
study goes on where it stopped; --table only prints what is there. The three errors are those of
`predict --rows=OUT`. The bars: median and p95 at most 3% and 8% of the replay from a row's own
profile, 4% and 10% of the laws' mean from another job's at T = 1, and the sign of SSD - SD right in
>= 98% of the cells whose 95% interval leaves 0 out.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
from pathlib import Path

sys.path[:0] = [str(path) for path in Path(__file__).resolve().parents[1:3]]  # study, mpissd

from study import LOCAL, flags_of, rows_of  # noqa: E402

from mpissd.common.compare import compare_rows  # noqa: E402
from mpissd.common.rates import Rounds  # noqa: E402
from mpissd.lab.predict.accuracy import judge, profile_of_another_job  # noqa: E402
from mpissd.lab.tables.load import load_rounds  # noqa: E402

MACHINES = [  # device, pair, T
    ("h100", "8b/1b", 1),
    ("h100", "70b/1b", 2),
    ("h100", "70b/1b", 4),
    ("h200", "8b/1b", 1),
    ("h200", "8b/1b", 2),
    ("h200", "70b/1b", 2),
    ("a100-80", "8b/1b", 1),
    ("a100-80", "32b/0.6b", 1),
    ("v100-32", "8b/1b", 1),
]


def draw(rng: random.Random, seed: int, gpus: int) -> tuple[int, list[str]]:
    """(T, flags) of one random cell; the flags hold for SD and SSD."""
    device, pair, tp = rng.choice(MACHINES)
    if gpus:
        pair, tp = rng.choice([("8b/1b", 1)] + [("70b/1b", 2)] * (gpus >= 3))
    lookahead = rng.randint(1, 8)
    flags = [f"--pair={pair}", f"--lookahead={lookahead}", f"--seed={seed}"]
    flags.append(f"--alpha={rng.choice([0.5, 0.6, 0.7, 0.8, 0.9, 0.95])}")
    flags.append(f"--batch_size={rng.choice([1, 1, 1, 2, 4, 8])}")
    flags.append(rng.choice(["--fuse", "--nofuse"]))
    flags += ["--backend=cupy"] if gpus else ["--backend=emulated", f"--device={device}"]
    return tp, flags


def ahead(rng: random.Random, lookahead: int) -> list[str]:
    """The flags that SSD alone has."""
    flags = [
        rng.choice(
            [
                f"--fan_out=uniform:{rng.randint(1, 5)}",
                f"--fan_out=geometric:{rng.randint(2 * lookahead + 2, 40)}",
            ]
        )
    ]
    if rng.random() < 0.5:
        flags.append(f"--p_hit={rng.choice([0, 0.3, 0.6, 0.9, 1])}")
    else:
        flags += [f"--hit_a={rng.uniform(0.4, 1):.2f}", f"--hit_r={rng.uniform(0.5, 1.5):.2f}"]
    rng.choice(
        ["finish", "serve"]
    )  # as before --on_late was retired, so that seeds keep their flags
    flags.append(f"--backup={rng.choice(['jit', 'jit', 'fast'])}")
    flags.append(f"--backup_lookahead={rng.randint(1, lookahead)}")
    return flags


def measure(out: Path, cells: int, rounds: int, seed: int, gpus: int) -> None:
    """Runs what OUT does not hold yet, a cell's SD and SSD one after the other."""
    done = {flags_of(row) for row in rows_of(out)}
    for number in range(cells):
        rng = random.Random(f"{seed}-{number}")
        tp, common = draw(rng, number, gpus)
        lookahead = int(common[1].partition("=")[2])
        for mode, extra in (("sd", []), ("ssd", ahead(rng, lookahead))):
            flags = [f"--mode={mode}", f"--rounds={rounds}", *common, *extra]
            if tuple(flags) in done:
                continue
            run = [str(LOCAL), str(tp + 1), f"--out={out}", *flags]
            ended = subprocess.run(run, stdout=subprocess.DEVNULL, timeout=300, check=False)
            state = "" if ended.returncode == 0 else f" FAILED ({ended.returncode})"
            print(f"{number + 1}/{cells} {mode} {' '.join(flags[2:])}{state}", file=sys.stderr)


def verdict(rows: list[dict], rounds: dict[str, Rounds]) -> str:
    """What the rows say of the sign of SSD - SD. rounds: by run_id, where kept."""
    right, counted, skipped = signs(rows, rounds)
    source = f"by the rounds of {len(rounds)} rows" if rounds else "by the rows' own statistics"
    return (
        f"Sign of SSD − SD right in {right} of {counted} cells whose 95% interval leaves 0 out\n"
        f"({skipped} cannot be decided; intervals {source})."
    )


def signs(rows: list[dict], rounds: dict[str, Rounds]) -> tuple[int, int, int]:
    """(right, decided, undecided) over the cells that have both modes.

    A cell is decided where the interval of SSD over SD leaves 1 out (mpissd.common.compare).
    """
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        key = (row["seed"], row["target"], row["tp"], row["device_name"], row["batch_size"])
        cells.setdefault(key, {})[row["mode"]] = row
    right = counted = skipped = 0
    for cell in cells.values():
        if len(cell) < 2:
            continue
        sd, ssd = cell["sd"], cell["ssd"]
        measured = compare_rows([sd], [ssd], rounds)
        if not measured.is_real:
            skipped += 1
            continue
        counted += 1
        right += (measured.speedup > 1) == (ssd["predicted_tok_per_s"] > sd["predicted_tok_per_s"])
    return right, counted, skipped


def main() -> int:
    """Measures what is missing, prints the errors."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--cells", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=400, help="of a row; fewer, more luck")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="0: emulated")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    os.environ.setdefault("PYTHON", sys.executable)
    if not given.table:
        measure(given.out, given.cells, given.rounds, given.seed, given.gpus)
    rows = [row for row in rows_of(given.out) if row["prediction_error"] is not None]
    print(judge(rows, profile_of_another_job(None, None))[0])
    print(f"\n{verdict(rows, load_rounds([given.out], rows))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
