"""A rank's end of the watch: it joins its host's warden, says what it does, and ends when told to.

The first rank of a host to bind the job's socket starts the warden. Nothing here waits for the
warden, and a job whose host has none (no Linux, a refused socket) runs as it would without.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from mpissd.errors import FaultError
from mpissd.watch import process
from mpissd.watch.page import OWN, STAGE, Stage

_JOB_NAMES = ("PMIX_NAMESPACE", "PMIX_SERVER_URI", "PMIX_SERVER_URI2", "PMIX_SERVER_URI4",
              "PMIX_SERVER_URI41", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_JOBID")  # fmt: skip
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDI_", "SLURM_")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_ATTEMPTS = 50  # to join, where whoever bound the socket dies before there is a warden
_ANSWER_S = 5.0  # how long a rank waits for the warden's line; it may hold one back for 3 s
_MOST = 1000  # characters of what a rank says; the line is for a person
_REJOINS, _REJOIN_S = 5, 0.2  # where the warden itself is killed; between two of them


class Guard:
    """One rank's connection to the warden of its host."""

    def __init__(self, link: socket.socket, enter: Callable[[], socket.socket | None]) -> None:
        """enter: joins the warden that there is then; None where there can be none."""
        self._link, self._enter = link, enter
        self._told = threading.Event()
        self.has_spoken = False  # of a fault, or that it leaves
        self.lost: frozenset[int] = frozenset()  # ranks that a recovering job goes on without
        threading.Thread(target=self._listen, name="mpissd-guard", daemon=True).start()

    def tell(self, kind: str, **said: Any) -> bool:
        """Sends a message; False where there is no warden any more."""
        self.has_spoken = True
        try:
            self._link.send(json.dumps({"kind": kind, **said}).encode())
        except OSError:
            return False
        return True

    def tell_and_wait(self, kind: str, text: str) -> bool:
        """Sends a fault and waits until the warden has said it; False where nobody will."""
        return self.tell(kind, text=text[:_MOST]) and self._told.wait(_ANSWER_S)

    def _listen(self) -> None:
        """Asleep until the warden speaks, which it does where something went wrong."""
        left = _REJOINS
        while True:
            try:
                heard = self._link.recv(64).decode().split()
            except OSError:
                heard = []
            if not heard:
                if not left or not self._rejoin():
                    return
                left -= 1
            elif heard[0] == "said":
                self._told.set()
            elif heard[0] == "lost":
                self.lost = frozenset(map(int, heard[1:]))
            elif heard[0] == "end":
                os._exit(FaultError.exit_code)

    def _rejoin(self) -> bool:
        """The warden is gone: another takes over, unless this rank is about to leave."""
        time.sleep(_REJOIN_S)
        if self.has_spoken or OWN.bytes[STAGE] >= Stage.TEARDOWN:
            return False
        link = self._enter()
        if link is not None:
            self._link.close()
            self._link = link
        return link is not None


_guard: Guard | None = None


def join(rank: int, size: int, *, deadline_s: float, may_lose: Sequence[int] = ()) -> None:
    """Joins this host's warden, or starts it. Before MPI, and once in a process.

    may_lose: ranks without which the job goes on, once it measures.
    """
    global _guard
    if not sys.platform.startswith("linux"):
        return
    if process.stat(os.getpid()) is None:
        return  # no /proc: everybody would look dead
    sizes = (os.environ.get(name, "") for name in _LOCAL_SIZES)
    told = {
        "rank": rank,
        "size": size,
        "local_size": next((int(text) for text in sizes if text.isdecimal()), None),
        "host": socket.gethostname(),
        "launcher": os.getppid(),
        "deadline_s": deadline_s,
        "may_lose": list(may_lose),
    }
    ends: list[int] = []  # kept: another warden may need them

    def enter() -> socket.socket | None:
        try:
            link = _connect()
            if link is not None:
                ends[:] = ends or [OWN.share(), _report_signals()]
                socket.send_fds(link, [json.dumps(told).encode()], ends)
        except OSError:
            return None
        return link

    link = enter()
    if link is None:
        return
    _guard = Guard(link, enter)
    sys.excepthook = _at_exception
    atexit.register(_at_exit)


def _report_signals() -> int:
    """Lets the warden know which signals end this rank, even from within a library's call.

    Returns the end of a pipe that it reads them from. By that it tells a rank that the launcher
    ended, as all others, from one that was killed.
    """
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, lambda number, _: os._exit(128 + number))
    return read


def _at_exception(kind: type[BaseException], error: BaseException, where: Any) -> None:
    """An exception that nobody caught: the warden's line first, then the traceback. mpi4py.run
    aborts the job."""
    failed(f"{kind.__name__}: {error}".splitlines()[0])
    sys.__excepthook__(kind, error, where)


def _at_exit() -> None:
    """The interpreter ends: too early where this rank has not said that it leaves. MPI's own end
    would now wait for the others, who wait for this rank."""
    if _guard is not None and not _guard.has_spoken:
        failed("sys.exit, while the others still need it")
        sys.stdout.flush()
        os._exit(FaultError.exit_code)


def _connect() -> socket.socket | None:
    """The connection to this job's warden on this host, started where there is none."""
    name = _address()
    for _ in range(_ATTEMPTS):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(name)
        except ConnectionRefusedError:
            link.close()
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                try:
                    listener.bind(name)
                except OSError:
                    continue  # another rank was faster
                listener.listen(1024)
                _start_warden(listener)
        else:
            return link
    return None


def _address() -> str:
    """The abstract socket of this job on this host: no file, gone with its last holder."""
    job = [os.environ.get(name, "") for name in _JOB_NAMES]
    if not any(job):
        job = [str(os.getppid())]
    text = "\n".join([*job, str(os.getuid())])
    return f"\0mpissd-{sha256(text.encode()).hexdigest()[:24]}"


def _start_warden(listener: socket.socket) -> None:
    """In a session of its own, so that what ends the ranks does not end it; no rank by its
    environment, so that nobody takes it for one."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_OF_A_RANK)}
    kept["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
    subprocess.Popen(
        [sys.executable, "-S", "-m", "mpissd.watch.warden", str(listener.fileno())],
        env=kept,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


def stage(now: Stage) -> None:
    """This rank has come so far."""
    OWN.bytes[STAGE] = now


def failed(text: str) -> bool:
    """This rank fails by itself; whether the warden has said so, so that the rank need not."""
    return _guard is not None and _guard.tell_and_wait("failed", text)


def waited(text: str) -> bool:
    """This rank waited in vain: the warden looks for who is missing, and says that."""
    return _guard is not None and _guard.tell_and_wait("waited", text)


def leave(code: int) -> None:
    """This rank's part is over, in good order; it will end with this exit code."""
    if _guard is not None:
        _guard.tell("leave", code=code)


def lost() -> frozenset[int]:
    """World ranks that are gone, in a job that goes on without them."""
    return frozenset() if _guard is None else _guard.lost
