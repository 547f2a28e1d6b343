#!/usr/bin/env python3
"""What the theorems predict for a recorded pair, beside what its recordings do.

    results/real-pair/decide.py OUT [--recordings=FILE,FILE]

Laws are measured first (`mpissd laws`). Decisions and modelled times alone, so any machine gives
the same: fan-out lists of equal budgets (theorem 12 against the replay), and backups over the batch
(theorem 17 against the replay, 8B/1B at the times of one H200 each, from the recording's own laws).

Lists are tested twice: on the prompts that their laws were measured on (fitted_on "same"), and on
the second half of the prompts by the laws of the first half (fitted_on "first half"). Halves are
written to OUT, too. OUT/laws.jsonl (each recording's own laws at K = 4), OUT/lists.jsonl and
OUT/backups.jsonl; tables.py prints them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from mpissd.common.config import RunConfig  # noqa: E402
from mpissd.common.errors import ConfigError  # noqa: E402
from mpissd.common.output import append_row  # noqa: E402
from mpissd.common.records import is_first_round  # noqa: E402
from mpissd.common.theory import stationary_hit_rate  # noqa: E402
from mpissd.engine.backend.profile import load_profile  # noqa: E402
from mpissd.engine.job import Job, resolve  # noqa: E402
from mpissd.engine.spec.hits import hit_law_of  # noqa: E402
from mpissd.engine.spec.lawfile import load_laws  # noqa: E402
from mpissd.engine.workload.replay.recording import load, save  # noqa: E402
from mpissd.lab.laws.command import laws  # noqa: E402
from mpissd.lab.laws.config import LawsConfig  # noqa: E402
from mpissd.lab.predict.costs import DeviceCosts  # noqa: E402
from mpissd.lab.predict.hosts import host_of  # noqa: E402
from mpissd.lab.predict.recorded import outcomes  # noqa: E402
from mpissd.lab.predict.simulation import follow  # noqa: E402

NAMES = ("humaneval", "chat", "edit", "summarise")
BUDGETS = (8, 16, 32, 48)
BATCHES = (1, 2, 4, 8, 16, 32)
LOOKAHEAD = 7
RESAMPLES = 1000
Sequences = NDArray[np.int64]


def laws_of(out: Path, recording: Path) -> Path:
    """Returns the file of a recording's own laws, made where it is missing."""
    path = out / f"{recording.stem}.laws.json"
    if not path.exists():
        laws(LawsConfig(sources=str(recording), to=str(path)))
    return path


def summary(recording: Path, own: Path, _: Path) -> Iterator[dict[str, Any]]:
    """Yields one line: acceptance, fits and correlations of a file of laws at K = 4."""
    document = json.loads(own.read_text())
    at = next(one for one in document["laws"] if one["lookahead"] == 4)
    kept = ("rounds", "tokens_a_round", "tokens_a_round_95", "alpha", "alpha_95")
    fits = {f"fit_{end}": at[end]["fit"] for end in ("rejected", "complete")}
    told = {"recording": recording.name, "lookahead": 4, **{key: at[key] for key in kept}, **fits}
    yield {**told, "correlation": document["correlation"]}


def halves(out: Path, recording: Path) -> tuple[Path, Path]:
    """Returns two recordings: the first half of the prompts, and the others; made where missing."""
    whole = load(str(recording))
    middle = len(whole.sequences) // 2
    parts = whole.sequences[:middle], whole.sequences[middle:]
    paths = out / f"{recording.stem}.first.npz", out / f"{recording.stem}.second.npz"
    for path, part in zip(paths, parts, strict=True):
        if not path.exists():
            save(path, replace(whole, sequences=part))
    return paths


def job_of(recording: Path, own: Path, **flags: Any) -> Job:
    """Returns the replay's SSD job on one H200 and one draft's."""
    told = {"workload": "replay", "recording": str(recording), "laws": str(own)}
    told |= {"pair": "8b/1b", "num_tokens": 10**6, "fuse": True}
    return resolve(RunConfig(**{**told, **flags}), 1, backend="emulated", memory_bytes=None)


def hits_of(sequences: Sequences, rng: np.random.Generator) -> tuple[float, list[float]]:
    """Returns the hit rate and its 95% interval, over resampled prompts."""
    asked = sequences[~is_first_round(sequences)]
    prompts = int(sequences[:, 1].max()) + 1
    counts = np.bincount(asked[:, 1], minlength=prompts)
    hits = np.bincount(asked[:, 1], weights=asked[:, 6] > 0, minlength=prompts)
    picks = rng.integers(0, prompts, (RESAMPLES, prompts))
    rates = hits[picks].sum(axis=1) / counts[picks].sum(axis=1)
    return float(hits.sum() / counts.sum()), np.percentile(rates, [2.5, 97.5]).tolist()


def lists(recording: Path, own: Path, out: Path) -> Iterator[dict[str, Any]]:
    """Yields the hit rate of each kind of list at each budget: replayed, and by the laws."""
    first, second = halves(out, recording)
    told = {"recording": recording.name}
    for row in tested(recording, own):
        yield {**told, "fitted_on": "same", **row}
    for row in tested(second, laws_of(out, first)):
        yield {**told, "fitted_on": "first half", **row}


def tested(recording: Path, own: Path) -> Iterator[dict[str, Any]]:
    """Yields the lists of one recording, by the laws of one file."""
    prompts = len(load(str(recording)).sequences)
    rng, width = np.random.default_rng(17), LOOKAHEAD + 1
    weights = np.array(load_laws(str(own)).behind(LOOKAHEAD).accepted, float)
    weights /= weights.sum()
    for budget in BUDGETS:
        for text in (f"uniform:{budget // width}", f"geometric:{budget}", f"adaptive:{budget}"):
            if text.startswith("adaptive") and budget > 16:
                continue  # a row may keep more candidates than were recorded
            try:
                job = job_of(recording, own, lookahead=LOOKAHEAD, fan_out=text)
            except ConfigError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            law = hit_law_of(job.config, LOOKAHEAD)
            chances = [
                law.hit_probability(f, end=k == LOOKAHEAD) for k, f in enumerate(job.fan_out)
            ]
            rate, interval = hits_of(outcomes(job)[0], rng)
            yield {
                "prompts": prompts,
                "lookahead": LOOKAHEAD,
                "budget": budget,
                "fan_out": text,
                "list": list(job.fan_out),
                "predicted": None if text.startswith("adaptive") else float(weights @ chances),
                "hit_rate": rate,
                "hit_rate_95": interval,
            }


def backups(recording: Path, own: Path, _: Path) -> Iterator[dict[str, Any]]:
    """Yields each backup's rate over the batch, with the numbers that theorem 17 takes."""
    profile = load_profile("h200")
    for batch in BATCHES:
        for backup, lookup in (("jit", "prompt"), ("fast", "prompt"), ("fast", "suffix")):
            flags = {"lookahead": 4, "fan_out": "geometric:12", "backup": backup, "lookup": lookup}
            job = job_of(recording, own, batch_size=batch, **flags)
            sequences, num_tokens = outcomes(job)
            device = DeviceCosts.from_profile(profile, job)
            rounds = follow(job, device, host_of(profile, job), sequences)
            yield {
                "recording": recording.name,
                "batch_size": batch,
                "backup": backup,
                "lookup": lookup if backup == "fast" else None,
                "tok_per_s": num_tokens / float(rounds.round_s.sum()),
                **parts(sequences),
                "t_verify_s": rounds.t_target_s,
                "t_draft_s": rounds.t_draft_s,
                "t_growth_s": rounds.t_growth_s,
            }


def parts(sequences: Sequences) -> dict[str, float]:
    """Returns tokens of a round behind a hit and behind a miss, and hit rates behind each."""
    asked = sequences[~is_first_round(sequences)]
    hit = asked[:, 6] > 0
    order = np.lexsort((asked[:, 0], asked[:, 1]))
    own, found = asked[order, 1], hit[order]
    same = own[1:] == own[:-1]
    after_hit = found[1:][same & found[:-1]].mean()
    after_miss = found[1:][same & ~found[:-1]].mean()
    return {
        "hit_rate": float(hit.mean()),
        "after_hit": float(after_hit),
        "after_miss": float(after_miss),
        "stationary": stationary_hit_rate(float(after_hit), float(after_miss)),
        "tokens_hit": float(asked[hit, 3].mean() + 1),
        "tokens_miss": float(asked[~hit, 3].mean() + 1),
    }


def main() -> int:
    """Writes the three files anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    folder = ROOT / "results/recordings"
    names = ",".join(str(folder / f"smollm2-{name}.npz") for name in NAMES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--recordings", default=names)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, measured in (("laws", summary), ("lists", lists), ("backups", backups)):
        path = given.out / f"{name}.jsonl"
        path.unlink(missing_ok=True)
        for recording in map(Path, given.recordings.split(",")):
            for row in measured(recording, laws_of(given.out, recording), given.out):
                append_row(path, row)
                print({k: v for k, v in row.items() if not isinstance(v, list | dict)}, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
