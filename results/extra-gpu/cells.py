#!/usr/bin/env python3
"""Predicts the tok/s of every use on up to nine GPUs: results/extra-gpu/cells.py OUT [FIRST[:LAST]]

A line of OUT is what `plan` printed about one use at one T, for a *cell*: a model pair, a device
profile, a law (acceptance and hits of a real pair, by prompts and temperature), whether drafts may
take one forward, the batch size, factors of the host's and the draft's measured durations, the GPUs
and the link to the last of them. FIRST:LAST takes some cells only. All take 20 minutes of a core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PROFILES = ROOT / "mpissd/engine/backend/profiles"
CHAT, CODE = "chat, temp. 0", "humaneval, temp. 0"  # laws of the shipped draft
COPIES = "edit, temp. 0", "summarise, temp. 0"  # whose answers repeat their prompts
WARM = "chat, temp. 0.7", "humaneval, temp. 0.7"  # of the draft shipped before, by K forwards
HOT = "chat, temp. 1", "humaneval, temp. 1"
IMPOSED = "alpha .8"  # of no recording
SLOW = 2.8  # A draft step of the paper takes about 2.3 ms, ours .82.
FORWARDS = {"h200": ("--forward=transformer", "--context=512"), "h100": ("--forward=gemm",)}
DEGREES = 1, 2, 3, 4, 7, 8  # T of the uses that are kept
KEPT = "mode tp num_drafts lookahead fan_out backup backup_lookahead tree parallel".split()


class Cell(NamedTuple):
    """What `plan` is asked. one_forward: whether drafts of one forward are known. host, draft:
    factors of the measured durations of host work and of draft forwards. link: to the last GPU."""

    pair: str
    law: str
    one_forward: bool = False
    profile: str = "h200"
    batch_size: int = 1
    host: float = 1.0
    draft: float = 1.0
    gpus: int = 5
    link: str = "shm"


def mpissd(*words: str) -> str:
    """Runs the command `mpissd` with these words; returns what it printed."""
    command = [sys.executable, "-m", "mpissd", *words]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return done.stdout


def laws(folder: Path) -> dict[str, Path]:
    """Writes --laws files (fitted acceptance and hit models) to the folder; returns {prompts and
    temperature: file}. Next to each is FILE.steps, without drafts of one forward."""
    recordings = ROOT / "results/recordings"
    sources = {
        law: recordings / f"smollm2-{law.partition(',')[0]}.npz" for law in (CHAT, CODE, *COPIES)
    }
    rounds = ROOT / "results/real-pair/rounds"
    for line in (ROOT / "results/real-pair/warm.jsonl").open():
        row = json.loads(line)
        words = " ".join(row["provenance"]["command"])
        for law in (*WARM, *HOT):
            prompts, _, temperature = law.partition(", temp. ")
            if f"/{prompts}.jsonl" in words and f"{row['temperature']:g}" == temperature:
                sources[law] = folder / row["run_id"]
                sources[law].mkdir()
                (sources[law] / "runs.jsonl").write_text(line)
                (sources[law] / "rounds").symlink_to(rounds)
    files = {name: folder / f"{name}.json" for name in sources}
    for name, source in sources.items():
        mpissd("pair", str(source), f"--out={files[name]}")
        fitted = json.loads(files[name].read_text())
        for law in fitted["laws"]:
            law["fast"].pop("parallel", None)
            law["levels"] = []
        Path(f"{files[name]}.steps").write_text(json.dumps(fitted | {"without": []}))
    return files


def cells() -> Iterator[Cell]:
    """Yields the cells to predict."""
    for pair, (law, one) in product(("8b/1b", "70b/1b"), product((CHAT, CODE), (False, True))):
        usual = Cell(pair, law, one)
        yield usual._replace(gpus=9)
        yield from (usual._replace(batch_size=4, gpus=gpus) for gpus in (5, 9))
        yield usual._replace(draft=SLOW)
        gpus = 2 if pair == "8b/1b" else 5
        yield from (usual._replace(gpus=gpus, link=link) for link in ("10g", "500us:1.25"))
        if pair == "8b/1b":
            yield from (usual._replace(gpus=2, host=host) for host in (0.0, 4.0))
            yield from (usual._replace(gpus=3, link=link) for link in ("10g", "500us:1.25"))
        else:
            paper = usual._replace(profile="h100")
            yield from (paper._replace(draft=draft) for draft in (1.0, SLOW))
    yield from (Cell(pair, law, gpus=9) for pair, law in product(("8b/1b", "70b/1b"), WARM))
    yield from (Cell("70b/1b", IMPOSED, False, "h100", draft=draft) for draft in (1.0, SLOW))
    yield from (Cell(pair, law, gpus=9) for pair, law in product(("8b/1b", "70b/1b"), HOT))
    yield from (Cell(pair, law, True, gpus=9) for pair, law in product(("8b/1b", "70b/1b"), COPIES))
    yield Cell("8b/1b", CHAT, batch_size=16)


def changed(folder: Path, cell: Cell) -> str:
    """Writes the cell's profile with the cell's factors; returns its name or file."""
    if cell.host == cell.draft == 1:
        return cell.profile
    table = json.loads((PROFILES / f"{cell.profile}.json").read_text())
    for costs in table["host"]:
        costs["seconds"] = {name: cell.host * s for name, s in costs["seconds"].items()}
    for times in table["tables"]["forwards"]:
        if times["model"] == "llama-3.2-1b":
            times["seconds"] = {rows: cell.draft * s for rows, s in times["seconds"].items()}
    file = folder / f"{cell.profile}-{cell.host}-{cell.draft}.json"
    file.write_text(json.dumps(table))
    return str(file)


def uses(folder: Path, files: dict[str, Path], cell: Cell) -> Iterator[str]:
    """Runs `plan` for one cell; yields a JSON line for each use of SSD, and of no draft GPU."""
    decided = "--alpha=.8"
    if cell.law != IMPOSED:
        decided = f"--laws={files[cell.law]}{'' if cell.one_forward else '.steps'}"
    words = [f"--{name}={getattr(cell, name)}" for name in ("pair", "batch_size", "gpus")]
    words += [f"--profile={changed(folder, cell)}", decided, *FORWARDS[cell.profile]]
    words += [f"--link={cell.link}"] * (cell.link != "shm")
    judged = json.loads(mpissd("plan", *words).splitlines()[-1])["judged"]
    device = json.loads((PROFILES / f"{cell.profile}.json").read_text())["device_name"]
    for use in judged:
        if use["tp"] in DEGREES and (use["mode"] == "ssd") == use["num_drafts"]:
            numbers = {name: float(f"{use[name]:.5g}") for name in ("tok_per_s", "round_us")}
            hits = use["hit_rate"] and round(use["hit_rate"], 4)
            kept = {name: use[name] for name in KEPT} | numbers | {"hit_rate": hits}
            yield json.dumps({"device_name": device} | cell._asdict() | kept)


def main(out: str, some: str = ":") -> None:
    """Predicts the cells and appends the lines to the file `out`."""
    first, _, last = some.partition(":")
    with TemporaryDirectory() as name, open(out, "a") as file:
        files = laws(Path(name))
        for cell in [*cells()][int(first or 0) : int(last) if last else None]:
            for line in uses(Path(name), files, cell):
                file.write(f"{line}\n")
            file.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
