"""Runs a program on a pseudo-terminal, types at it, and reads its screen."""

from __future__ import annotations

import os
import pty
import select
import signal
import struct
import subprocess
import time
from collections.abc import Sequence
from fcntl import ioctl
from termios import TIOCSWINSZ

END_OF_FILE, INTERRUPT = "\x04", "\x03"


class TerminalSession:
    """A program on a terminal of 100 columns. Use it in a `with` block."""

    def __init__(self, command: Sequence[str], cwd: str, env: dict[str, str] | None = None) -> None:
        self._lead, follower = pty.openpty()
        ioctl(follower, TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self._process = subprocess.Popen(
            list(command),
            cwd=cwd,
            env={**os.environ, "TERM": "xterm", **(env or {})},
            stdin=follower,
            stdout=follower,
            stderr=follower,
            start_new_session=True,
            preexec_fn=_own_terminal,
        )
        os.close(follower)
        self.seen = ""
        self._read = 0

    def until(self, text: str, deadline_s: float = 20.0) -> str:
        """Waits until the program prints `text`; returns all output since the last wait."""
        end = time.monotonic() + deadline_s
        while text not in self.seen[self._read :]:
            left = end - time.monotonic()
            assert left > 0 and self._more(left), f"no {text!r} in …{self.seen[-500:]!r}"
        at = self.seen.index(text, self._read) + len(text)
        found, self._read = self.seen[self._read : at], at
        return found

    def _more(self, wait_s: float) -> bool:
        if not select.select([self._lead], [], [], wait_s)[0]:
            return False
        try:
            new = os.read(self._lead, 1 << 16)
        except OSError:  # the program has ended
            return False
        self.seen += new.decode(errors="replace")
        return bool(new)

    def type(self, text: str) -> None:
        os.write(self._lead, text.encode())

    def end(self, deadline_s: float = 20.0) -> int:
        """Waits for the program's end; returns its exit code."""
        end = time.monotonic() + deadline_s
        while self._process.poll() is None:
            assert time.monotonic() < end, f"still running; it printed {self.seen!r}"
            self._more(0.05)
        while self._more(0.05):
            pass
        return self._process.returncode

    def __enter__(self) -> TerminalSession:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        os.close(self._lead)


def _own_terminal() -> None:
    """Makes stdin the terminal that Ctrl-C is for."""
    from termios import TIOCSCTTY

    # A shell's background job ignores Ctrl-C, and its children inherit that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ioctl(0, TIOCSCTTY, 0)
