"""Ends a command quietly when its reader leaves, as in `mpissd compare results | head`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

UNREAD = 128 + signal.SIGPIPE  # 141, the shell's exit code for a program that SIGPIPE ended


def unless_unread(command: Callable[[], int]) -> int:
    """Runs a command and flushes stdout; returns its exit code, or 141 if stdout's reader is gone.

    stdout is /dev/null from then on, or Python would print a second error at exit.
    """
    try:
        try:
            return command()
        finally:  # also reached after SystemExit, which --help raises
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UNREAD
