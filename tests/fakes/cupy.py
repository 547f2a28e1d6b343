"""A CuPy that sees the GPUs of FAKE_GPUS through CUDA_VISIBLE_DEVICES, as CUDA does, and computes
nothing: opening a GPU prints its id and is refused.

FAKE_GPUS has a word of hexadecimal digits for each GPU that a cgroup leaves; "." after it: a UUID
that CuPy cuts off, "/N": N MIG instances.
"""

import os
import sys
from types import ModuleType
from typing import NamedTuple
from uuid import UUID


class CUDARuntimeError(RuntimeError):
    pass


class Gpu(NamedTuple):
    kind: str
    digits: str
    name: str

    @property
    def id(self) -> str:
        return f"{self.kind}-{UUID(self.digits.zfill(32))}"


def visible() -> list[Gpu]:
    gpus: list[list[Gpu]] = []  # the instances of each GPU, or it
    for word in os.environ["FAKE_GPUS"].split():
        name, _, count = word.partition("/")
        instances = [Gpu("MIG", f"{name}{n}", name) for n in range(int(count or 0))]
        gpus.append(instances or [Gpu("GPU", name.rstrip("."), name)])
    found: list[Gpu] = []
    every = ",".join(map(str, range(len(gpus))))
    for word in os.environ.get("CUDA_VISIBLE_DEVICES", every).split(","):
        named = [of[0] for number, of in enumerate(gpus) if word == str(number)]
        named += [gpu for of in gpus for gpu in of if word and gpu.id.startswith(word)]
        if len(named) != 1 or named[0] in found:  # the list ends at the first wrong word
            break
        found += named
        if named[0].kind == "MIG":
            break
    return found


class Device:
    def __init__(self, number: int) -> None:
        self.gpu = visible()[number]

    def use(self) -> None:
        from mpissd.common.errors import ConfigError

        os.write(1, f"opened {self.gpu.id}\n".encode())
        raise ConfigError("a fake")


def count() -> int:
    if not visible():
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return len(visible())


def properties(number: int) -> dict[str, bytes]:
    gpu = visible()[number]
    return {"name": b"Fake GPU", "uuid": UUID(gpu.id[4:]).bytes[: 2 if "." in gpu.name else 16]}


cuda, runtime = ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
cuda.runtime, cuda.Device = runtime, Device
runtime.CUDARuntimeError, runtime.getDeviceCount = CUDARuntimeError, count
runtime.getDeviceProperties = properties
runtime.deviceGetPCIBusId = lambda number: f"0000:{visible()[number].name}:00.0"
sys.modules |= {"cupy.cuda": cuda, "cupy.cuda.runtime": runtime}
ndarray = object


def is_available() -> bool:
    return bool(visible())
