"""One GPU through CuPy: its identity and memory, kernel launches, and captured programs."""

import ctypes
import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from uuid import UUID

import cupy
import numpy as np
from cupy.cuda import runtime

from mpissd.common.errors import ConfigError, FaultError
from mpissd.engine.backend import kernels
from mpissd.engine.backend.base import Binding, DeviceInfo, Program

HALF = np.dtype(np.float16)
_NOT_READY = 600  # the error code cudaErrorNotReady


def bind(local_rank: int) -> Binding:
    """Returns the GPU of the rank with this number on its host, local_rank modulo the visible GPUs,
    and allocates nothing there. Raises ConfigError if no GPU is visible."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        visible = int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        why = str(error) if mask is None else f"{error}; CUDA_VISIBLE_DEVICES={mask}"
        raise ConfigError(f"backend 'cupy': no usable GPU ({why}); allowed: numpy") from error
    device = local_rank % visible
    # CuPy reads the UUID as a C string, which a zero byte ends too early.
    octets = bytes(runtime.getDeviceProperties(device).get("uuid", b""))[:16]
    uuid = f"GPU-{UUID(bytes=octets)}" if len(octets) == 16 else None
    if mask is not None and mask.startswith("MIG-"):  # CUDA shows one MIG instance, the first
        uuid = mask.partition(",")[0]
    return Binding(device, visible, runtime.deviceGetPCIBusId(device), uuid, mask)


def device_info(binding: Binding) -> DeviceInfo:
    """Returns what CUDA reports about a GPU; memory_bytes: the memory that is free now."""
    properties = runtime.getDeviceProperties(binding.device)
    return DeviceInfo(
        name=properties["name"].decode(),
        kind="gpu",
        uuid=binding.uuid,
        bus_id=binding.bus_id,
        memory_bytes=int(runtime.memGetInfo()[0]),
        cache_bytes=int(properties["l2CacheSize"]),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        binding=binding,
    )


def device_empty(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an uninitialised array of its own allocation. Raises ConfigError without memory."""
    # CuPy's memory pool is avoided: it rounds sizes up and keeps freed blocks.
    size = max(1, math.prod(shape) * np.dtype(dtype).itemsize)
    try:
        memory = cupy.cuda.Memory(size)
    except runtime.CUDARuntimeError as error:
        free = runtime.memGetInfo()[0]
        raise ConfigError(f"GPU memory: {size} bytes wanted, {free} free ({error})") from error
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def step(array: Any) -> int:
    """Returns a matrix's leading dimension, the number of elements from one row to the next."""
    return max(int(array.strides[0]) // int(array.itemsize), int(array.shape[1]))


def reached(event: Any) -> bool:
    """Returns whether the stream has reached an event; raises FaultError if the device failed."""
    status = runtime.eventQuery(event.ptr)
    if status not in (0, _NOT_READY):
        raise FaultError(f"GPU: {runtime.CUDARuntimeError(status)}")
    return bool(status == 0)


class Launcher:
    """Compiles CUDA kernels at their first use, and launches them on one stream.

    early: whether the blocks of a kernel may start while the kernel before it still runs
    (programmatic dependent launch). Such a kernel must call wait_for_last (ampere.cu) before it
    reads what earlier kernels wrote. Below compute capability 9.0, or without cuda-bindings, no
    kernel starts early.
    """

    def __init__(self, stream: Any, device_id: int, *, early: bool) -> None:
        self._stream = stream
        self._modules: dict[tuple[str, ...], Any] = {}
        self._functions: dict[tuple[Any, ...], Any] = {}
        self._clusters: dict[tuple[Any, ...], int] = {}  # by kernel
        device = cupy.cuda.Device(device_id)
        self._driver: Any = None
        if early and int(device.compute_capability) >= 90:
            with suppress(ImportError):
                from cuda.bindings import driver

                self._driver = driver
        attributes = device.attributes
        self.shared_bytes = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.multiprocessors = int(attributes["MultiProcessorCount"])

    def _function(
        self, name: str, files: tuple[str, ...], macros: tuple[tuple[str, int], ...], shared: int
    ) -> Any:
        key = name, files, macros
        if key not in self._functions:
            options = ("--std=c++17", *(f"-D{macro}={value}" for macro, value in macros))
            module = self._modules.get(files + options)
            if module is None:
                module = cupy.RawModule(code=kernels.source(files), options=options)
                self._modules[files + options] = module
            function = module.get_function(name)
            if shared > 48 << 10:
                function.max_dynamic_shared_size_bytes = shared
            self._functions[key] = function
        return self._functions[key]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Returns an uninitialised device array; raises ConfigError if it does not fit."""
        return device_empty(shape, dtype)

    def uploaded(self, values: Any, dtype: Any) -> Any:
        """Returns a new device array with these host values."""
        array = self.empty(np.shape(values), dtype)
        self.upload(values, array)
        return array

    def upload(self, values: Any, array: Any) -> None:
        """Copies host values to a contiguous device array, and waits for the copy."""
        array.set(np.ascontiguousarray(values, array.dtype), stream=self._stream)
        self._stream.synchronize()

    def copy(self, source: Any, to: Any) -> None:
        """Copies a device array, or a scalar, to the device array `to`, and waits for the copy."""
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
        name: str,
        files: tuple[str, ...],
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_mem: int = 0,
        macros: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Launches the kernel `name`, compiled from the sources `files` with these macros. args:
        device arrays, NumPy scalars, or None for a null pointer. shared_mem: bytes of dynamic
        shared memory; above 48 KiB, a kernel's first launch sets the limit for its later ones."""
        function = self._function(name, files, macros, shared_mem)
        values = [_value(arg) for arg in args]
        driver = self._driver
        if driver is None:
            with self._stream:
                function(grid, block, tuple(values), shared_mem=shared_mem)
            return
        held = [np.array(value) for value in values]
        pointers = (ctypes.c_void_p * len(held))(*(value.ctypes.data for value in held))
        early = driver.CUlaunchAttribute()
        value = driver.CUlaunchAttributeValue()
        kinds = driver.CUlaunchAttributeID
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        value.programmaticStreamSerializationAllowed = 1
        early.value = value
        config = self._config(grid, block, shared_mem, [early])
        address = ctypes.addressof(pointers)
        (error,) = driver.cuLaunchKernelEx(config, function.kernel.ptr, address, 0)
        if int(error):
            raise RuntimeError(f"cuLaunchKernelEx: {error}")

    def num_clusters(
        self, name: str, files: tuple[str, ...], size: int, threads: int, shared: int, macros: Any
    ) -> int:
        """Returns how many clusters of `size` blocks of this kernel the GPU runs at once, 0 for a
        GPU without clusters, without cuda-bindings, or with a CUDA that cannot compile it."""
        driver = self._driver
        if driver is None or shared > self.shared_bytes:
            return 0
        key = name, files, macros
        if key not in self._clusters:
            cluster = driver.CUlaunchAttribute()
            value = driver.CUlaunchAttributeValue()
            cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value.clusterDim.x = size
            value.clusterDim.y = 1
            value.clusterDim.z = 1
            cluster.value = value
            self._clusters[key] = 0
            with suppress(cupy.cuda.compiler.CompileException):
                function = self._function(name, files, macros, shared)
                config = self._config((size,), (threads,), shared, [cluster])
                error, count = driver.cuOccupancyMaxActiveClusters(function.kernel.ptr, config)
                self._clusters[key] = 0 if int(error) else int(count)
        return self._clusters[key]

    def _config(
        self, grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int, attributes: list[Any]
    ) -> Any:
        config = self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = (*block, 1, 1)[:3]
        config.sharedMemBytes = shared_mem
        config.hStream = self._stream.ptr
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return config


def _value(arg: Any) -> Any:
    """Returns a kernel argument as a NumPy scalar: the address of an array, 0 for None."""
    if arg is None:
        return np.uintp(0)
    return np.uintp(arg.data.ptr) if isinstance(arg, cupy.ndarray) else arg


class CupyProgram(Program):
    """A forward on a GPU: a captured CUDA graph, or else a Python function (the body) that each
    launch calls. Keeps the body's buffers alive."""

    def __init__(
        self, stream: Any, body: Callable[[], None], capture: bool, stop: Any = (0,)
    ) -> None:
        """Runs `body` once. capture: whether to capture it as a CUDA graph, too. stop: an array
        whose first element kernels set after too long a wait; `done` then raises FaultError."""
        self._stream = stream
        self._body = body
        self._stop = stop
        self._start = cupy.cuda.Event()
        self._end = cupy.cuda.Event()
        # The first run loads kernels, connects to peers and allocates, which a capture must not do.
        body()
        stream.synchronize()
        self._graph = None
        if capture:
            with stream:
                stream.begin_capture()
                try:
                    body()
                finally:  # A capture that is not ended would leave the stream unusable.
                    self._graph = stream.end_capture()
            self._graph.upload(stream)

    def launch(self) -> None:
        self._start.record(self._stream)
        if self._graph is None:
            self._body()
        else:
            self._graph.launch(self._stream)
        self._end.record(self._stream)

    def done(self) -> bool:
        if not reached(self._end):
            return False
        if self._stop[0]:
            raise FaultError(
                "GPU: a forward waited in vain for another rank, or for its own blocks"
            )
        return True

    def elapsed_s(self) -> float:
        return float(cupy.cuda.get_elapsed_time(self._start, self._end)) / 1e3

    def after_s(self, earlier: Program) -> float:
        assert isinstance(earlier, CupyProgram)
        return float(cupy.cuda.get_elapsed_time(earlier._end, self._start)) / 1e3

    def close(self) -> None:
        """Destroys the CUDA graph; launches after that call the body."""
        self._graph = None
