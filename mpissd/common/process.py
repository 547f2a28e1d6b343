"""What only Linux gives: the state of a process that is not a child, and memory that is kept."""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from pathlib import Path

# From linux/pidfd.h: struct pidfd_info and PIDFD_GET_INFO. Linux 6.15 added the exit status.
_INFO_SIZE = 64
_INFO_EXIT = 1 << 3
_EXIT_AT = 60
_GET_INFO = 3 << 30 | _INFO_SIZE << 16 | 0xFF << 8 | 11

_TRIM_THRESHOLD = -1  # options of mallopt, from glibc's malloc.h
_MMAP_THRESHOLD = -3
_KEPT = 256 << 20  # bytes
_LARGEST = 32 << 20


def open_pidfd(pid: int) -> int | None:
    """Returns a descriptor of the process; None before Linux 5.3, or if there is no process."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def stat(pid: int) -> tuple[str, int, int] | None:
    """Returns (state letter, parent's pid, wait status) of /proc/PID/stat; None for no process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[-1])


def is_gone(pid: int) -> bool:
    """Returns whether the process has ended, which includes a zombie."""
    fields = stat(pid)
    return fields is None or fields[0] in "ZX"


def is_stopped(pid: int) -> bool:
    """Returns whether a signal such as SIGSTOP stopped the process, and not a debugger."""
    fields = stat(pid)
    return fields is not None and fields[0] == "T"


def exit_status(pid: int, pidfd: int | None) -> int | None:
    """Returns the wait status of an ended process, as os.waitpid does; None if it is unknown."""
    if pidfd is not None:
        info = bytearray(_INFO_SIZE)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(pidfd, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
                return int(struct.unpack_from("i", info, _EXIT_AT)[0])
        except OSError:  # an older kernel, or the parent has not waited for it yet
            info.clear()
    fields = stat(pid)
    return fields[2] if fields is not None and fields[0] == "Z" else None


def is_front(pid: int) -> bool:
    """Returns whether the process is the launcher itself (mpirun, srun), not one of its daemons."""
    return name(pid).startswith(("mpirun", "mpiexec", "prterun", "orterun"))


def name(pid: int) -> str:
    """Returns the name of a process's program; "" for no process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def keep_freed() -> bool:
    """Has glibc keep up to 256 MiB of freed memory; returns whether it does (other C libraries do
    not). By default glibc returns some 100 kB of free heap to the system at once, which clears the
    pages of the next array again: half of the time in which a token is drawn from 49,152 logits."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
