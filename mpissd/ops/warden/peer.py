"""The warden's view of one rank: what it does, whether it has ended, and how."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from contextlib import suppress
from time import monotonic
from typing import Any

from mpissd.common import process
from mpissd.common.stage import DOING, SIZE, STAGE, WAITING, Stage, words


class Peer:
    """A rank of this host that has joined the warden."""

    def __init__(
        self, link: socket.socket, pid: int, page: int, signals: int, about: dict[str, Any]
    ) -> None:
        """Takes over a rank's descriptors.

        link: the connection. page: of the rank's page, closed here. signals: of the pipe with the
        numbers of the signals that the rank got. about: the message of guard.join.
        """
        self.link, self.pid, self.about = link, pid, about
        self.rank: int = about["rank"]
        self.pidfd = process.open_pidfd(pid)
        self._page = mmap.mmap(page, SIZE)
        os.close(page)
        self._signals = signals
        self.ordered_at = 0.0
        self.ordered: int | None = (
            None  # the signal with which the launcher or a user ended the rank
        )
        self.left: int | None = None  # the exit code that the rank announced
        self.left_at: float | None = None
        self.gone = False
        self.is_lost = False  # whether the rank is gone and the job goes on without it
        self.gone_at = 0.0
        self.is_orphan = False  # whether its launcher ended before the rank
        self.status: int | None = None  # the rank's wait status as os.waitpid gives it, if known
        self.stopped_at: float | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.about['host']}, pid {self.pid})"

    @property
    def stage(self) -> int:
        """The Stage that the rank has reached."""
        return self._page[STAGE]

    @property
    def is_waiting(self) -> bool:
        """Whether the rank has waited for another one for more than 5 ms."""
        return bool(self._page[WAITING])

    def phase(self, lead: Peer | None = None) -> str:
        """Returns what the rank did last, in words.

        lead: the lead if it is on this host, because it alone records that the job warms up.
        """
        stage = self.stage
        if lead is not None and stage == Stage.ROUNDS and lead.stage == Stage.WARM_UP:
            stage = Stage.WARM_UP
        return words(stage, self._page[DOING])

    def look(self) -> bool:
        """Returns whether the rank has ended; notes the signals that it got and its wait status."""
        self.gone = self.gone or process.is_gone(self.pid)
        with suppress(BlockingIOError):
            if heard := os.read(self._signals, 64):
                self.ordered, self.ordered_at = heard[0], monotonic()
        if self.gone and self.status is None:
            self.status = process.exit_status(self.pid, self.pidfd)
        return self.gone

    @property
    def signal(self) -> int | None:
        """The signal that killed the rank, or None."""
        status = self.status
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    @property
    def in_good_order(self) -> bool:
        """Whether the rank reached the last stage and ended with its announced exit code."""
        if self.left is None or self.stage != Stage.DONE:
            return False
        return self.status is None or os.waitstatus_to_exitcode(self.status) == self.left

    @property
    def is_unclear(self) -> bool:
        """Whether the rank's exit status, which may come late, is needed to judge its end."""
        return self.status is None and not self.in_good_order

    @property
    def lost_its_launcher(self) -> bool:
        """Whether MPI ended the rank because its launcher was gone; no signal killed the rank."""
        return self.is_orphan and self.status != 0 and self.signal is None

    def how(self) -> str:
        """Returns how the rank ended, as the predicate of a sentence about it."""
        if self.status is None:
            return "ended without a word (killed, or by os._exit)"
        if self.signal is not None:
            try:
                name = signal.Signals(self.signal).name
            except ValueError:
                name = "a real-time signal"
            return f"was killed by signal {self.signal} ({name})"
        return f"left early with exit code {os.waitstatus_to_exitcode(self.status)}"

    def say(self, text: str) -> None:
        """Sends a message to the rank; does nothing where the rank no longer listens."""
        try:
            self.link.send(text.encode(), socket.MSG_DONTWAIT)
        except OSError:
            return

    def kill(self) -> None:
        """Kills the rank with SIGKILL."""
        if not process.is_gone(self.pid):
            process.send(self.pid, self.pidfd, signal.SIGKILL)
