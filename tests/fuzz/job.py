"""Run by mpirun: python -m tests.fuzz.job FIRST COUNT OUT — random valid configurations, one after
the other, in this one world; rank 0 says what came of each, a JSON line each.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
from mpi4py import MPI

from mpissd.common.config import RunConfig
from mpissd.common.row import flat
from mpissd.engine.comm.topology import Refused
from mpissd.lab.measure.run import execute
from tests.fuzz.configs import judged, valid

ATTEMPTS = 3


def main() -> None:
    first, count, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    world = MPI.COMM_WORLD
    for seed in range(first, first + count):
        flags = {**valid(seed, world.size), "out": out}
        code, said, attempts = run(judged(flags, world.size))
        if world.rank == 0:
            row = flat(json.loads(said.splitlines()[-1]))
            told = {"seed": seed, "code": code, "attempts": attempts, **closed(row, Path(out))}
            print(json.dumps(told), flush=True)


def run(config: RunConfig) -> tuple[int, str, int]:
    """(exit code, stdout, attempts): a run of one round does not close where its rank lost its
    core between two clocks; on a machine without a core to spare that happens."""
    for attempt in range(1, ATTEMPTS + 1):
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
                return execute(config), said.getvalue(), attempt
        except Refused as refused:  # on every rank
            if "the phases close to" not in str(refused) or attempt == ATTEMPTS:
                raise
    raise AssertionError("not reached")


def closed(row: dict, out: Path) -> dict:
    """How far the ledgers of a row's raw rounds close."""
    path = out / "rounds" / f"{row['run_id']}.npz"
    with np.load(path) as held:
        rounds = dict(held)
    path.unlink()
    found = {
        "rounds": row["num_rounds"],
        "tokens": row["num_tokens"],
        "mode": row["mode"],
        "wall_s": sum(group["wall_s"] for group in row["per_group"] or [row]),
    }
    for role in ("lead", "draft"):
        table = rounds.get(f"{role}_ledger_ns")
        if table is not None:
            found[f"{role}_exact"] = bool((table[:, 1] == table[:, 2:].sum(axis=1)).all())
            found[f"{role}_s"] = float(table[:, 2:].sum() * 1e-9)
    return found


if __name__ == "__main__":
    main()
