"""A rank's side of fault detection: connects to the watchdog process of its host (ops/warden.py,
the "warden"), reports to it, and ends this process when the watchdog orders it.

The first rank of a host that binds the job's socket starts the watchdog. No rank waits for that
start. Where a watchdog cannot run (no Linux, a refused socket) the job goes on without one.
"""

import atexit
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from mpissd.common import process
from mpissd.common.errors import FaultError
from mpissd.common.stage import OWN, STAGE, Stage

_JOB_NAMES = ("PMIX_NAMESPACE", "PMIX_SERVER_URI", "PMIX_SERVER_URI2", "PMIX_SERVER_URI4",
              "PMIX_SERVER_URI41", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_JOBID")  # fmt: skip
_OF_A_RANK = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDI_", "SLURM_")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
# Attempts to connect; several are needed if a rank binds the socket and dies before the watchdog.
_ATTEMPTS = 50
_ANSWER_S = 5.0  # longest wait, in s, for a report to be printed; the watchdog may delay it by 3 s
_MOST = 1000  # the most characters of a rank's report that are sent


class _Guard:
    """One rank's connection to the watchdog process of its host."""

    def __init__(self, link: socket.socket) -> None:
        """Starts the thread that receives the watchdog's messages. When this rank gets SIGINT,
        SIGTERM or SIGHUP, Python's C handler writes the signal's number to the connection, even
        during a library call. So the watchdog knows whether the launcher ended a rank."""
        self._link = link
        link.setblocking(False)
        signal.set_wakeup_fd(link.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, lambda number, _: os._exit(128 + number))
        self.printed = threading.Event()  # set when the watchdog has printed this rank's report
        self.has_spoken = False  # whether this rank has reported a fault or its normal end
        self.lost: frozenset[int] = frozenset()  # MPI ranks that ended while the job goes on
        threading.Thread(target=self._listen, name="mpissd-guard", daemon=True).start()

    def tell(self, kind: str, **fields: Any) -> bool:
        """Sends the watchdog a message of type `kind` with fields; returns whether it was sent."""
        self.has_spoken = self.has_spoken or kind != "hangs"
        try:
            self._link.send(json.dumps({"kind": kind, **fields}).encode())
        except OSError:
            return False
        return True

    def _listen(self) -> None:
        """Receives the watchdog's messages: "said" (it printed this rank's report), "lost R …"
        (ranks R are gone and the job goes on), "end" (this process ends with exit code 5)."""
        while True:
            select.select([self._link], [], [])
            try:
                words = self._link.recv(64).decode().split()
            except OSError:
                return
            if not words:  # the watchdog has ended
                return
            if words[0] == "said":
                self.printed.set()
            elif words[0] == "lost":
                self.lost = frozenset(map(int, words[1:]))
            elif words[0] == "end":
                os._exit(FaultError.exit_code)


_guard: _Guard | None = None


def join(
    rank: int, size: int, *, deadline_s: float, may_lose: Sequence[int] = (), hint: str = ""
) -> None:
    """Connects this rank to its host's watchdog process, before MPI starts; starts the watchdog if
    there is none. rank, size: of this process, in MPI's world. deadline_s: the longest time without
    progress, in seconds. may_lose: the ranks without which the job can go on in measured rounds.
    hint: ends the line that the watchdog prints if a signal such as Ctrl-C ended all ranks."""
    global _guard
    if not sys.platform.startswith("linux"):
        return
    if process.stat(os.getpid()) is None:
        return  # Ranks are watched through /proc.
    about = {
        "rank": rank,
        "size": size,
        "local_size": local_size(os.environ),
        "host": socket.gethostname(),
        "launcher": os.getppid(),
        "deadline_s": deadline_s,
        "may_lose": list(may_lose),
        "hint": hint,
    }
    try:
        link = _connect()
        if link is None:
            return
        socket.send_fds(link, [json.dumps(about).encode()], [OWN.share()])
    except OSError:
        return
    _guard = _Guard(link)
    sys.excepthook = _at_exception
    atexit.register(_at_exit)


def local_size(environ: Mapping[str, str]) -> int | None:
    """Returns how many ranks mpirun or srun started on this host, by environment variables; None if
    they do not say. srun lists the hosts: 3(x2),1 are 3, 3 and 1 ranks on hosts 0, 1 and 2."""
    for name in _LOCAL_SIZES:
        if environ.get(name, "").isdecimal():
            return int(environ[name])
    listed = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in listed for _ in range(int(times or 1))]
    host = environ.get("SLURM_NODEID", "")
    return counts[int(host)] if host.isdecimal() and int(host) < len(counts) else None


def _connect() -> socket.socket | None:
    """Returns a connection to this job's watchdog on this host, and starts the watchdog if needed;
    None after 50 failed attempts. The socket's abstract name vanishes with the processes that use
    it. Raises OSError without Unix sockets."""
    job = [os.environ.get(name, "") for name in _JOB_NAMES]
    job = job if any(job) else [str(os.getppid())]
    digest = sha256("\n".join([*job, str(os.getuid())]).encode()).hexdigest()
    name = f"\0mpissd-{digest[:24]}"
    root = str(Path(__file__).resolve().parents[2])
    for _ in range(_ATTEMPTS):
        link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            link.connect(name)
            return link
        except ConnectionRefusedError:
            link.close()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(name)
            except OSError:
                continue  # another rank bound the name first and starts the watchdog
            listener.listen(1024)
            # The watchdog's own session keeps signals to the ranks' process group away from it.
            subprocess.Popen(
                [sys.executable, "-S", "-m", "mpissd.ops.warden", str(listener.fileno())],
                env={**without_ranks(os.environ), "PYTHONPATH": root},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )
    return None


def _at_exception(kind: type[BaseException], error: BaseException, where: Any) -> None:
    """Has the watchdog print an uncaught exception, after which mpi4py.run aborts the job."""
    failed(f"{kind.__name__}: {error}".splitlines()[0])
    sys.__excepthook__(kind, error, where)


def _at_exit() -> None:
    """Runs at exit: if this process has reported neither a fault nor its end, ends it with exit
    code 5 at once. MPI_Finalize would block, as it waits for ranks that wait for this one."""
    if _guard is not None and not _guard.has_spoken:
        failed("sys.exit, while the others still need it")
        sys.stdout.flush()
        os._exit(FaultError.exit_code)


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without the launcher's variables, so that a child process does not
    take itself for a rank of this job."""
    return {k: v for k, v in environ.items() if not k.startswith(_OF_A_RANK)}


def stage(now: Stage) -> None:
    """Stores where the watchdog reads it which stage of the job this rank has reached, so that a
    message about a fault can name the stage."""
    OWN.bytes[STAGE] = now


def failed(text: str, kind: str = "failed") -> bool:
    """Reports a fault of this rank; returns whether the watchdog printed a line about it within 5
    s. kind: "failed", or "waited" for a wait that timed out because of another rank."""
    if _guard is None or not _guard.tell(kind, text=text[:_MOST]):
        return False
    return _guard.printed.wait(_ANSWER_S)


def hangs(rank: int, text: str) -> None:
    """Reports that `rank` does not answer. It is killed if the job can go on without it."""
    if _guard is not None:
        _guard.tell("hangs", rank=rank, text=text[:_MOST])


def leave(code: int) -> None:
    """Tells the watchdog that this rank is done and will end with exit code `code`."""
    if _guard is not None:
        _guard.tell("leave", code=code)


def lost() -> frozenset[int]:
    """Returns the MPI ranks that have ended while the job goes on without them, as the flag
    --on_draft_loss=ar allows for draft ranks."""
    return frozenset() if _guard is None else _guard.lost
