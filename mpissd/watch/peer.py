"""A rank as the warden sees it."""

from __future__ import annotations

import mmap
import os
import signal
import socket
from contextlib import suppress
from time import monotonic
from typing import Any

from mpissd.watch import process
from mpissd.watch.page import DOING, SIZE, STAGE, WAITING, Stage, words


class Peer:
    """A rank of this host that has joined."""

    def __init__(
        self, link: socket.socket, pid: int, page: int, signals: int, told: dict[str, Any]
    ) -> None:
        """page, signals: descriptors of the rank's page, closed here, and of the pipe in which the
        signals to it arrive; told: what guard.join said."""
        self.link, self.pid, self.told = link, pid, told
        self.rank: int = told["rank"]
        self.pidfd = process.open_pidfd(pid)
        self._page = mmap.mmap(page, SIZE)
        os.close(page)
        self._signals = signals
        self.ordered_at = 0.0
        self.ordered: int | None = None  # the signal by which the launcher, or a user, ended it
        self.left: int | None = None  # the exit code that it announced
        self.left_at: float | None = None
        self.gone = False
        self.is_lost = False  # gone, and the job goes on
        self.gone_at = 0.0
        self.is_orphan = False  # its launcher was gone first
        self.status: int | None = None  # as os.waitpid says it, where that is known
        self.stopped_at: float | None = None

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.told['host']}, pid {self.pid})"

    @property
    def stage(self) -> int:
        """How far it has come."""
        return self._page[STAGE]

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another, and has for a while."""
        return bool(self._page[WAITING])

    def phase(self, lead: Peer | None = None) -> str:
        """What it did last; who serves a pass doesn't know that the lead still warms up."""
        stage = self.stage
        if lead is not None and stage == Stage.ROUNDS and lead.stage == Stage.WARM_UP:
            stage = Stage.WARM_UP
        return words(stage, self._page[DOING])

    def look(self) -> bool:
        """Whether it has ended; learns how."""
        self.gone = self.gone or process.is_gone(self.pid)
        with suppress(BlockingIOError):
            if heard := os.read(self._signals, 64):
                self.ordered, self.ordered_at = heard[0], monotonic()
        if self.gone and self.status is None:
            self.status = process.exit_status(self.pid, self.pidfd)
        return self.gone

    @property
    def signal(self) -> int | None:
        """What killed it, if a signal did."""
        status = self.status
        return os.WTERMSIG(status) if status is not None and os.WIFSIGNALED(status) else None

    @property
    def in_good_order(self) -> bool:
        """Whether it ended as it had announced."""
        if self.left is None or self.stage != Stage.DONE:
            return False
        return self.status is None or os.waitstatus_to_exitcode(self.status) == self.left

    @property
    def is_unclear(self) -> bool:
        """Whether its exit status, which may come late, is still needed to judge it."""
        return self.status is None and not self.in_good_order

    @property
    def lost_its_launcher(self) -> bool:
        """Whether MPI ended it for that: with an exit code of its own, or not known how."""
        return self.is_orphan and self.status != 0 and self.signal is None

    def how(self) -> str:
        """How it ended, as the end of a sentence that begins with its name."""
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
        """Tells the rank something, if it still listens."""
        try:
            self.link.send(text.encode(), socket.MSG_DONTWAIT)
        except OSError:
            return

    def kill(self) -> None:
        """Ends it, whatever it does."""
        if not process.is_gone(self.pid):
            process.send(self.pid, self.pidfd, signal.SIGKILL)
