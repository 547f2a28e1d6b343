"""A transformer's operations on the CPU, compiled by Numba at first use and cached on disk.

The compiled code lies in NUMBA_CACHE_DIR, or in the source's folder if that can be written, or in
the user's cache, or in a temporary folder. Numba checks one file to see whether its code is
current, but functions hold code of other files too; so the folder is named by all of them.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from pathlib import Path

import numba

_HERE = Path(__file__).parent


def _digest() -> str:
    """Returns a name for the sources of this folder, and of what it takes from others."""
    files = [*sorted(_HERE.glob("*.py")), _HERE.parents[1] / "forwards.py"]
    sources = b"".join(path.read_bytes() for path in files)
    return f"mpissd-numba-{zlib.crc32(sources):08x}"


def _cache_folder() -> str:
    """Returns the folder of compiled code, which exists or can be made."""
    asked, caches = numba.config.CACHE_DIR, os.environ.get("XDG_CACHE_HOME")
    folder = Path(asked or _HERE / "__pycache__")
    if not asked and not os.access(_HERE, os.W_OK):
        folder = Path(caches or os.path.expanduser("~/.cache"))
    try:
        (folder / _digest()).mkdir(parents=True, exist_ok=True)
    except OSError:
        return tempfile.mkdtemp(prefix="mpissd-numba-")
    return str(folder / _digest())


numba.config.CACHE_DIR = _cache_folder()
