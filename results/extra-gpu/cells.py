#!/usr/bin/env python3
"""Predicts every use of up to five GPUs under real pairs' laws: results/extra-gpu/cells.py OUT

A line of OUT is a use in a cell: pair, profile, law (prompts and temperature), its alpha at K = 4,
batch_size and host (the host's costs as a multiple of the measured ones), and what `plan` printed
of the use. Needs
results/recordings and results/real-pair/warm.jsonl; takes about ten minutes on two cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "mpissd/engine/backend/profiles"
GREEDY = "chat", "humaneval", "edit", "summarise"
WIDE = "chat, temp. 0", "humaneval, temp. 0"  # laws of the cells with batches and other hosts
IMPOSED = "alpha .8"  # not of a recording
FORWARDS = {"h200": ("--forward=transformer", "--context=512"), "h100": ("--forward=gemm",)}
Cell = tuple[str, str, str, int, float]


def mpissd(*words: str) -> str:
    """Returns what a command printed."""
    command = [sys.executable, "-m", "mpissd", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def laws(folder: Path) -> dict[str, Path]:
    """Returns files of laws, written to the folder, by prompts and temperature."""
    sources = {f"{name}, temp. 0": f"results/recordings/smollm2-{name}.npz" for name in GREEDY}
    rounds = ROOT / "results/real-pair/rounds"
    for line in (ROOT / "results/real-pair/warm.jsonl").open():
        row = json.loads(line)
        rows = folder / row["run_id"]
        rows.mkdir()
        (rows / "runs.jsonl").write_text(line)
        (rows / "rounds").symlink_to(rounds)
        words = " ".join(row["provenance"]["command"])
        name = next(name for name in GREEDY if f"/{name}.jsonl" in words)
        sources[f"{name}, temp. {row['temperature']:g}"] = str(rows)
    files = {name: folder / f"{name}.json" for name in sources}
    for name, source in sources.items():
        mpissd("pair", source, f"--out={files[name]}")
    return files


def cells(names: list[str]) -> Iterator[Cell]:
    """Yields (pair, profile, law, batch, host)."""
    for pair in ("8b/1b", "70b/1b"):
        for law in names:
            yield pair, "h200", law, 1, 1.0
        for law in WIDE:
            for batch in (2, 4, 8, 16, 32):
                yield pair, "h200", law, batch, 1.0
    for law in WIDE:
        for host in (0.0, 0.5, 2.0, 4.0):
            yield "8b/1b", "h200", law, 1, host
    for law in (IMPOSED, *WIDE):
        yield "70b/1b", "h100", law, 1, 1.0


def hosted(folder: Path, profile: str, host: float) -> str:
    """Returns a profile whose host takes `host` times as long."""
    if host == 1:
        return profile
    table = json.loads((PROFILES / f"{profile}.json").read_text())
    copy = folder / f"{profile}-{host}.json"
    for costs in table["host"]:
        costs["seconds"] = {name: host * s for name, s in costs["seconds"].items()}
    copy.write_text(json.dumps(table))
    return str(copy)


def uses(folder: Path, files: dict[str, Path], cell: Cell) -> list[str]:
    """Returns the lines of a cell."""
    pair, profile, law, batch, host = cell
    decided = "--alpha=.8" if law == IMPOSED else f"--laws={files[law]}"
    words = f"--pair={pair}", decided, f"--batch_size={batch}", "--gpus=5"
    where = f"--profile={hosted(folder, profile, host)}"
    printed = mpissd("plan", where, *words, *FORWARDS[profile])
    judged = json.loads(printed.splitlines()[-1])["judged"]
    device = json.loads((PROFILES / f"{profile}.json").read_text())["device_name"]
    about = {"device_name": device, "pair": pair, "law": law, "alpha": 0.8, "host": host}
    if law in files:
        laws = json.loads(files[law].read_text())["laws"]
        about["alpha"] = min(laws, key=lambda law: abs(law["lookahead"] - 4))["alpha"]
    return [json.dumps(about | use | {"derived": bool(use["derived"])}) for use in judged]


def main(out: str) -> None:
    """Writes all cells."""
    with TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool, open(out, "w") as file:
        folder = Path(name)
        files = laws(folder)
        for lines in pool.map(partial(uses, folder, files), cells([*files])):
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
