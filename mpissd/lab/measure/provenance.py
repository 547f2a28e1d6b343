"""Records the origin of a row: library versions, hosts, devices, command line and commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from mpi4py import MPI

import mpissd
from mpissd.engine.backend.base import DeviceInfo

_STARTED = datetime.now(timezone.utc)


def provenance(infos: list[DeviceInfo], hosts: tuple[str, ...]) -> dict[str, Any]:
    """Returns everything that could explain a different result on another day."""
    return {
        "mpissd": mpissd.__version__,
        "commit": commit(),
        "started_at": _STARTED.isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mpi_library": str(MPI.Get_library_version()).strip("\x00").splitlines()[0].strip(),
        "packages": {name: version(name) for name in ("numpy", "mpi4py", "nvmath-python")},
        "cuda": cuda_versions(),
        "hosts": sorted(set(hosts)),
        "ranks": [
            {"host": host, "device": info.name, "uuid": info.uuid, "bus_id": info.bus_id}
            for host, info in zip(hosts, infos, strict=True)
        ],
    }


@cache
def version(package: str) -> str | None:
    """Returns the installed version of a package, or None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cuda_versions() -> dict[str, Any] | None:
    """Returns the versions of the CUDA libraries that are loaded; None if CuPy was not imported.

    These can differ from the versions that CuPy was compiled against.
    """
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return None
    versions: dict[str, Any] = {
        "cupy": cupy.__version__,
        "runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "driver": cupy.cuda.runtime.driverGetVersion(),
    }
    nccl = sys.modules.get("cupy.cuda.nccl")
    versions["nccl"] = nccl.get_version() if nccl is not None and nccl.available else None
    return versions


@cache
def commit() -> str | None:
    """Returns the checkout's commit, with "+" appended if files have changed.

    Outside a checkout (a copy of the tree without .git) it is the value of MPISSD_COMMIT, or None.
    """
    folder = Path(mpissd.__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("MPISSD_COMMIT")
    return done.stdout.strip() or None
