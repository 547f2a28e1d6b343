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

from mpissd.engine.backend.cupy_device import device_info


def facts(local_rank: int) -> dict[str, Any]:
    """Returns the fields of ops.doctor.read_cuda; `error`: why this local rank has no
    GPU."""
    view: dict[str, Any] = {"cupy": cupy.__version__, "runtime": int(runtime.runtimeGetVersion())}
    try:
        view["driver"] = int(runtime.driverGetVersion())
        view["count"] = int(runtime.getDeviceCount())
        if local_rank >= view["count"]:
            return view
        runtime.setDevice(local_rank)
        info = device_info(local_rank, runtime.getDeviceProperties(local_rank))
        view |= {"name": info.name, "uuid": info.uuid or "", "bus_id": info.bus_id or ""}
    except runtime.CUDARuntimeError as error:
        return {**view, "error": str(error)}
    return view


if __name__ == "__main__":
    print(json.dumps(facts(int(sys.argv[1]))))  # noqa: T201
