"""The campaign: ranks are struck in every way and phase, and everything else has to be gone soon.

    python -m tests.mpi.strike --n=200 --seed=1        (PYTHON's mpirun; MPIRUN=… another)

Each strike is one job of T=2 + 1 draft. It is good when the launcher's exit code is not 0, no
process is left soon enough, exactly one line of stderr names the culprit, and its phase, and the
rows that were there before are readable, with no file left that is no result.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from tests.mpi.harness import DIRECT, Started

SIZE = 3
DEADLINE_S = 2.0  # --deadline_s of these jobs
GONE_S = 10.0
HOW = ("kill", "raise", "exit", "_exit", "stop")
PHASES = ("join", "start", "warm-up", "verify", "growth", "gather", "teardown", "left")
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
    gone_s: float
    line: str
    wrong: list[str] = field(default_factory=list)
    err: str = ""


def plan(count: int, seed: int) -> list[Strike]:
    """`count` strikes: every way in every phase in turn, ranks and rounds drawn."""
    draw = random.Random(seed)
    cells = [(how, phase) for phase in PHASES for how in HOW]
    cells.remove(("exit", "left"))  # that is how every rank ends
    draw.shuffle(cells)
    strikes = []
    for n in range(count):
        how, phase = cells[n % len(cells)]
        ranks = {"verify": (0, 1), "growth": (2,)}.get(phase, range(SIZE))
        in_round = phase in ("verify", "growth")
        after = draw.randrange(200, 1500) if in_round else 1
        strikes.append(Strike(draw.choice(list(ranks)), how, phase, after))
    return strikes


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
                return Seen(strike, 0, 40.0, "", ["had to be ended"], str(late))
            while job.alive():
                time.sleep(0.02)
            ended = time.time()
        if not (root / "struck").exists():
            return Seen(strike, code, 0.0, "", ["it was never struck"], err)
        seen = Seen(strike, code, ended - float((root / "struck").read_text()), "", err=err)
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
    if seen.gone_s > GONE_S + (DEADLINE_S if strike.how in ("stop", "hang") else 0):
        seen.wrong.append(f"gone after {seen.gone_s:.1f} s")
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


def table(every: list[Seen]) -> str:
    """Strikes by phases: good of all, and the worst time until everything was gone."""
    cells: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for seen in every:
        cells[seen.strike.phase, seen.strike.how].append(seen)
    lines = [f"{'':10}" + "".join(f"{how:>16}" for how in HOW)]
    for phase in PHASES:
        row = f"{phase:10}"
        for how in HOW:
            found = cells[phase, how]
            good = sum(not seen.wrong for seen in found)
            worst = max((seen.gone_s for seen in found), default=0.0)
            row += f"{f'{good}/{len(found)} {worst:5.2f} s' if found else '':>16}"
        lines.append(row)
    good = sum(not seen.wrong for seen in every)
    lines.append(f"{good} of {len(every)} good; worst {max(s.gone_s for s in every):.2f} s")
    return "\n".join(lines)


def main() -> int:
    """The whole campaign; 1 where a strike was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="phases or ways, by comma")
    told = parser.parse_args()
    only = set(filter(None, told.only.split(",")))
    strikes = [s for s in plan(told.n, told.seed) if not only or only & {s.how, s.phase}]
    every = []
    for n, strike in enumerate(strikes):
        seen = run(strike)
        every.append(seen)
        verdict = "; ".join(seen.wrong) or "good"
        print(f"{n + 1:4} {strike}: {verdict}: {seen.gone_s:.2f} s, exit {seen.code}: {seen.line}")
        if seen.wrong:
            print("\n".join(f"       | {line}" for line in seen.err.splitlines()[:40]))
        sys.stdout.flush()
    print(table(every))
    return int(any(seen.wrong for seen in every))


if __name__ == "__main__":
    sys.exit(main())
