#!/usr/bin/env python3
"""Runs every schedule on equal GPUs under one outcome law, emulated, and prints one table a cell.

    results/emulated-schedules/schedules.py OUT [--gpus=3] [--device=h100] [--tokens=1500] \\
        [--repeats=1] [--table]

A cell is a target (8b, 70b) and an alpha (.8, .6). A draft on a rank of its own leaves T = GPUs − 1
to the target, or the next smaller T that divides it; an inline one leaves all of them. K (SSD: and
K_b) is the best of 1 … 12 by the schedule's own formula over the profile's forwards. Rows go to
OUT/runs.jsonl; what is there already is not run again, and --table only prints. The rounds of a
repetition are the same ones, and what else runs on the machine only adds time to them: of several
the fastest is shown. docs/schedules.md says what the columns mean.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path[:0] = [str(path) for path in Path(__file__).resolve().parents[1:3]]  # study, mpissd

from study import LOCAL, flags_of, rows_of  # noqa: E402

from mpissd.common.presets import resolve_model  # noqa: E402
from mpissd.engine.backend.profile import load_profile  # noqa: E402
from mpissd.engine.model.shard import ForwardOptions, Shard  # noqa: E402

TARGETS, ALPHAS = ("8b", "70b"), (0.8, 0.6)
OPTIONS = ForwardOptions(fuse=True, lm_head=True)
# The rows are of h200 as it was before kernels were told apart.
PROFILES = {"h200": str(Path(__file__).parents[1] / "h200-probe/before.json")}
LONGEST, LOOKED_UP, FAN_OUT = 12, 8, 3
HEADS = {  # of the sizes that were published: EAGLE, Medusa's default, IBM's accelerators
    "8b": {"eagle": "eagle:8b", "mtp": "mtp:8b", "medusa": "medusa4:8b", "mlp": "mlp3072:8b"},
    "70b": {"eagle": "eagle:70b", "mtp": "mtp:70b", "medusa": "medusa4:70b", "mlp": "mlp8192:70b"},
}


@dataclass(frozen=True)
class Entry:
    """A line of the table: what is run, and by which formula its K is chosen."""

    name: str
    flags: tuple[str, ...]
    draft: str = "1b"
    inline: bool = False
    drafting: str = "exposed"  # the formula's name (lengths), or a K


def entries(target: str, alpha: float) -> Iterator[Entry]:
    """All schedules. A bonus after accepted tokens is right as often as a drafted one (temperature
    0): A = 1 − alpha. Candidates after a rejection miss by .75/F."""
    first_choice = f"--hit_a={1 - alpha:.2f}"
    yield Entry("ar", ("--mode=ar",), inline=True, drafting="0")
    yield Entry("sd-inline", ("--schedule=sd-inline",), inline=True)
    for name, draft in HEADS[target].items():
        drafting = "4" if name == "medusa" else "exposed"
        flags = ("--schedule=sd-inline",)
        yield Entry(f"{name}, inline", flags, draft, inline=True, drafting=drafting)
    for rate in (alpha, 0.3):
        flags = ("--schedule=lookup", f"--acceptance_fast=alpha:{rate}")
        yield Entry(f"lookup at {rate}", flags, inline=True, drafting=str(LOOKED_UP))
    yield Entry("sd", ("--mode=sd",))
    yield Entry("ssd, A = 0.75", ("--mode=ssd",), drafting="ssd")  # the default of its rows' time
    yield Entry(f"ssd, A = {1 - alpha:.2f}", ("--mode=ssd", first_choice), drafting="ssd")


def ranks_for(target: str, gpus: int) -> int:
    """The largest T that divides the target, at most so many."""
    shape = resolve_model(target)
    widths = shape.num_heads, shape.num_kv_heads, shape.ffn, shape.vocab_size
    return max(t for t in range(1, gpus + 1) if not any(width % t for width in widths))


def lengths(entry: Entry, device: str, target: str, tp: int, alpha: float) -> tuple[int, int]:
    """(K, K_b) with the most tokens a second; E(K) tokens a round, t the verification, s a step.

    exposed: E(K)/(t + K·s). ssd: hits take max(t, (K+1)·s), misses K_b exposed steps.
    """
    if entry.drafting.isdigit():
        return int(entry.drafting), int(entry.drafting)
    t, s = forward_s(device, target, tp, LONGEST + 1), forward_s(device, entry.draft, 1, 1)
    hit = 0.0 if entry.drafting == "exposed" else 1.0
    if entry.drafting == "ssd":
        hit = 1 - (1 - alpha if "--hit_a" in " ".join(entry.flags) else 0.75) / FAN_OUT

    def tok_per_s(k: int, backup: int) -> float:
        hits, misses = hit * max(t, (k + 1) * s), (1 - hit) * (t + backup * s)
        return (hit * mean_tokens(alpha, k) + (1 - hit) * mean_tokens(alpha, backup)) / (
            hits + misses
        )

    ways = [(k, b) for k in range(1, LONGEST + 1) for b in range(1, k + 1) if b == k or 0 < hit < 1]
    best, backup = max(ways, key=lambda way: tok_per_s(*way))
    return best, backup


def mean_tokens(alpha: float, count: int) -> float:
    """E: tokens of a round that verifies so many drafted ones."""
    return float((1 - alpha ** (count + 1)) / (1 - alpha))


@cache
def forward_s(device: str, model: str, tp: int, rows: int) -> float:
    """A forward of the profile's device."""
    cost = Shard(resolve_model(model), tp).cost(rows, 1, 2, OPTIONS)
    return load_profile(PROFILES.get(device, device)).forward_s(cost)


def command(given: argparse.Namespace, target: str, alpha: float, entry: Entry) -> list[str]:
    """[ranks, flags …] of one run."""
    tp = ranks_for(target, given.gpus if entry.inline else given.gpus - 1)
    count, backup = lengths(entry, given.device, target, tp, alpha)
    pair = f"--pair={target}/{entry.draft}"
    law = [f"--alpha={alpha}", f"--num_tokens={given.tokens}", f"--seed={given.seed}"]
    where = ["--backend=emulated", f"--device={given.device}", "--fuse", "--lm_head"]
    drafts = [] if count == 0 else [f"--lookahead={count}"]
    drafts += [f"--backup_lookahead={backup}"] if entry.drafting == "ssd" else []
    return [str(tp + (not entry.inline)), *where, pair, *law, *drafts, *entry.flags]


def measure(given: argparse.Namespace, cell: tuple[str, float]) -> None:
    """Runs what OUT does not hold yet."""
    done = Counter(flags_of(row) for row in rows_of(given.out))
    for entry in entries(*cell):
        ranks, *flags = command(given, *cell, entry)
        run = [str(LOCAL), ranks, f"--out={given.out}", *flags]
        for _ in range(given.repeats - done[tuple(flags)]):
            ended = subprocess.run(run, stdout=subprocess.DEVNULL, timeout=600, check=False)
            state = "" if ended.returncode == 0 else f" FAILED ({ended.returncode})"
            print(f"{cell[0]} {cell[1]} {entry.name}: {' '.join(flags)}{state}", file=sys.stderr)


def table(given: argparse.Namespace, cell: tuple[str, float]) -> str:
    """One cell as Markdown; entries that were not run are left out."""
    by_speed = sorted(rows_of(given.out), key=lambda row: float(row["tok_per_s"]))
    held = {flags_of(row): row for row in by_speed}  # the fastest of each
    measured = [
        (entry, held[tuple(flags)])
        for entry in entries(*cell)
        for flags in [command(given, *cell, entry)[1:]]
        if tuple(flags) in held
    ]
    lines = [
        f"**{cell[0]}, alpha {cell[1]}, {given.gpus} × {given.device} (emulated)**",
        "",
        "| schedule | T + D | draft | K (K_b) | tok/s | tok/s per GPU | × AR | tokens a round "
        "| hits | t_draft / t_target | predicted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    base = next((row["tok_per_s"] for entry, row in measured if entry.name == "ar"), None)
    lines += [line(given, entry, row, base) for entry, row in measured]
    same = len({row["token_digest"] for _, row in measured}) == 1
    return "\n".join([*lines, "", f"All emitted the same tokens: {'yes' if same else 'NO'}."])


def line(given: argparse.Namespace, entry: Entry, row: dict, base: float | None) -> str:
    """One line of the table."""
    idle = given.gpus - row["world_size"]
    place = f"{row['tp']} + {row['num_drafts']}" + (f", {idle} idle" if idle else "")
    rate, predicted = row["tok_per_s"], row["predicted_tok_per_s"]
    cells = [
        entry.name,
        place,
        row["draft"] or "–",
        length(row),
        f"{rate:.1f}",
        f"{rate / given.gpus:.1f}",
        "–" if base is None else f"{rate / base:.2f}",
        f"{row['acceptance_length']:.2f}",
        "–" if row["hit_rate"] is None else f"{row['hit_rate']:.2f}",
        "–" if row["T_SD"] is None else f"{row['T_SD']:.2f}",
        "–" if predicted is None else f"{predicted:.1f} ({rate / predicted - 1:+.1%})",
    ]
    return f"| {' | '.join(cells)} |"


def length(row: dict) -> str:
    """K, and K_b where it is another."""
    backup = row["backup_lookahead"]
    return str(row["lookahead"]) + (
        f" ({backup})" if backup not in (None, row["lookahead"]) else ""
    )


def main() -> int:
    """Measures what is missing, prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=3, help="T + D, at least 2")
    parser.add_argument("--device", default="h100", help="an emulated device")
    parser.add_argument("--tokens", type=int, default=1500, help="of one sequence")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=1, help="runs of each; the fastest is shown")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    if given.gpus < 2:
        parser.error(f"--gpus={given.gpus}: allowed: 2 or more")
    os.environ.setdefault("PYTHON", sys.executable)
    for cell in [(target, alpha) for target in TARGETS for alpha in ALPHAS]:
        if not given.table:
            measure(given, cell)
        print(table(given, cell), end="\n\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
