"""Launches of own CUDA kernels on one stream, one after the other or overlapping."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import cupy
import numpy as np

from mpissd.engine.backend import kernels
from mpissd.engine.backend.cupy_device import device_empty

_FIRST_EARLY_CAPABILITY = 90


class Launcher:
    """Compiles kernels at first use, and launches them on one stream.

    With `early`, a kernel's blocks may start while the kernel before it still runs; a kernel
    launched so must call wait_for_last (ampere.cu) before it reads what others wrote. Ignored below
    compute capability 9.0 and without cuda-bindings.
    """

    def __init__(self, stream: Any, device_id: int, *, early: bool) -> None:
        self._stream = stream
        self._modules: dict[tuple[str, ...], Any] = {}
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._driver: Any = _driver(device_id) if early else None
        attributes = cupy.cuda.Device(device_id).attributes
        self.shared_bytes = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.multiprocessors = int(attributes["MultiProcessorCount"])

    @property
    def free_bytes(self) -> int:
        """Bytes of the device that are free now."""
        return int(cupy.cuda.runtime.memGetInfo()[0])

    def function(
        self,
        name: str,
        files: tuple[str, ...],
        macros: tuple[tuple[str, int], ...] = (),
        shared_mem: int = 0,
    ) -> Any:
        """Returns the kernel `name` of these sources, compiled with these macros.

        shared_mem: the most dynamic shared memory of its launches, in bytes.
        """
        key = name, files, macros
        if key not in self._functions:
            options = ("--std=c++17", *(f"-D{macro}={value}" for macro, value in macros))
            module = self._modules.get(files + options)
            if module is None:
                module = cupy.RawModule(code=kernels.source(files), options=options)
                self._modules[files + options] = module
            function = module.get_function(name)
            if shared_mem > 48 << 10:
                function.max_dynamic_shared_size_bytes = shared_mem
            self._functions[key] = function
        return self._functions[key]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an uninitialised device array; raises ConfigError if it does not fit."""
        return device_empty(shape, dtype)

    def uploaded(self, values: Any, dtype: Any) -> Any:
        """Returns a device array of host values."""
        array = self.empty(np.shape(values), dtype)
        self.upload(values, array)
        return array

    def upload(self, values: Any, array: Any) -> None:
        """Writes host values into a contiguous device array; returns when they are there."""
        array.set(np.ascontiguousarray(values, array.dtype), stream=self._stream)
        self._stream.synchronize()

    def copy(self, source: Any, to: Any) -> None:
        """Copies a device array into another one of its shape, in the stream's order; waits."""
        with self._stream:
            to[...] = source
        self._stream.synchronize()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns a device array of zeros."""
        array = self.empty(shape, dtype)
        with self._stream:
            array.fill(0)
        return array

    def launch(
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
    ) -> None:
        """Launches a kernel; args are device arrays, NumPy scalars, or None for a null pointer."""
        values = [_value(arg) for arg in args]
        if self._driver is None:
            with self._stream:
                function(grid, block, tuple(values), shared_mem=shared_mem)
        else:
            self._launch_early(function, grid, block, values, shared_mem)

    def _launch_early(
        self,
        function: Any,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        values: list[Any],
        shared_mem: int,
    ) -> None:
        held = [np.array(value) for value in values]
        pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes, config.hStream = shared_mem, self._stream.ptr
        config.attrs, config.numAttrs = [_early(self._driver)], 1
        address = ctypes.addressof(pointers)
        (error,) = self._driver.cuLaunchKernelEx(config, function.kernel.ptr, address, 0)
        if int(error):
            raise RuntimeError(f"cuLaunchKernelEx: {error}")


def _early(driver: Any) -> Any:
    """Returns the launch attribute that lets a kernel start early."""
    attribute, value = driver.CUlaunchAttribute(), driver.CUlaunchAttributeValue()
    kinds = driver.CUlaunchAttributeID
    attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value.programmaticStreamSerializationAllowed = 1
    attribute.value = value
    return attribute


def _value(arg: Any) -> Any:
    """Returns an argument as a NumPy scalar; an array becomes its address."""
    if arg is None:
        return np.uintp(0)
    return np.uintp(arg.data.ptr) if isinstance(arg, cupy.ndarray) else arg


def _driver(device_id: int) -> Any:
    """Returns the driver's bindings, or None where kernels cannot overlap."""
    if int(cupy.cuda.Device(device_id).compute_capability) < _FIRST_EARLY_CAPABILITY:
        return None
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver
