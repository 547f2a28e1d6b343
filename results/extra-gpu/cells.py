#!/usr/bin/env python3
"""Predicts the tok/s of every mode on up to five GPUs: results/extra-gpu/cells.py OUT

A line of OUT is what `plan` printed about one mode, T and D, for one model pair, device profile,
law (acceptance and hits measured with a real pair, by prompts and temperature, with its alpha at
K = 4), batch size, and host (durations of host work as a multiple of the measured ones). It needs
results/recordings and results/real-pair/warm.jsonl, and takes ten minutes on two cores.
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
WIDE = "chat, temp. 0", "humaneval, temp. 0"  # laws that are predicted at more batches and hosts
IMPOSED = "alpha .8"  # not of a recording
FORWARDS = {"h200": ("--forward=transformer", "--context=512"), "h100": ("--forward=gemm",)}
Cell = tuple[str, str, str, int, float]


def mpissd(*words: str) -> str:
    """Runs the command `mpissd` with these words; returns what it printed."""
    command = [sys.executable, "-m", "mpissd", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def laws(folder: Path) -> dict[str, Path]:
    """Writes --laws files (fitted acceptance and hit models) to the folder; returns {prompts and
    temperature: file}."""
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
    """Yields each case to predict: (pair, profile, law, batch size, multiple of host durations)."""
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
    """Writes a profile whose durations of host work are multiplied by `host`; returns its file."""
    if host == 1:
        return profile
    table = json.loads((PROFILES / f"{profile}.json").read_text())
    copy = folder / f"{profile}-{host}.json"
    for costs in table["host"]:
        costs["seconds"] = {name: host * s for name, s in costs["seconds"].items()}
    copy.write_text(json.dumps(table))
    return str(copy)


def uses(folder: Path, files: dict[str, Path], cell: Cell) -> list[str]:
    """Runs `plan` for one case; returns a JSON line for each mode, T and D that it predicts."""
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
    """Predicts all cases and writes the lines to the file `out`."""
    with TemporaryDirectory() as name, ThreadPoolExecutor(2) as pool, open(out, "w") as file:
        folder = Path(name)
        files = laws(folder)
        for lines in pool.map(partial(uses, folder, files), cells([*files])):
            file.write("".join(f"{line}\n" for line in lines))
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
