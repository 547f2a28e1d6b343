"""A transformer's operations on the CPU, compiled by Numba at first use and cached on disk.

The compiled code lies in NUMBA_CACHE_DIR, or beside the source where that can be written, or in
the user's cache, or else in a temporary folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numba


def _cache_folder() -> str:
    """Returns the folder of compiled code; "" leaves the choice to Numba, beside the source."""
    if numba.config.CACHE_DIR or os.access(Path(__file__).parent, os.W_OK):
        return str(numba.config.CACHE_DIR)
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(caches) / "mpissd-numba"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return tempfile.mkdtemp(prefix="mpissd-numba-")
    return str(folder)


numba.config.CACHE_DIR = _cache_folder()
