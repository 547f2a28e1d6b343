"""Starts the ranks as a run would, each in the doctor's own command, and reads what they saw."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys

from mpissd.command_config import DoctorConfig
from mpissd.doctor.child import Answer, ask
from mpissd.doctor.launcher import user_environment
from mpissd.doctor.ranks import Seen

MARK = "mpissd-doctor "  # begins the line that holds what rank 0 saw
_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit): ")  # a traceback's last line
_MORE_S = 20.0  # for mpirun to start and to end
_NOT_PASSED = ("json", "tp", "schedule", "dry_run", "world_size", "progress")


def try_ranks(config: DoctorConfig, mpirun: str, path: str, num_ranks: int) -> tuple[Seen, str]:
    """(what the ranks saw, why that is nothing); never longer than the deadline and 24 s."""
    words = [path, *mpirun.split()[1:], "-np", str(num_ranks)]
    words += [sys.executable, "-m", "mpi4py", "-m", "mpissd", "doctor", "--json", *flags(config)]
    answer = ask(words, config.deadline_s + _MORE_S, env=user_environment(), end=signal.SIGTERM)
    return read(answer)


def read(answer: Answer) -> tuple[Seen, str]:
    """The last report among what the ranks printed; else what mpirun complained of."""
    for line in reversed(answer.out.splitlines()):
        _, mark, text = line.partition(MARK)
        try:
            if mark:
                return Seen.from_json(text), ""
        except (ValueError, TypeError, KeyError):  # cut off, or two lines in one
            continue
    return Seen(), answer.error or complaint(answer)


def complaint(answer: Answer) -> str:
    """The part of mpirun's words that says something, in one line."""
    rule = set("-=*")
    lines = [line.strip() for line in f"{answer.err}\n{answer.out}".splitlines()]
    said = [line for line in lines if line and not set(line) <= rule]
    if not said:
        return f"it said nothing and ended with code {answer.code}"
    raised = [line for line in said if _RAISED.match(line)]
    return (raised[-1] if raised else " ".join(said[:4]))[:300]


def flags(config: DoctorConfig) -> list[str]:
    """The flags that make this configuration again."""
    return [
        f"--{field.name}={getattr(config, field.name)}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != field.default and field.name not in _NOT_PASSED
    ]
