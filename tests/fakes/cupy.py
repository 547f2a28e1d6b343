"""A CuPy that sees the GPUs of FAKE_GPUS through CUDA_VISIBLE_DEVICES, as CUDA does, and computes
nothing: opening a GPU prints its id and is refused.

FAKE_GPUS has a word for each GPU: its UUID's last digits, "." after them for a UUID that CuPy cuts
off, "/N" for N MIG instances. FAKE_CGROUP: the numbers of the GPUs that a cgroup leaves.
"""

import os
import sys
from types import ModuleType
from typing import NamedTuple
from uuid import UUID


class CUDARuntimeError(RuntimeError):
    pass


class Gpu(NamedTuple):
    ids: tuple[str, ...]  # by which a mask may name it, without its number
    uuid: bytes
    bus_id: str


def uuid_of(digits: str) -> UUID:
    return UUID(int=int(digits, 16) + (0x11 << 120))


def instance(gpu: str, number: int) -> str:
    return f"MIG-{uuid_of(f'{gpu}{number + 1:02x}')}"


def visible() -> list[Gpu]:
    words = os.environ["FAKE_GPUS"].split()
    left = os.environ.get("FAKE_CGROUP", ",".join(map(str, range(len(words))))).split(",")
    gpus: list[list[Gpu]] = []  # the instances of each GPU
    for number in map(int, left):
        name, _, count = words[number].partition("/")
        octets = uuid_of(name.rstrip(".")).bytes[: 2 if name.endswith(".") else 16]
        ids = [instance(name, i) for i in range(int(count or 0))]
        bus_id = f"0000:{number + 1:02x}:00.0"
        whole = Gpu((f"GPU-{uuid_of(name.rstrip('.'))}",), octets, bus_id)
        gpus.append([Gpu((i,), UUID(i[4:]).bytes, bus_id) for i in ids] or [whole])
    found: list[Gpu] = []
    for word in os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(
        ","
    ):
        named = [of[0] for n, of in enumerate(gpus) if word == str(n)]
        named += [one for of in gpus for one in of if word and one.ids[0].startswith(word)]
        if len(named) != 1 or named[0] in found:  # the list ends at the first wrong word
            break
        found += named
        if named[0].ids[0].startswith("MIG-"):
            break
    return found


class Device:
    def __init__(self, number: int) -> None:
        self.gpu = visible()[number]

    def use(self) -> None:
        from mpissd.common.errors import ConfigError

        os.write(1, f"opened {self.gpu.ids[0]}\n".encode())
        raise ConfigError("a fake")


def _count() -> int:
    if not (found := visible()):
        raise CUDARuntimeError("cudaErrorNoDevice: no CUDA-capable device is detected")
    return len(found)


cuda, runtime = ModuleType("cupy.cuda"), ModuleType("cupy.cuda.runtime")
cuda.runtime, cuda.Device = runtime, Device
runtime.CUDARuntimeError = CUDARuntimeError
runtime.getDeviceCount = _count
runtime.getDeviceProperties = lambda number: {"uuid": visible()[number].uuid, "name": b"Fake GPU"}
runtime.deviceGetPCIBusId = lambda number: visible()[number].bus_id
sys.modules |= {"cupy.cuda": cuda, "cupy.cuda.runtime": runtime}
ndarray = object


def is_available() -> bool:
    return bool(visible())
