"""Makes the C library keep freed memory, instead of returning it to the system."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, from glibc's malloc.h
_KEPT, _LARGEST = 256 << 20, 32 << 20  # bytes


def keep_freed() -> bool:
    """Keeps up to 256 MiB of freed memory, of blocks of up to 32 MiB; returns whether it can.

    By default glibc returns the top of the heap as soon as some 100 kB of it are free, and the next
    array is of pages that the system has to clear again: half of the time in which a token is drawn
    from 49,152 logits. Other C libraries have no mallopt, and stay as they are.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST))
