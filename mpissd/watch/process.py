"""What Linux tells of a process that is no child: whether it lives, stands still, how it ended."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import struct
from pathlib import Path

# struct pidfd_info and PIDFD_GET_INFO of linux/pidfd.h; with the exit status from Linux 6.15 on.
_INFO_SIZE, _INFO_EXIT, _EXIT_AT = 64, 1 << 3, 60
_GET_INFO = 3 << 30 | _INFO_SIZE << 16 | 0xFF << 8 | 11
_PIDFD_GETFD = 438  # the system call's number, the same on every architecture since 2019


def open_pidfd(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None where there is no such thing
    (before Linux 5.3) or no such process."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, wait status) of /proc/PID/stat; None where the process is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[-1])


def is_gone(pid: int) -> bool:
    """Whether it has ended, its parent may not know yet."""
    found = stat(pid)
    return found is None or found[0] in "ZX"


def is_stopped(pid: int) -> bool:
    """Whether it was stopped by a signal; a debugger's stop is another state."""
    found = stat(pid)
    return found is not None and found[0] == "T"


def exit_status(pid: int, pidfd: int | None) -> int | None:
    """How it ended, as os.waitpid says it; None while (or where) the kernel doesn't tell."""
    if pidfd is not None:
        info = bytearray(_INFO_SIZE)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(pidfd, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
                return int(struct.unpack_from("i", info, _EXIT_AT)[0])
        except OSError:  # an older kernel, or its parent has not asked yet
            info.clear()
    found = stat(pid)
    return found[2] if found is not None and found[0] == "Z" else None


def send(pid: int, pidfd: int | None, signum: int) -> None:
    """Sends a signal, if it still lives."""
    try:
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, signum)
        else:
            os.kill(pid, signum)
    except ProcessLookupError:
        return


def borrow_stderr(pid: int, pidfd: int | None) -> int | None:
    """A copy of that process's stderr; None where it may not be had."""
    if pidfd is not None:
        found = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, pidfd, 2, 0)
        if found >= 0:
            return int(found)
    try:
        return os.open(f"/proc/{pid}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
    except OSError:
        return None


def above_proxy(pid: int) -> int:
    """What started `pid`, where that is a launcher's proxy; else `pid`."""
    found = stat(pid)
    return found[1] if found is not None and _name(pid).startswith("hydra_") else pid


def is_front(pid: int) -> bool:
    """Whether it is the launcher itself, whose stderr the user reads, and no daemon of it."""
    return _name(pid).startswith(("mpirun", "mpiexec", "prterun", "orterun"))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
