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
    view: dict[str, Any] = {"cupy": cupy.__version__, **_nccl()}
    view["runtime"] = int(runtime.runtimeGetVersion())
    try:
        view["driver"] = int(runtime.driverGetVersion())
        view["count"] = int(runtime.getDeviceCount())
        if local_rank >= view["count"]:
            return view
        runtime.setDevice(local_rank)
        info = device_info(local_rank, runtime.getDeviceProperties(local_rank))
        view |= {"name": info.name, "uuid": info.uuid or "", "bus_id": info.bus_id or ""}
        view["capability"] = info.compute_capability or ""
        free, total = runtime.memGetInfo()
        view |= {"memory_free": int(free), "memory_total": int(total)}
        view["peers"] = can_access_peers()
        view |= _nvmath()
    except runtime.CUDARuntimeError as error:
        view["error"] = str(error)
    return view


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
