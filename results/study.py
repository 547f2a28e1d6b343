"""What studies of many runs share: the rows that are there, and runs on a machine of their own."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mpissd.common.output import read_rows
from mpissd.common.row import Row

LOCAL = Path(__file__).resolve().parents[1] / "launch" / "local.sh"
OTHERS = 0.1  # of the machine: what may run beside a run that is kept
PATIENCE_S = 60.0  # for a machine to fall quiet


def flags_of(row: Row) -> tuple[str, ...]:
    """The flags of a row that name its configuration, as a study writes them."""
    return tuple(flag for flag in row.command[1:] if not flag.startswith(("--out=", "--progress=")))


def rows_of(out: Path) -> list[Row]:
    """The rows measured so far."""
    return [Row.from_dict(line) for line in read_rows(out / "runs.jsonl")]


def run_alone(ranks: int, flags: list[str], out: Path) -> str:
    """One run; its files move to OUT if the machine was its own. Says what was wrong, else ""."""
    waited = time.monotonic() + PATIENCE_S
    while time.monotonic() < waited:
        with tempfile.TemporaryDirectory() as folder:
            before = Busy.now()
            ended = subprocess.run(
                command(ranks, flags, Path(folder)),
                check=False,
                timeout=120,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            if ended.returncode != 0:
                return f" FAILED ({ended.returncode})"
            if Busy.now().others_since(before) <= OTHERS:
                keep(Path(folder), out)
                return ""
        while time.monotonic() < waited and not is_quiet():
            pass
    return " DISTURBED: not kept"


def keep(tried: Path, out: Path) -> None:
    """Moves a run's row and rounds to OUT."""
    (out / "rounds").mkdir(parents=True, exist_ok=True)
    for path in (tried / "rounds").iterdir():
        shutil.move(path, out / "rounds" / path.name)
    (row,) = rows_of(tried)
    command = [f"--out={out}" if word == f"--out={tried}" else word for word in row.command]
    row |= {"provenance": {**row.provenance, "command": command}}
    with (out / "runs.jsonl").open("a") as file:
        file.write(json.dumps(row.to_dict()) + "\n")


@dataclass(frozen=True)
class Busy:
    """Seconds of CPU that the machine and this script's runs have used so far (Linux; else 0)."""

    at: float
    machine: float
    own: float

    @classmethod
    def now(cls) -> Busy:
        """As the kernel counts them."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            ticks = [int(n) for n in Path("/proc/stat").read_text().split()[1:9]]
        except OSError:
            return cls(time.monotonic(), 0.0, 0.0)
        busy = sum(ticks) - ticks[3] - ticks[4]  # neither idle nor waiting for a disk
        return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), used.ru_utime + used.ru_stime)

    def others_since(self, before: Busy) -> float:
        """The share of the machine that others took."""
        others = self.machine - before.machine - (self.own - before.own)
        return others / ((self.at - before.at) * (os.cpu_count() or 1))


def is_quiet() -> bool:
    """Whether others leave the machine alone for half a second."""
    before = Busy.now()
    time.sleep(0.5)
    return Busy.now().others_since(before) <= OTHERS


def command(ranks: int, flags: list[str], out: Path) -> list[str]:
    """As launch/local.sh, without its dry run."""
    line = '. "$0"; np=$1; shift; exec $MPIRUN -np "$np" "$PYTHON" -m mpi4py -m mpissd run "$@"'
    return ["bash", "-c", line, str(LOCAL.with_name("env.sh")), str(ranks), f"--out={out}", *flags]
