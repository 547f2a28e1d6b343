#!/usr/bin/env python3
"""Real acceptance at real scale: recordings of a pair under the forwards of larger ones.

    results/real-scale/real_scale.py OUT [--recordings=FILE,FILE] [--laws=FILE]

What a recording decides depends on no time (docs/recordings.md), so every K, fan-out, backup and
lookup is decoded once, over a device that takes none; the recurrence then times its rounds on each
machine from that machine's profile (`mpissd predict --workload=replay` does the same for one). Each
method stands for itself at its own best K. OUT/cells.jsonl has every cell, OUT/table.md the table:
SSD beside the paper's figures, and beside the best other use of as many GPUs, with a 95% interval
from resampled prompts, which both methods share.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from mpissd.common.config import RunConfig  # noqa: E402
from mpissd.common.errors import ConfigError  # noqa: E402
from mpissd.common.records import is_first_round  # noqa: E402
from mpissd.engine.backend.profile import load_profile  # noqa: E402
from mpissd.engine.job import Job, resolve  # noqa: E402
from mpissd.lab.predict.costs import DeviceCosts  # noqa: E402
from mpissd.lab.predict.derive import with_derived  # noqa: E402
from mpissd.lab.predict.hosts import host_of  # noqa: E402
from mpissd.lab.predict.recorded import outcomes  # noqa: E402
from mpissd.lab.predict.simulation import follow  # noqa: E402

Floats = NDArray[np.float64]
NAMES = ("humaneval", "chat", "edit", "summarise")
# Profile, pair, T of SSD (with one draft GPU beside), T of the uses without a draft GPU.
MACHINES = (
    ("h100", "70b/1b", 4, (4,)),
    ("h200", "70b/1b", 2, (2,)),
    ("h200", "8b/1b", 1, (1, 2)),
)
PAPER = {"ar": 54.7, "sd": 161.8, "ssd": 255.8}  # Kumar, Dao, May 2026: 70B/1B, H100s, T = 4 (+ 1)
METHODS = ("ar", "lookup", "sd inline", "sd", "ssd")
LOOKAHEADS = (2, 3, 4, 5, 6, 8)
GROWN = ("geometric:12", "geometric:24")
BACKUPS = (("jit", "prompt"), ("fast", "suffix"))
RESAMPLES = 2000


@dataclass(frozen=True)
class Decoded:
    """One configuration's outcomes: `method` and flags, rows of RoundRecords.sequences, tokens."""

    method: str
    flags: dict[str, Any]
    sequences: NDArray[np.int64]
    tokens: Floats  # by prompt

    @property
    def label(self) -> str:
        names = ("lookahead", "fan_out", "backup", "lookup")
        return " ".join(str(self.flags[name]) for name in names if name in self.flags)


def configurations() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (method, flags) of everything that is decoded."""
    yield "ar", {"mode": "ar"}
    for k in LOOKAHEADS:
        for lookup in ("prompt", "suffix"):
            fast = {"mode": "sd", "num_drafts": 0, "backup": "fast", "lookup": lookup}
            yield "lookup", {**fast, "lookahead": k}
        yield "sd", {"mode": "sd", "lookahead": k}
        for fan_out in GROWN:
            for backup, lookup in BACKUPS:
                told = {"fan_out": fan_out, "backup": backup, "lookup": lookup}
                yield "ssd", {"mode": "ssd", "lookahead": k, **told}


def job_of(flags: dict[str, Any], recording: Path, laws: Path, pair: str, tp: int) -> Job:
    """Returns the replay's job; AR reads no laws."""
    told = {"workload": "replay", "recording": str(recording), "pair": pair, "num_tokens": 10**6}
    if flags["mode"] != "ar":
        told["laws"] = str(laws)
    config = RunConfig(**{**told, **flags})
    return resolve(config, tp, backend="emulated", memory_bytes=None)


def decode(recording: Path, laws: Path) -> list[Decoded]:
    """Decodes every configuration; those whose laws allow no such fan-out are left out."""
    found = []
    for method, flags in configurations():
        try:
            job = job_of(flags, recording, laws, "8b/1b", 1)
        except ConfigError as error:
            print(f"left out: {flags}: {error}", file=sys.stderr)
            continue
        sequences, _ = outcomes(job)
        ends = job.workload.recording.sequences  # type: ignore[attr-defined]
        found.append(Decoded(method, flags, sequences, np.array([float(p.end) for p in ends])))
    return found


@dataclass(frozen=True)
class Cell:
    """One configuration on one machine: seconds by prompt."""

    method: str
    label: str
    gpus: int
    tokens: Floats
    seconds: Floats
    hit_rate: float | None
    tokens_a_round: float

    @property
    def rate(self) -> float:
        """Tokens a second over all prompts."""
        return float(self.tokens.sum() / self.seconds.sum())


def timed(of: Decoded, recording: Path, laws: Path, profile: str, pair: str, tp: int) -> Cell:
    """Times a configuration's rounds with a profile's forwards and host costs."""
    job = job_of(of.flags, recording, laws, pair, tp)
    known = with_derived(load_profile(profile), job.target_shard, 1, job.options)
    device = DeviceCosts.from_profile(known, job)
    rounds = follow(job, device, host_of(known, job), of.sequences, apart=True)
    seconds = rounds.round_s.sum(axis=0)
    asked = of.sequences[~is_first_round(of.sequences)]
    inline = of.method == "sd" and job.inline
    return Cell(
        "sd inline" if inline else of.method,
        of.label,
        job.world_size,
        of.tokens,
        seconds,
        float((asked[:, 6] > 0).mean()) if of.method == "ssd" else None,
        float(of.sequences[:, 3].mean() + 1),
    )


def cells(decoded: list[Decoded], recording: Path, laws: Path, machine: Any) -> Iterator[Cell]:
    """Yields every use of at most T + 1 GPUs of a machine."""
    profile, pair, tp, alone = machine
    for of in decoded:
        if of.method in ("sd", "ssd"):
            yield timed(of, recording, laws, profile, pair, tp)
        if of.method == "sd":
            of = replace(of, flags={**of.flags, "num_drafts": 0})
        if of.method != "ssd":
            for count in alone:
                yield timed(of, recording, laws, profile, pair, count)


def gain(ssd: Cell, rival: Cell, rng: np.random.Generator) -> tuple[float, float, float]:
    """Returns the ratio of rates and its 95% interval, over resampled prompts."""
    picks = rng.integers(0, len(ssd.seconds), (RESAMPLES, len(ssd.seconds)))
    ratios = rival.seconds[picks].sum(axis=1) / ssd.seconds[picks].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return ssd.rate / rival.rate, float(low), float(high)


def table(machine: Any, name: str, every: list[Cell], rng: np.random.Generator) -> list[str]:
    """Returns the Markdown lines of one machine and recording."""
    profile, pair, tp, _ = machine
    lines = [f"\n**{pair} on {profile}, T = {tp} + 1, prompts: {name}**\n"]
    head = "| use | GPUs | K and choices | tok/s | a GPU | tokens a round | hits | paper |"
    lines += [head, "|---|---|---|---|---|---|---|---|"]
    best = {}
    for method in METHODS:
        for gpus in sorted({c.gpus for c in every if c.method == method}):
            alike = [c for c in every if (c.method, c.gpus) == (method, gpus)]
            top = best[method, gpus] = max(alike, key=lambda c: c.rate)
            hits = "" if top.hit_rate is None else f"{top.hit_rate:.3f}"
            paper = PAPER.get(method, "") if (profile, pair) == ("h100", "70b/1b") else ""
            numbers = f"{top.rate:.1f} | {top.rate / gpus:.1f} | {top.tokens_a_round:.2f}"
            lines.append(f"| {method} | {gpus} | {top.label} | {numbers} | {hits} | {paper} |")
    ssd = best.pop(("ssd", tp + 1))
    rival = max(best.values(), key=lambda c: c.rate)
    ratio, low, high = gain(ssd, rival, rng)
    verdict = "is ahead" if low > 1 else "is behind" if high < 1 else "makes no difference"
    lines.append(
        f"\nSSD over the best other use of {tp + 1} GPUs ({rival.method} on {rival.gpus}): "
        f"{ratio:.3f} ({low:.3f} to {high:.3f}): it {verdict}. A GPU: "
        f"{ratio * rival.gpus / ssd.gpus:.3f}."
    )
    return lines


def main() -> int:
    """Decodes, times and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = ROOT / "results/recordings"
    names = ",".join(str(folder / f"smollm2-{name}.npz") for name in NAMES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recordings", default=names)
    parser.add_argument("--laws", type=Path, default=folder / "smollm2.laws.json")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    rng, lines = np.random.default_rng(17), list[str]()
    with (given.out / "cells.jsonl").open("w") as file:
        for recording in map(Path, given.recordings.split(",")):
            decoded = decode(recording, given.laws)
            for machine in MACHINES:
                every = list(cells(decoded, recording, given.laws, machine))
                lines += table(machine, recording.stem, every, rng)
                for cell in every:
                    numbers = {n: getattr(cell, n) for n in ("hit_rate", "tokens_a_round", "rate")}
                    told = {"machine": machine[:3], "recording": recording.name}
                    told |= {n: getattr(cell, n) for n in ("method", "label", "gpus")}
                    file.write(json.dumps({**told, **numbers}) + "\n")
            print("\n".join(lines), flush=True)
    (given.out / "table.md").write_text("\n".join(lines).lstrip() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
