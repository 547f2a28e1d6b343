"""The terminal of the person who started a job, as its lead reaches it.

A launcher stands between: mpirun holds a rank's output back until a line is complete. So the
scripts in launch/ name the terminal in MPISSD_TERMINAL (host:/dev/pts/N) and the lead opens it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from mpissd.engine.comm.topology import launcher_size

VARIABLE = "MPISSD_TERMINAL"
_DEFAULT_COLUMNS = 80


@dataclass(frozen=True)
class Terminal:
    """The user's terminal, opened for writing."""

    file: TextIO

    @property
    def columns(self) -> int:
        """The terminal's current width."""
        try:
            return os.get_terminal_size(self.file.fileno()).columns or _DEFAULT_COLUMNS
        except OSError:
            return _DEFAULT_COLUMNS

    def write(self, text: str) -> None:
        """Writes text without buffering."""
        self.file.write(text)
        self.file.flush()


@contextmanager
def open_terminal() -> Iterator[Terminal | None]:
    """Yields the user's terminal; None where there is none, for example behind a pipe."""
    if launcher_size() is None and sys.stdout.isatty():  # mpirun gives ranks a pty of its own
        yield Terminal(sys.stdout)
        return
    file = _named()
    if file is None:
        yield None
        return
    with file:
        yield Terminal(file)


def _named() -> TextIO | None:
    host, _, path = os.environ.get(VARIABLE, "").partition(":")
    if not path or host != os.uname().nodename:
        return None
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY)
    except OSError:
        return None
    if not os.isatty(descriptor):
        os.close(descriptor)
        return None
    return open(descriptor, "w", encoding="utf-8", errors="replace")
