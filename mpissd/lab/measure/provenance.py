"""Records where a result row comes from: versions, hosts, devices, command line and commit."""

import platform
import sys
from contextlib import suppress
from datetime import datetime, timezone
from importlib import metadata
from typing import Any

from mpi4py import MPI

import mpissd
from mpissd.common.origin import commit
from mpissd.engine.backend.base import DeviceInfo

_STARTED = datetime.now(timezone.utc)


def provenance(infos: list[DeviceInfo], hosts: tuple[str, ...]) -> dict[str, Any]:
    """Returns the row's key `provenance`, which may explain why results of two days differ:
    versions, command line, commit, hosts and devices. infos, hosts: the device and host of each
    rank. The member `cuda` has the versions that are loaded at run time (None without CuPy)."""
    packages: dict[str, str | None] = dict.fromkeys(("numpy", "mpi4py", "nvmath-python"))
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            packages[name] = metadata.version(name)
    cuda = None
    cupy = sys.modules.get("cupy")
    nccl = sys.modules.get("cupy.cuda.nccl")
    if cupy is not None:
        cuda = {
            "cupy": cupy.__version__,
            "runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "nccl": nccl.get_version() if nccl is not None and nccl.available else None,
        }
    return {
        "mpissd": mpissd.__version__,
        "commit": commit(),
        "started_at": _STARTED.isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "mpi_library": str(MPI.Get_library_version()).strip("\x00").splitlines()[0].strip(),
        "packages": packages,
        "cuda": cuda,
        "hosts": sorted(set(hosts)),
        "ranks": [
            {"host": host, "device": info.name, "uuid": info.uuid, "bus_id": info.bus_id}
            for host, info in zip(hosts, infos, strict=True)
        ],
    }
