"""A CuPy of GPUs that nobody can compute on, as a package's __init__.py: what the doctor asks.

Both ranks get one GPU, and CUDA is newer than the driver.
"""

from __future__ import annotations

import sys
from types import ModuleType

__version__ = "14.0.1"


def is_available() -> bool:
    return False  # so that `--backend=auto` takes NumPy


def _module(name: str, **members: object) -> ModuleType:
    found = ModuleType(f"cupy.{name}")
    found.__dict__.update(members)
    sys.modules[found.__name__] = found
    return found


class CUDARuntimeError(RuntimeError):
    pass


_PROPERTIES = {
    "uuid": bytes(range(1, 17)),
    "name": b"NVIDIA H200",
    "l2CacheSize": 50 << 20,
    "major": 9,
    "minor": 0,
}
_runtime = _module(
    "cuda.runtime",
    CUDARuntimeError=CUDARuntimeError,
    runtimeGetVersion=lambda: 14000,
    driverGetVersion=lambda: 13000,
    getDeviceCount=lambda: 2,
    setDevice=lambda device: None,
    getDeviceProperties=lambda device: _PROPERTIES,
    deviceGetPCIBusId=lambda device: "0000:18:00.0",
    memGetInfo=lambda: (100 << 30, 141 << 30),
)
cuda = _module("cuda", runtime=_runtime)
