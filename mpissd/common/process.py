"""Linux functions: the state of any process, even if it is no child, and glibc's use of memory."""

import ctypes
import fcntl
import os
import struct
from pathlib import Path

# Size and members of struct pidfd_info (linux/pidfd.h), which has exit statuses since Linux 6.15.
_INFO_SIZE = 64
_INFO_EXIT = 1 << 3
_EXIT_AT = 60
_GET_INFO = 3 << 30 | _INFO_SIZE << 16 | 0xFF << 8 | 11

_TRIM_THRESHOLD = -1  # number of this option of glibc's mallopt (malloc.h)
_MMAP_THRESHOLD = -3
_KEPT = 256 << 20  # bytes
_LARGEST = 32 << 20


def open_pidfd(pid: int) -> int | None:
    """Returns a descriptor of the process (pidfd); None before Linux 5.3 or without the process."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def stat(pid: int) -> tuple[str, int, int] | None:
    """Returns, from /proc/PID/stat, a process's state letter, its parent's pid and its wait status
    (in os.waitpid's encoding); None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[-1])


def is_gone(pid: int) -> bool:
    """Returns whether the process has ended; a zombie (ended, but not yet waited for) has."""
    fields = stat(pid)
    return fields is None or fields[0] in "ZX"


def is_stopped(pid: int) -> bool:
    """Returns whether a signal such as SIGSTOP stopped the process; False if a debugger did."""
    fields = stat(pid)
    return fields is not None and fields[0] == "T"


def exit_status(pid: int, pidfd: int | None) -> int | None:
    """Returns the wait status of an ended process, in os.waitpid's encoding; None if it is unknown.
    pidfd: from `open_pidfd`; with it Linux 6.15 also knows the status of a reaped process."""
    if pidfd is not None:
        info = bytearray(_INFO_SIZE)
        struct.pack_into("Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(pidfd, _GET_INFO, info)
            if struct.unpack_from("Q", info)[0] & _INFO_EXIT:
                return int(struct.unpack_from("i", info, _EXIT_AT)[0])
        except OSError:  # the kernel is older, or the process is still a zombie
            info.clear()
    fields = stat(pid)
    return fields[2] if fields is not None and fields[0] == "Z" else None


def is_front(pid: int) -> bool:
    """Returns whether the process is mpirun or mpiexec itself, not one of its daemons."""
    return name(pid).startswith(("mpirun", "mpiexec", "prterun", "orterun"))


def name(pid: int) -> str:
    """Returns the name of the program that a process runs; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def keep_freed() -> bool:
    """Has glibc keep up to 256 MiB of freed memory; returns whether it accepted (other C libraries
    do not). By default glibc soon returns freed memory to the system, and new pages are cleared for
    the next array, which was half of the time of drawing a token from 49,152 logits."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
