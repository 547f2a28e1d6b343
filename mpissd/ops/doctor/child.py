"""Runs a program that may be missing, fail, or hang in a driver."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ASK_S = 20.0  # nvidia-smi takes seconds where GPUs are not in persistence mode
_GRACE_S = 2.0  # time for the child to end after a signal


@dataclass(frozen=True)
class Answer:
    """The output of a child process, and its exit code.

    code: None where it did not start or had to be ended; then error says why.
    """

    code: int | None
    out: str = ""
    err: str = ""
    error: str = ""

    @property
    def problem(self) -> str:
        """Why the child failed, in one line; "" where it succeeded."""
        if self.error or self.code == 0:
            return self.error
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        code = self.code or 0
        if code < 0:
            return f"ended by signal {-code}"
        return lines[-1][:300] if lines else f"failed with code {code}"


def ask(
    command: Sequence[str],
    timeout_s: float = ASK_S,
    env: Mapping[str, str] | None = None,
    end: signal.Signals = signal.SIGKILL,
) -> Answer:
    """Runs a command in a session of its own and returns what it printed. Never raises.

    Takes timeout_s + 4 s at most: a child that hangs in a driver and survives SIGKILL is left
    behind. end: the first signal to the child when its time is over.
    """
    try:
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(None, error=f"{command[0]}: {error.strerror}")
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        out, err = _end(child, end)
        return Answer(None, out, err, f"no answer within {timeout_s:.0f} s")
    return Answer(child.returncode, out, err)


def _end(child: subprocess.Popen[str], first: signal.Signals) -> tuple[str, str]:
    """Ends the child's session; returns what it had printed, as (stdout, stderr)."""
    for number in (first, signal.SIGKILL):
        try:
            os.killpg(child.pid, number)
        except OSError:  # it has ended by itself
            continue
        try:
            return child.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    return "", ""
