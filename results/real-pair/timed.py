#!/usr/bin/env python3
"""What cpu.sh or gpu.sh measured beside theorem 17 and the recurrence: timed.py FOLDER… >cpu.jsonl.

FOLDER holds what `mpissd sweep` wrote: runs.jsonl, profiles, rounds. One JSON line a run, of its
rounds without a prompt; tables.py prints them. Theorem 17: a round takes a verification, and behind
a miss of any of the b sequences (1 − h^b) K draft steps with jit, none with fast; growth is hidden.
Recurrence: the loops themselves, which let a hit's growth be interrupted and finished, over the
job's own measured forwards and host costs and the run's own outcomes. `low`, `high`: a 95%
interval over blocks of rounds, drawn anew.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from mpissd.common.config import RunConfig  # noqa: E402
from mpissd.common.records import is_first_round  # noqa: E402
from mpissd.engine.job import resolve  # noqa: E402
from mpissd.lab.predict import jobfile  # noqa: E402
from mpissd.lab.predict.simulation import follow  # noqa: E402
from mpissd.lab.tables.load import load_rows  # noqa: E402

Floats = NDArray[np.float64]
Row = dict[str, Any]
BLOCKS, RESAMPLES = 8, 2000


@dataclass(frozen=True)
class Run:
    """One row with its rounds without a prompt.

    seconds, tokens: by round. hits: hit rate of the lookups. predicted: tok/s by the recurrence;
    None where outcomes depend on a controller.
    """

    row: Row
    seconds: Floats
    tokens: Floats
    hits: float | None
    verify_s: float
    draft_s: float | None
    growth_s: float | None
    predicted: float | None

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return float(self.tokens.sum() / self.seconds.sum())

    def interval(self) -> tuple[float, float]:
        """Returns the rate's 95% interval, over blocks of rounds drawn anew."""
        rng = np.random.default_rng(17)
        parts = np.array_split(np.arange(len(self.seconds)), BLOCKS)
        sums = np.array([[self.tokens[p].sum(), self.seconds[p].sum()] for p in parts])
        drawn = sums[rng.integers(0, BLOCKS, (RESAMPLES, BLOCKS))].sum(axis=1)
        low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
        return float(low), float(high)

    def by_theorem(self) -> float:
        """Returns tok/s by theorem 17, of the measured hit rate, tokens and forwards."""
        miss = 0.0 if self.hits is None else 1 - self.hits ** self.row["batch_size"]
        backup = self.draft_s if self.row["backup"] == "jit" and self.draft_s else 0.0
        return float(self.tokens.mean() / (self.verify_s + miss * backup))


def read(folder: Path, row: Row) -> Run:
    """Returns a row's run."""
    with np.load(folder / "rounds" / f"{row['run_id']}.npz") as kept:
        arrays = {name: kept[name] for name in kept.files}
    sequences, names = arrays["sequences"], list(arrays["lead_phases"])
    column = arrays["lead_ledger_ns"].shape[1] - len(names) + names.index("prefill")
    plain = arrays["lead_ledger_ns"][:, column] == 0
    tokens = np.bincount(sequences[:, 0], sequences[:, 3] + 1, len(plain))
    asked = sequences[~is_first_round(sequences)]
    profile = jobfile.load(str(folder / "profiles" / f"{row['run_id']}.json"))
    assert profile is not None
    config = RunConfig(**profile.config)
    job = resolve(config, profile.tp, backend=row["backend"], memory_bytes=None)
    predicted = None
    if row["backup"] != "auto" and row["on_late"] != "auto":
        times = follow(job, profile.device, profile.host, sequences).round_s.ravel()
        predicted = float(tokens[plain].sum() / times[plain].sum())
    rows = row["batch_size"] * (row["lookahead"] + 1)
    lanes = row["batch_size"] * (row["branch_budget"] or 0)
    has_draft = profile.device.draft is not None
    steps = row["lookahead"]
    return Run(
        row,
        arrays["round_s"][plain],
        tokens[plain],
        float((asked[:, 6] > 0).mean()) if row["mode"] == "ssd" else None,
        float(profile.device.verify_s(rows)),
        steps * float(profile.device.draft_s(row["batch_size"])) if has_draft else None,
        steps * float(profile.device.draft_s(lanes)) if has_draft and lanes else None,
        predicted,
    )


def line(run: Run) -> Row:
    """Returns a run's line."""
    low, high = run.interval()
    names = ("mode", "tp", "num_drafts", "batch_size", "backup", "on_late", "lookahead", "run_id")
    found = {name: run.row[name] for name in names}
    is_told = run.row["mode"] == "ssd" and run.row["backup"] != "auto"
    return {
        **found,
        "rounds": len(run.seconds),
        "tok_per_s": run.rate,
        "low": low,
        "high": high,
        "tokens_a_round": float(run.tokens.mean() / run.row["batch_size"]),
        "theorem_17": run.by_theorem() if is_told else None,
        "recurrence": run.predicted,
        "hit_rate": run.hits,
        "t_verify_s": run.verify_s,
        "t_draft_s": run.draft_s,
        "t_growth_s": run.growth_s,
    }


def main() -> int:
    """Prints the lines of all folders given."""
    for folder in map(Path, sys.argv[1:]):
        for row in load_rows([folder]):
            print(json.dumps(line(read(folder, row.to_dict()))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
