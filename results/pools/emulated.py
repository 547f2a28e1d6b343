#!/usr/bin/env python
"""Runs pools on emulated devices that are slowed down, and compares what was predicted.

    results/pools/emulated.py OUT           runs what OUT/emulated.jsonl lacks (ten minutes)
    results/pools/emulated.py OUT --table   prints the table

Up to nine ranks share two cores here. On a device whose every time is 100 or 30 times as long, the
ranks sleep nearly always, and the host's work and its delays are below a percent or two of a round.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mpissd.common.config import RunConfig
from mpissd.common.flags import parse_into
from mpissd.common.output import read_rows
from mpissd.common.row import Row
from mpissd.engine.backend.profile import Profile, known_profiles, load_profile
from mpissd.engine.job import resolve
from mpissd.lab.pools.durations import Pool
from mpissd.lab.pools.simulation import replay, simulate
from mpissd.lab.pools.theory import by_queueing
from mpissd.lab.predict.costs import HostCosts

ROOT = Path(__file__).resolve().parents[2]
SLOWED = {"8b/1b": 100, "70b/1b": 30}
ROUNDS = {"8b/1b": 50, "70b/1b": 24}
COMMON = "--backend=emulated --num_drafts=1 --alpha=0.8 --fuse=true --deadline_s=300"
CASES = (
    (
        "--pair=8b/1b --mode=ssd --lookahead=4 --fan_out=geometric:20 --backup_lookahead=2",
        (1, 2, 4, 8),
    ),
    ("--pair=8b/1b --mode=ssd --lookahead=3 --fan_out=geometric:16 --backup_lookahead=2", (8,)),
    ("--pair=8b/1b --mode=sd --lookahead=4", (4,)),
    ("--pair=70b/1b --mode=ssd --lookahead=8 --fan_out=uniform:3", (2, 8)),
    ("--pair=70b/1b --mode=ssd --lookahead=16 --fan_out=geometric:64 --backup_lookahead=8", (4, 8)),
)
FILE = "emulated.jsonl"


def slowed(by: int) -> dict[str, object]:
    """The built-in H200's profile with every time `by` times as long, and no host costs."""
    found = json.loads(known_profiles()["h200"].read_text())
    numbers, reduces = found["numbers"], found["all_reduce"]
    for name in ("read_bytes_per_s", "peak_flops_per_s"):
        numbers[name]["value"] /= by
    for name in ("product_overhead_s", "launch_s"):
        numbers[name]["value"] *= by
    reduces["latency_s"] = {n: s * by for n, s in reduces["latency_s"].items()}
    reduces["bytes_per_s"] = {n: rate / by for n, rate in reduces["bytes_per_s"].items()}
    for tables in found["tables"].values():
        for table in tables:
            table["seconds"] = {n: s * by for n, s in table["seconds"].items()}
    for name in ("host", "made_of", "other_kernels"):
        found.pop(name, None)
    name = f"{found['device_name']} slowed {by} times"
    return {**found, "name": f"h200-slowed-{by}", "device_name": name}


def run(flags: str, groups: int, folder: Path) -> Row:
    """Runs one pool in a folder of its own; returns its row."""
    pair = flags.split()[0].removeprefix("--pair=")
    device = folder / f"h200-slowed-{SLOWED[pair]}.json"
    device.write_text(json.dumps(slowed(SLOWED[pair])))
    words = [*COMMON.split(), *flags.split(), f"--groups={groups}", f"--device=./{device.name}"]
    words += [f"--rounds={ROUNDS[pair]}", "--out=."]
    subprocess.run(
        [ROOT / "launch" / "local.sh", str(groups + 1), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        timeout=400,
        stdout=subprocess.DEVNULL,
    )
    (line,) = read_rows(folder / "runs.jsonl")
    return Row.from_dict(line)


def pool_of(row: Row) -> Pool:
    """The pool of a row, as its slowed device takes its time."""
    words = [word for word in row.command[1:] if word.startswith("--")]
    flags = dict(word.removeprefix("--").split("=", 1) for word in words)
    for name in ("backend", "device", "out", "groups", "progress"):
        flags.pop(name, None)
    config = replace(parse_into(RunConfig, flags), groups=1)
    job = resolve(config, row.tp, backend="emulated", memory_bytes=None)
    return Pool.of(job, row.groups or 1, profile(row), HostCosts())


def profile(row: Row) -> Profile:
    """The slowed device of a row."""
    by = int(row.device_name.split(" slowed ")[1].split()[0])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slowed.json"
        path.write_text(json.dumps(slowed(by)))
        return load_profile(str(path))


def errors(row: Row) -> tuple[float, float, float]:
    """Measured over predicted, less one: tok/s by a replay of the run's own draws, and the mean
    round by the laws, simulated and by queueing theory."""
    pool, groups = pool_of(row), row.groups or 1
    own, _ = replay(pool, row.num_rounds // groups)
    law, sized = simulate(pool, 8000 // groups), by_queueing(pool)
    round_s = row.round_us["mean"] * 1e-6
    return row.tok_per_s / own.tok_per_s - 1, round_s / law.round_s - 1, round_s / sized.round_s - 1


def table(rows: list[Row]) -> str:
    """The table of docs/pools.md."""
    lines = [
        "| pair | mode, K, fan-out | G | tok/s, unslowed | hits | replay: tok/s "
        "| simulation: round | theory: round |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        by = int(row.device_name.split(" slowed ")[1].split()[0])
        pair = "70b/1b" if "70b" in str(row.target) else "8b/1b"
        fan_out = f", {sum(row.fan_out)} branches" if row.fan_out else ""
        what = f"{str(row.mode).upper()}, {row.lookahead}{fan_out}"
        hits = "–" if row.hit_rate is None else f"{row.hit_rate:.2f}"
        told = " | ".join(f"{error:+.1%}" for error in errors(row))
        rate = f"{by * row.tok_per_s:.0f}"
        lines.append(f"| {pair} | {what} | {row.groups} | {rate} | {hits} | {told} |")
    return "\n".join(lines)


def main() -> None:
    """Runs what is missing, or prints the table."""
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    path = out / FILE
    rows = [Row.from_dict(line) for line in read_rows(path)] if path.exists() else []
    if "--table" in sys.argv:
        print(table(rows))
        return
    wanted = [(flags, groups) for flags, counts in CASES for groups in counts]
    for flags, groups in wanted[len(rows) :]:
        with tempfile.TemporaryDirectory() as folder:
            row = run(flags, groups, Path(folder))
        with path.open("a") as file:
            file.write(json.dumps(row.to_dict()) + "\n")
        print(groups, flags, f"{row.tok_per_s:.2f} tok/s", flush=True)


if __name__ == "__main__":
    main()
