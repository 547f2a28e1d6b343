"""One job of T=2 + 1 draft in which one rank is struck in some way and phase, and its judgement.

It is good when the launcher's exit code is not 0, no process is left, exactly one line of stderr
names the culprit and its phase, and the rows that were there before are readable, with no file left
that is no result.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.mpi.harness import DIRECT, Started

SIZE = 3
DEADLINE_S = 2.0  # --deadline_s of these jobs
GONE_S = 30.0  # after the launcher has ended, on however busy a machine
FLAGS = (
    "--mode=ssd --backend=emulated --device=null --pair=toy --rounds=600 --progress=off "
    f"--deadline_s={DEADLINE_S}"
).split()
SAID = {"join": "start", "left": "teardown"}  # how the line calls a phase
FINISHED = '{"schema": 1, "run_id": "earlier"}\n'


@dataclass(frozen=True)
class Strike:
    """One rank, one way, one phase; after: the how-manieth time that the rank is there."""

    rank: int
    how: str
    phase: str
    after: int

    def __str__(self) -> str:
        return f"{self.how} of rank {self.rank} in {self.phase} ({self.after})"


@dataclass
class Seen:
    """What came of a strike."""

    strike: Strike
    code: int
    line: str
    wrong: list[str] = field(default_factory=list)
    err: str = ""


def run(strike: Strike, *more: str) -> Seen:
    """Runs one job and strikes it; more: flags beside FLAGS."""
    with tempfile.TemporaryDirectory(prefix="strike-") as folder:
        root = Path(folder)
        for name in ("tmp", "shm", "out"):
            (root / name).mkdir()
        (root / "out" / "runs.jsonl").write_text(FINISHED)
        env = {
            "STRIKE": f"{strike.rank} {strike.how} {strike.phase} {strike.after}",
            "STRUCK": str(root / "struck"),
            "TMPDIR": str(root / "tmp"),
            "OMPI_MCA_btl_sm_backing_directory": str(root / "shm"),
            "OMPI_MCA_btl_vader_backing_directory": str(root / "shm"),
        }
        told = ["tests.mpi.struck", "run", *FLAGS, *more, f"--out={root / 'out'}"]
        with Started(["bash", "-c", DIRECT, "mpirun", str(SIZE), *told], env, 40) as job:
            try:
                code, _, err = job.finish()
            except AssertionError as late:
                return Seen(strike, 0, "", ["had to be ended"], str(late))
            end = time.monotonic() + GONE_S
            while job.alive() and time.monotonic() < end:
                time.sleep(0.02)
            left = job.alive()
        if not (root / "struck").exists():
            return Seen(strike, code, "", ["it was never struck"], err)
        seen = Seen(strike, code, "", ["processes are left"] * bool(left), err)
        judge(seen, root)
    return seen


def judge(seen: Seen, root: Path) -> None:
    """Fills in what is wrong."""
    strike = seen.strike
    lines = [line for line in seen.err.splitlines() if line.startswith("mpissd")]
    seen.line = lines[0] if lines else ""
    told = SAID.get(strike.phase, strike.phase)
    if len(lines) != 1:
        seen.wrong.append(f"{len(lines)} lines")
    if not seen.line.startswith(f"mpissd: rank {strike.rank} ("):
        seen.wrong.append("another culprit")
    if f" in {told}" not in seen.line:
        seen.wrong.append(f"not in {told}")
    if seen.code == 0:
        seen.wrong.append("exit code 0")
    if seen.err.count("Traceback") != (strike.how == "raise"):
        seen.wrong.append(f"{seen.err.count('Traceback')} tracebacks")
    if strike.how == "hang" and " is stuck in " not in seen.line:
        seen.wrong.append("not stuck")
    rows = (root / "out" / "runs.jsonl").read_text()
    if not rows.startswith(FINISHED) or not all(json.loads(row) for row in rows.splitlines()):
        seen.wrong.append("rows are damaged")
    left = [p for name in ("tmp", "shm") for p in (root / name).rglob("*") if not p.is_dir()]
    left += [
        p for p in (root / "out").rglob("*") if p.suffix not in (".jsonl", ".npz", ".json", "")
    ]
    left += (root / "out").rglob(".*")
    if left:
        seen.wrong.append(f"left: {', '.join(p.name for p in left[:3])}")
