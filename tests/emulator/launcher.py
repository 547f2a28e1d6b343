"""A GPU without a GPU: the transformer's CUDA kernels on a processor, over NumPy arrays."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.gpu.agreement import HostDevice
from tests.needs import lack

ROOT = Path(__file__).parents[2]
_BUILT = ROOT / ".pytest_cache/kernels"  # kernels of these sources, from earlier tests
_EMULATED = ("types", "system", "ampere", "hopper")  # device.hpp replaces these
# Kernels whose blocks wait for one another, or for ranks.
_TOGETHER = ("whole", "exchange", "wide_float32", "wide_float16", "wide_gated")


def aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an array of NaN (or of 0x7F bytes) at a 16-byte address."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.full(size + 16, 0x7F, np.uint8)
    start = -buffer.ctypes.data % 16
    return buffer[start : start + size].view(dtype).reshape(shape)


def build(output: Path, *options: str) -> None:
    """Compiles C++; skips the test without a compiler that knows the kernels' types."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        lack("a C++ compiler")
    command = [compiler, "-std=c++20", "-O1", "-fPIC", "-w", *options, "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if "_Float16" in done.stderr:
        lack("a C++ compiler with _Float16")
    assert done.returncode == 0, done.stderr


class EmulatedLauncher:
    """Compiles kernels with g++ into `folder` and runs their threads one by one (device.hpp)."""

    shared_bytes = 227 << 10
    multiprocessors = 3
    clusters = 2

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self.built = folder, dict[Any, Any]()
        self.launches: list[str] = []

    def launch(
        self,
        name: str,
        files: tuple[str, ...],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        macros: tuple[tuple[str, int], ...] = (),
    ) -> None:
        key = name, files, macros
        if key not in self.built:
            self.built[key] = self._compiled(*key)
        self.launches.append(name)
        values = [np.array(_address(arg)) for arg in args]
        pointers = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        sizes = (ctypes.c_int * 4)(*(*grid, 1)[:2], *(*block, 1)[:2])
        taken = self.built[key](pointers, sizes, ctypes.c_uint32(shared_mem), ctypes.c_uint32(1))
        assert taken == len(values), f"{name}: {taken} parameters for {len(values)} arguments"

    def num_clusters(self, *_how: Any) -> int:
        return self.clusters

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return aligned(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = aligned(shape, dtype)
        array[...] = 0
        return array

    def uploaded(self, values: Any, dtype: Any) -> Any:
        array = aligned(np.shape(values), dtype)
        array[...] = values
        return array

    def copy(self, source: Any, to: Any) -> None:
        to[...] = source

    def upload(self, values: Any, array: Any) -> None:
        array[...] = values

    def _compiled(self, name: str, files: tuple[str, ...], macros: Sequence[Any]) -> Any:
        includes = [f'#include "{file}.cu"' for file in files if file not in _EMULATED]
        kind = "run_together" if name in _TOGETHER else "run_grid"
        run = _RUN.replace("NAME", name).replace("KIND", kind)
        source = "\n".join(['#include "device.hpp"', *includes, run])
        options = [f"-D{macro}={value}" for macro, value in macros]
        folders = [ROOT / "mpissd/engine/backend/kernels", ROOT / "tests/emulator"]
        texts = [
            path.read_bytes() for folder in folders for path in sorted(folder.glob("*.[chu]*"))
        ]
        headers = _BUILT / hashlib.sha256(repr(texts).encode()).hexdigest()[:16]
        tag = hashlib.sha256(repr((source, options)).encode()).hexdigest()[:16]
        built, code = headers / f"{name}-{tag}.so", self._folder / f"{tag}.cpp"
        code.write_text(source)
        include = [f"-I{folder}" for folder in (headers, *folders)]
        runtime = headers / "cuda.o"
        for output, what in (  # device.hpp and cuda.cpp once for all kernels of these sources
            (headers / "device.hpp.gch", ["-x", "c++-header", str(folders[1] / "device.hpp")]),
            (runtime, ["-c", str(folders[1] / "cuda.cpp")]),
            (built, ["-shared", *options, str(code), str(runtime)]),
        ):
            if output.exists():
                continue
            headers.mkdir(parents=True, exist_ok=True)
            own = headers / f"{tag}.{os.getpid()}.{id(self)}"
            build(own, "-ffp-contract=off", "-fno-gnu-unique", *include, *what)
            os.replace(own, output)
        # A copy has its own globals: ranks run the same kernel at the same time.
        library = self._folder / built.name
        shutil.copy(built, library)
        return ctypes.CDLL(str(library)).run


_RUN = """
extern "C" int run(void** args, const int* sizes, u32 bytes, u32 seed) {
  return emulator::KIND(NAME, args, sizes, bytes, seed);
}
"""


def _address(arg: Any) -> Any:
    if arg is None:
        return np.uintp(0)
    if isinstance(arg, np.ndarray):
        assert arg.flags.c_contiguous
        return np.uintp(arg.ctypes.data)
    return arg


class EmulatedGpu(HostDevice):
    """The host as a GPU whose kernels are emulated."""

    name = "cupy"

    def __init__(self, folder: Path) -> None:
        super().__init__("0000:00:00.0")
        self.info = replace(self.info, compute_capability="9.0")
        self.device_id = 0
        self._launcher = EmulatedLauncher(folder)

    def launcher(self, *, early: bool) -> EmulatedLauncher:
        return self._launcher

    def activation(self, rows: int, width: int) -> Any:
        array = aligned((rows, width), np.float16)
        array[...] = np.nan
        return array
