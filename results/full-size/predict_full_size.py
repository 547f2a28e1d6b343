#!/usr/bin/env python3
"""Predicts a grid from what smaller jobs measured of themselves, and judges it afterwards.

    results/full-size/predict_full_size.py predict GRID --tp=4 --targets=DIR --drafts=DIR \\
        --to=predicted.jsonl
    results/full-size/predict_full_size.py judge predicted.jsonl RESULTS

--targets: jobs' profiles (OUT/profiles/*.json), of which those with T target ranks give their
verifications. --drafts: profiles of jobs with a draft: its forwards, and the host costs of the job
whose mode, K and b are nearest. A configuration with more verified rows than the target profiles
have measured is not predicted: a line says how many.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpissd.common.config import RunConfig
from mpissd.common.errors import MpissdError
from mpissd.common.real_pairs import ASSUMED_LAW
from mpissd.engine.job import Job, resolve
from mpissd.lab.predict import jobfile
from mpissd.lab.predict.costs import DeviceCosts
from mpissd.lab.predict.jobfile import JobFile
from mpissd.lab.predict.row import is_predictable, predict_row
from mpissd.lab.sweep.grid import read_grid
from mpissd.lab.sweep.plan import make_plan
from mpissd.lab.tables import load_rows


def main() -> int:
    """0, or 2 with one line where a file or a flag is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("predict")
    command.add_argument("grid")
    command.add_argument("--tp", type=int, required=True)
    command.add_argument("--targets", type=Path, required=True)
    command.add_argument("--drafts", type=Path, required=True)
    command.add_argument("--to", type=Path, required=True)
    command = commands.add_parser("judge")
    command.add_argument("predicted", type=Path)
    command.add_argument("results", type=Path)
    said = parser.parse_args()
    try:
        return predict(said) if said.command == "predict" else judge(said.predicted, said.results)
    except (MpissdError, OSError) as error:
        print(f"predict_full_size: {error}", file=sys.stderr)
        return 2


def predict(said: argparse.Namespace) -> int:
    """Writes a line for each configuration of the grid that can be predicted."""
    targets = [file for file in profiles(said.targets) if file.tp == said.tp]
    drafts = [file for file in profiles(said.drafts) if file.device.draft is not None]
    if not targets or not drafts:
        raise MpissdError(f"no job's profile with T={said.tp}, or none with a draft")
    verify = merged((file.device.verify.rows, file.device.verify.seconds) for file in targets)
    draft = merged(
        (file.device.draft.rows, file.device.draft.seconds) for file in drafts if file.device.draft
    )
    lines, left = [], 0
    for config in configurations(said.grid):
        job = resolve(config, said.tp, backend="cupy", memory_bytes=None)
        if job.verify_rows > max(verify) or not is_predictable(job):
            left += 1
            continue
        device = DeviceCosts.from_points(verify, None if job.draft is None else draft)
        lines.append(line(job, predict_row(job, device, nearest(job, drafts).host)))
    said.to.parent.mkdir(parents=True, exist_ok=True)
    said.to.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    print(f"{said.to}: {len(lines)} configurations predicted, {left} not (> {max(verify)} rows)")
    return 0


def profiles(folder: Path) -> list[JobFile]:
    """Every job's profile under a folder."""
    files = (jobfile.load(str(path)) for path in sorted(folder.rglob("*.json")))
    return [file for file in files if file is not None]


def merged(tables: Iterable[tuple[Iterable[int], Iterable[float]]]) -> dict[int, float]:
    """{rows: the median of what the jobs measured}."""
    every: dict[int, list[float]] = defaultdict(list)
    for rows, seconds in tables:
        for count, spent in zip(rows, seconds, strict=True):
            every[count].append(spent)
    return {count: median(spent) for count, spent in sorted(every.items())}


def configurations(grid: str) -> Iterator[RunConfig]:
    """The valid configurations of a grid, once each."""
    for point in make_plan(read_grid(grid), RunConfig(backend="cupy"), 1, (1, 1)).points:
        if point.config is not None:
            yield _under_its_law(point.config)


def _under_its_law(config: RunConfig) -> RunConfig:
    """Returns the configuration under the hit law that was the default when the grids were made."""
    own = (config.p_hit, config.hit_a, config.hit_r, config.hit_law)
    names_one = any(value is not None for value in own)
    return config if names_one or config.mode != "ssd" else replace(config, hit_law=ASSUMED_LAW)


def nearest(job: Job, files: list[JobFile]) -> JobFile:
    """The job whose host had most alike to do."""

    def distance(file: JobFile) -> tuple[bool, bool, int, int]:
        flags = file.config
        return (
            flags["mode"] != job.config.mode,
            (flags.get("num_drafts") == 0) != job.inline,
            abs(flags["batch_size"] - job.config.batch_size),
            abs(flags["lookahead"] - job.lookahead),
        )

    return min(files, key=distance)


def key(mode: str, flags: dict[str, Any]) -> list[Any]:
    """What tells configurations of one grid apart, read off a row or a line."""
    names = ("tp", "num_drafts", "lookahead", "batch_size", "fan_out", "acceptance", "hit_law")
    return [mode, *(flags[name] for name in names), flags["backup"] if mode == "ssd" else None]


def line(job: Job, predicted: dict[str, Any]) -> dict[str, Any]:
    """What is predicted of a configuration, by the keys of a row."""
    mode, config = job.config.mode, job.config
    drafted = mode != "ar"
    return {
        "mode": mode,
        "tp": job.tp,
        "num_drafts": config.drafts,
        "lookahead": job.lookahead,
        "batch_size": config.batch_size,
        "fan_out": list(job.fan_out) or None,
        "acceptance": config.acceptance_text if drafted else None,
        "hit_law": job.hit_law.label if mode == "ssd" else None,
        "backup": config.backup if drafted else None,
        "tok_per_s": predicted["tok_per_s"],
        "round_us": predicted["round_us"]["p50"],
        "t_target_s": predicted["t_target_s"],
    }


def judge(predicted: Path, results: Path) -> int:
    """Prints how far what was measured lies from what was predicted, by method."""
    lines = [json.loads(text) for text in predicted.read_text().splitlines()]
    known = {json.dumps(key(entry["mode"], entry)): entry["tok_per_s"] for entry in lines}
    errors: dict[str, list[float]] = defaultdict(list)
    missing = 0
    for row in load_rows([results]):
        expected = known.get(json.dumps(key(row["mode"], row)))
        if expected is None:
            missing += 1
        else:
            errors[f"{row['mode']} D={row['num_drafts']}"].append(row["tok_per_s"] / expected - 1)
    for name, values in sorted(errors.items()):
        size = sorted(map(abs, values))
        print(
            f"{name:8} {len(values):4} rows: measured / predicted - 1: median "
            f"{median(values):+.1%}, in size {median(size):.1%}, at most {size[-1]:.1%}"
        )
    print(f"{missing} rows were not predicted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
