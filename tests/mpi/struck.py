"""Jobs in which one rank is struck in some way and phase, and the faults of their end.

A struck job ends well when the launcher's exit code is not 0, no process is left, exactly one line
of stderr names the culprit and its phase, the rows that were there before are readable, and no file
is left but results. `python -m mpi4py -m tests.mpi.struck run FLAGS…` runs such a job. It reads two
variables of the environment: STRIKE, "RANK HOW PHASE AFTER", and STRUCK, the name of a file that
the struck rank makes.
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from mpissd import __main__ as application
from mpissd.common import guard
from mpissd.common.stage import DOING, OWN, STAGE, Doing, Stage
from mpissd.common.trace import DraftLedger, Ledger
from mpissd.engine.comm.topology import launcher_rank
from tests.mpi.harness import DIRECT, Started

SIZE = 3
FLAGS = (
    "--mode=ssd --backend=emulated --device=null --pair=toy --rounds=600 --progress=off "
    "--deadline_s=2"
).split()
FINISHED = '{"schema": 1, "run_id": "earlier"}\n'
DOINGS = {"verify": Doing.VERIFY, "growth": Doing.GROWTH}


class Strike(NamedTuple):
    """One rank, one way, one phase; it strikes in the phase for the `after`-th time."""

    rank: int
    how: str
    phase: str
    after: int

    def __str__(self) -> str:
        return " ".join(map(str, self))


def faults_of(strike: Strike, *more: str) -> list[str]:
    """Runs one job and strikes it; returns its faults, and its stderr. more: further flags."""
    with tempfile.TemporaryDirectory(prefix="strike-") as folder:
        root = Path(folder)
        for name in ("tmp", "shm", "out"):
            (root / name).mkdir()
        (root / "out" / "runs.jsonl").write_text(FINISHED)
        env = {
            "STRIKE": str(strike),
            "STRUCK": str(root / "struck"),
            "TMPDIR": str(root / "tmp"),
            "OMPI_MCA_btl_sm_backing_directory": str(root / "shm"),
            "OMPI_MCA_btl_vader_backing_directory": str(root / "shm"),
        }
        told = ["tests.mpi.struck", "run", *FLAGS, *more, f"--out={root / 'out'}"]
        with Started(["bash", "-c", DIRECT, "mpirun", str(SIZE), *told], env, 40) as job:
            code, _, err = job.finish()
            is_gone = job.is_gone()
        lines = [line for line in err.splitlines() if line.startswith("mpissd")]
        line = "".join(lines)
        rows = (root / "out" / "runs.jsonl").read_text()
        left = [p for name in ("tmp", "shm") for p in (root / name).rglob("*") if not p.is_dir()]
        results = (".jsonl", ".npz", ".json", "")
        left += [p for p in (root / "out").rglob("*") if p.suffix not in results]
        checks = {
            "it was never struck": (root / "struck").exists(),
            "processes are left": is_gone,
            f"{len(lines)} lines": len(lines) == 1,
            "another culprit": line.startswith(f"mpissd: rank {strike.rank} ("),
            "another phase": f" in {'start' if strike.phase == 'join' else strike.phase}" in line,
            "exit code 0": code != 0,
            "tracebacks": err.count("Traceback") == (strike.how == "raise"),
            "not stuck": strike.how != "hang" or " is stuck in " in line,
            "rows are damaged": rows.startswith(FINISHED)
            and all(json.loads(row) for row in rows.splitlines()),
            f"left: {left}": not left,
        }
    wrong = [what for what, is_good in checks.items() if not is_good]
    return [*wrong, err[-2000:]] if wrong else []


class Struck(Exception):
    """Raised in a struck rank."""


def strike(how: str) -> None:
    """Does it to this process, now."""
    Path(os.environ["STRUCK"]).touch()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hang":
        while True:
            time.sleep(1.0)
    elif how == "exit":
        sys.exit(0)
    else:
        raise Struck("by the test")


def arm(how: str, phase: str, after: int) -> None:
    """Strikes when this rank is in `phase` for the `after`-th time."""
    left = [after]

    def seen(in_phase: bool) -> None:
        if in_phase:
            left[0] -= 1
            if left[0] == 0:
                strike(how)

    if phase == "join":  # before MPI
        guard.join = followed(guard.join, lambda: seen(True))  # type: ignore[assignment]
    elif phase == "warm-up":
        guard.stage = followed(guard.stage, lambda: seen(OWN.bytes[STAGE] == Stage.WARM_UP))  # type: ignore[assignment]
    else:
        doing = DOINGS[phase]

        def in_round() -> bool:
            return OWN.bytes[STAGE] == Stage.ROUNDS and OWN.bytes[DOING] == doing

        kind = DraftLedger if phase == "growth" else Ledger
        kind.mark = followed(kind.mark, lambda: seen(in_round()))  # type: ignore[method-assign]


def followed(function: Callable[..., None], then: Callable[[], None]) -> Callable[..., None]:
    """The function, and `then` after each call."""

    def both(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs)
        then()

    return both


if __name__ == "__main__":
    rank, how, phase, after = os.environ["STRIKE"].split()
    if launcher_rank() == int(rank):
        arm(how, phase, int(after))
    sys.exit(application.main())
