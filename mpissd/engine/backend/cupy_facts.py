"""Prints what CuPy sees in this environment, as one JSON line.

Run it in a child process with a deadline, since the import can crash and a driver can hang:

    python -m mpissd.engine.backend.cupy_facts LOCAL_RANK
"""

from __future__ import annotations

import json
import sys
from typing import Any

import cupy
from cupy.cuda import runtime

from mpissd.engine.backend.cupy_device import can_access_peers, device_info


def facts(local_rank: int) -> dict[str, Any]:
    """Returns the fields of ops.doctor.facts.CudaView; `error` says why this local rank has no
    GPU."""
    found: dict[str, Any] = {"cupy": cupy.__version__, **_nccl()}
    found["runtime"] = int(runtime.runtimeGetVersion())
    try:
        found["driver"] = int(runtime.driverGetVersion())
        found["count"] = int(runtime.getDeviceCount())
        if local_rank >= found["count"]:
            return found
        runtime.setDevice(local_rank)
        info = device_info(local_rank, runtime.getDeviceProperties(local_rank))
        found |= {"name": info.name, "uuid": info.uuid or "", "bus_id": info.bus_id or ""}
        found["capability"] = info.compute_capability or ""
        free, total = runtime.memGetInfo()
        found |= {"memory_free": int(free), "memory_total": int(total)}
        found["peers"] = can_access_peers()
        found |= _nvmath()
    except runtime.CUDARuntimeError as error:
        found["error"] = str(error)
    return found


def _nccl() -> dict[str, Any]:
    try:
        from cupy.cuda import nccl

        if not nccl.available:
            return {"nccl_error": "CuPy finds no NCCL library"}
        return {"nccl": int(nccl.get_version()), "nccl_built": int(nccl.get_build_version())}
    except (ImportError, AttributeError, RuntimeError) as error:
        return {"nccl_error": str(error)}


def _nvmath() -> dict[str, Any]:
    try:
        from nvmath.bindings import cublas

        cublas.destroy(cublas.create())  # Loads the library.
    except (ImportError, AttributeError, RuntimeError) as error:
        return {"nvmath_error": str(error)}
    return {}


if __name__ == "__main__":
    print(json.dumps(facts(int(sys.argv[1]))))  # noqa: T201
