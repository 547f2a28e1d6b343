"""A transformer's operations on the CPU, compiled by Numba at first use and cached on disk.

The compiled code is kept in NUMBA_CACHE_DIR, or in the source's folder if that can be written, or
in the user's cache, or in a temporary folder. Numba takes cached code for current if one source
file is unchanged, although the code includes functions of other files. So the cache's folder is
named by a digest of all sources.
"""

import os
import tempfile
import zlib
from pathlib import Path

import numba

_HERE = Path(__file__).parent


def _digest() -> str:
    """Returns the compiled code's folder name, which a checksum of all sources makes unique."""
    files = [*sorted(_HERE.glob("*.py")), _HERE.parents[1] / "forwards.py"]
    sources = b"".join(path.read_bytes() for path in files)
    return f"mpissd-numba-{zlib.crc32(sources):08x}"


def _cache_folder() -> str:
    """Makes the folder of compiled code and returns it; a temporary folder if that fails."""
    asked = numba.config.CACHE_DIR
    folder = Path(asked or _HERE / "__pycache__")
    if not asked and not os.access(_HERE, os.W_OK):
        folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    try:
        (folder / _digest()).mkdir(parents=True, exist_ok=True)
    except OSError:
        return tempfile.mkdtemp(prefix="mpissd-numba-")
    return str(folder / _digest())


numba.config.CACHE_DIR = _cache_folder()
