"""Starts the ranks as a run would, each as `doctor --json`, and reads what they report."""

from __future__ import annotations

import re
import signal
import sys

from mpissd.common.config import RunConfig
from mpissd.common.flags import said
from mpissd.ops.doctor.child import Answer, ask
from mpissd.ops.doctor.config import DoctorConfig
from mpissd.ops.doctor.launcher import user_environment
from mpissd.ops.doctor.ranks import Seen

MARK = "mpissd-doctor "  # the beginning of rank 0's line of facts on stdout
_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit): ")  # a traceback's last line
_MORE_S = 20.0  # time beyond the deadline for mpirun to start and to end
_NOT_PASSED = ("schedule", "dry_run", "world_size", "progress")


def try_ranks(config: DoctorConfig, mpirun: str, path: str, num_ranks: int) -> tuple[Seen, str]:
    """Starts the ranks; returns (what they saw, why they saw nothing).

    path: of the program in mpirun, which may hold options. Takes the deadline and 24 s at most.
    """
    words = [path, *mpirun.split()[1:], "-np", str(num_ranks)]
    words += [
        sys.executable,
        "-m",
        "mpi4py",
        "-m",
        "mpissd",
        "doctor",
        "--json",
        *flags(config.run),
    ]
    answer = ask(words, config.run.deadline_s + _MORE_S, env=user_environment(), end=signal.SIGTERM)
    return read(answer)


def read(answer: Answer) -> tuple[Seen, str]:
    """Returns the ranks' last report and "", or an empty report and mpirun's complaint."""
    for line in reversed(answer.out.splitlines()):
        _, mark, text = line.partition(MARK)
        try:
            if mark:
                return Seen.from_json(text), ""
        except (ValueError, TypeError, KeyError):  # a line that was cut off or mixed with another
            continue
    return Seen(), answer.error or complaint(answer)


def complaint(answer: Answer) -> str:
    """Returns the informative part of what mpirun printed, in one line of up to 300 characters."""
    rule = set("-=*")
    lines = [line.strip() for line in f"{answer.err}\n{answer.out}".splitlines()]
    said = [line for line in lines if line and not set(line) <= rule]
    if not said:
        return f"it said nothing and ended with code {answer.code}"
    raised = [line for line in said if _RAISED.match(line)]
    return (raised[-1] if raised else " ".join(said[:4]))[:300]


def flags(run: RunConfig) -> list[str]:
    """Returns the flags with which a rank makes this configuration again."""
    return [f"--{name}={text}" for name, text in said(run).items() if name not in _NOT_PASSED]
