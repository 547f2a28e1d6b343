"""Run by mpirun: python -m tests.mpi.soak_job FOLDER [flags of mpissd run] — a run in which every
rank notes its memory at a tenth of the rounds and at the last, in FOLDER/rank.RANK.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mpissd.cli import arguments as cli
from mpissd.common.trace import Ledger
from mpissd.engine.session.rank import Rank
from mpissd.lab.measure.run import execute

FOLDER, FLAGS = Path(sys.argv[1]), sys.argv[2:]
COMMAND = cli.parse(["run", *FLAGS])
assert COMMAND is not None
WARM, ROUNDS = COMMAND.config.warmup_rounds, COMMAND.config.rounds
used: dict[int, int] = {}
close_round, run_pass = Ledger.close_round, Rank.run_pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def noting(ledger: Ledger, round_: int, phase: int) -> None:
    close_round(ledger, round_, phase)
    if round_ in (WARM + ROUNDS // 10, WARM + ROUNDS - 1):
        used[round_] = resident_bytes()


def one_pass(rank: Rank, *arguments: Any) -> Any:
    used.clear()  # of a pass that calibrates
    found = run_pass(rank, *arguments)
    if len(used) == 2:
        world = rank.session.topology.world.rank
        (FOLDER / f"rank.{world}").write_text(json.dumps([used[n] for n in sorted(used)]))
    return found


Ledger.close_round, Rank.run_pass = noting, one_pass  # type: ignore[method-assign]
sys.exit(execute(COMMAND.config))
