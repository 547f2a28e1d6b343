"""The cupy backend: float16 on one NVIDIA GPU, with forwards as captured CUDA graphs.

Products are cuBLAS's. From compute capability 9.0 on, products of up to 32 rows are chained into
one persistent kernel (cupy_chain), whose weights are stored in a special order.

Everything is enqueued on one stream. A program is captured once and replayed; what differs between
launches (token ids) is in page-locked buffers that its kernels read, never in captured values.
Use it only from the thread that opened it.

Closing order: programs (their graphs) → the group's NCCL communicator → cuBLAS → memory; `close`
first destroys any graphs that its owner has left.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.engine.backend import cupy_rates, kernels
from mpissd.engine.backend.base import Backend, Cost, WeightPart
from mpissd.engine.backend.chain_plan import MAX_ROWS, aligned
from mpissd.engine.backend.cublas import WORKSPACE_BYTES, open_gemm
from mpissd.engine.backend.cupy_chain import ChainRunner, Inboxes, operand, why_not
from mpissd.engine.backend.cupy_device import (
    HALF,
    CupyProgram,
    Weight,
    check_devices,
    device_empty,
    device_info,
    fill,
    made,
    reached,
    step,
)
from mpissd.engine.backend.cupy_launch import Launcher
from mpissd.engine.backend.kernels import ceil_div

MAX_TOP_K = 64
_CHUNK_COLUMNS = 4096  # Columns of one chunk in top_k: 16 warps of 32 lanes with 8 columns each.
_FILL_COLUMNS = 4096  # The row length of a buffer that is only read.
_READ_BLOCKS_PER_SM, _READ_THREADS = 8, 256


class CupyBackend(Backend):
    """One GPU and one stream. Raises ConfigError with fewer than local_rank + 1 GPUs."""

    name = "cupy"
    itemsize = 2
    dtype_name = "float16"

    def __init__(self, local_rank: int, *, graph: bool = True, chain: bool = True) -> None:
        """With chain=False all products use cuBLAS."""
        check_devices(local_rank)
        self.device_id = local_rank
        cupy.cuda.Device(local_rank).use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._launcher = self.launcher(early=False)
        self._workspace = device_empty((WORKSPACE_BYTES,), np.uint8)
        self._gemm = open_gemm(self.stream.ptr, self._workspace.data.ptr)
        self._graph = self.chains = graph
        self._read_blocks = _READ_BLOCKS_PER_SM * self._launcher.multiprocessors
        self._sums = device_empty((self._read_blocks,), np.uint32)
        self._scratches: dict[int, Any] = {}
        self._programs: weakref.WeakSet[CupyProgram] = weakref.WeakSet()
        self.info = device_info(local_rank, runtime.getDeviceProperties(local_rank))
        self.stop = self.host_ints(1)  # Not 0 makes waiting kernels give up.
        self._chain: ChainRunner | None = None
        self._packs = False
        self.no_chain_reason = why_not(local_rank) if chain else "not wanted"
        if self.no_chain_reason is None:
            self._chain = ChainRunner(self._launcher, self.stop)
            self.few_rows = MAX_ROWS

    @property
    def capture(self) -> bool:
        return self._graph

    def plan_rows(self, max_rows: int | None) -> None:
        """Stores weights in the chain's order if no product has more rows than its registers
        hold."""
        self._packs = max_rows is not None and max_rows <= self.few_rows

    def kernel(self, weight: Weight) -> str:
        return "chain" if weight.packed else "cublas"

    def weight(self, parts: Sequence[WeightPart]) -> Weight:
        return made(parts, self._packs, self._launch)

    def activation(self, rows: int, width: int) -> Any:
        return self._filled((rows, width), HALF, np.nan)

    def view(self, array: Any, rows: int, start: int, stop: int) -> Any:
        return array[:rows, start:stop]

    def host_ints(self, count: int) -> NDArray[np.int32]:
        memory = cupy.cuda.alloc_pinned_memory(max(1, count) * 4)
        host = np.frombuffer(memory, np.int32, count)
        host[...] = 0
        return host

    def table(self, entries: int, width: int, key: int) -> Any:
        values = device_empty((entries, width), HALF)
        fill(self._launch, values, WeightPart(key, 0, entries, 0, width, 1.0))
        return values

    def gather(self, table: Any, tokens: Any, out: Any) -> None:
        """The kernel reads the ids from page-locked host memory, anew at every launch.

        On an H200 it takes 2.4-3.9 us (1-64 rows), and 4.3-5.3 if a copy to the device comes first.
        """
        entries, width = table.shape
        host = np.uintp(tokens.ctypes.data)
        sizes = (np.int32(entries), np.int32(width))
        args = (table, *sizes, host, out, np.int64(step(out)))
        self._launch("gather", (len(out),), (256,), args)

    def matmul(self, x: Any, weight: Weight, out: Any) -> None:
        (m, k), (w_in, n), w = x.shape, weight.shape, weight.values
        assert w_in == k and out.shape == (m, n), f"{x.shape} @ {weight.shape} -> {out.shape}"
        if self._chain is not None and weight.packed:
            if not aligned(operand(x), operand(out)):
                sizes = f"rows of {step(x)} and {step(out)} values"
                raise ConfigError(f"backend 'cupy': {sizes}: allowed: multiples of 8")
            self._chain.multiply(operand(x), w.data.ptr, operand(out))
            return
        self.flush()
        operands = [(a.data.ptr, step(a)) for a in (x, w, out)]
        self._gemm.multiply(m, n, k, *operands)

    def multiply_rows(self, x: Any, weight: Any, out: Any) -> None:
        """Sets out = x @ weightᵀ; weight [n, k] in row-major order, out float16 or float32."""
        (m, k), n, single = x.shape, len(weight), out.dtype == np.float32
        assert weight.shape[1] == k and out.shape == (m, n)
        self.flush()
        operands = [(a.data.ptr, step(a)) for a in (x, weight, out)]
        self._gemm.multiply_rows(m, n, k, *operands, single=single)

    def read(self, num_bytes: int) -> Callable[..., None]:
        buffer = self.random_words(num_bytes)
        return lambda count=num_bytes: self.read_words(buffer, count, 1)

    def top_k(self, values: Any, k: int, out_ids: Any, out_values: Any) -> None:
        rows, width = values.shape
        assert 1 <= k <= min(width, MAX_TOP_K), f"k={k} of {width}, at most {MAX_TOP_K}"
        assert out_ids.shape == (rows, k) == out_values.shape, f"{out_ids.shape} for {rows}x{k}"
        assert out_ids.flags.c_contiguous and out_values.flags.c_contiguous
        chunk = _CHUNK_COLUMNS * ceil_div(width, 32 * _CHUNK_COLUMNS)
        chunks, warps = ceil_div(width, chunk), min(16, ceil_div(width, 256))
        kind, words = ("_float32", 2) if values.dtype == np.float32 else ("", 1)
        merged = self._scratch(rows * chunks * k * words)
        sizes = (np.int64(step(values)), np.int32(width), np.int32(chunk), np.int32(k))
        args = (values, *sizes, merged, out_ids, out_values)
        self._launch(f"top_k{kind}", (chunks, rows), (32 * warps,), args, 4 * words * warps * k)
        if chunks > 1:
            cut = (np.int32(chunks), np.int32(chunk), np.int32(k))
            lists = (merged, *cut, out_ids, out_values)
            self._launch(f"top_k_merge{kind}", (rows,), (32,), lists, 4 * words * chunks * k)

    def top_buffers(self, rows: int, k: int) -> tuple[Any, Any]:
        shape = (rows, k)
        return self._filled(shape, np.int32, -1), self._filled(shape, np.float32, np.nan)

    def read_out(self, ids: Any, host: Any) -> None:
        """A kernel writes the ids to page-locked host memory before the program is done.

        A device-to-host copy as a graph's last node ends up to 60 us later (H200: 74 us from launch
        to done, 15 with the kernel).
        """
        assert ids.flags.c_contiguous and ids.size <= host.size, f"{ids.shape} to {host.size}"
        at = np.uintp(host.ctypes.data)
        args = (at, ids, np.int32(ids.size))
        self._launch("copy_ints", (ceil_div(ids.size, 256),), (256,), args)

    def program(
        self, body: Callable[[], None], cost: Cost, *, capturable: bool = True
    ) -> CupyProgram:
        capture = capturable and self.capture
        program = CupyProgram(self.stream, self._whole(body), capture, self.stop)
        self._programs.add(program)
        return program

    def synchronize(self) -> None:
        self.stream.synchronize()

    def to_host(self, array: Any) -> Any:
        if isinstance(array, Weight):
            host = array.row_major(cupy.asnumpy(array.values, stream=self.stream))
        else:
            host = cupy.asnumpy(array, stream=self.stream)
        return host.astype(np.float32) if host.dtype == HALF else host

    def from_host(self, values: Any, out: Any) -> None:
        target = out.values if isinstance(out, Weight) else out
        if isinstance(out, Weight):
            values = out.in_order(np.asarray(values))
        with self.stream:
            target[...] = cupy.asarray(np.ascontiguousarray(values, dtype=target.dtype))
        self.synchronize()

    def read_bandwidth(self, num_bytes: int) -> float | None:
        return cupy_rates.read_bandwidth(self, num_bytes)

    def peak_flops(self) -> float | None:
        return cupy_rates.peak_flops(self)

    def copy_out(self, array: Any, host: Any) -> None:
        """Starts a copy of a contiguous device array to page-locked `host` (same bytes)."""
        self._copy(host.ctypes.data, array.data.ptr, array, runtime.memcpyDeviceToHost)

    def copy_in(self, host: Any, array: Any) -> None:
        """Starts a copy of page-locked `host` to a contiguous device array (same bytes)."""
        self._copy(array.data.ptr, host.ctypes.data, array, runtime.memcpyHostToDevice)

    def launcher(self, *, early: bool) -> Launcher:
        """Returns a launcher of other kernels on this backend's stream (see Launcher)."""
        return Launcher(self.stream, self.device_id, early=early)

    def flush(self) -> None:
        """Launches the products that a program's body has recorded but not launched."""
        if self._chain is not None:
            self._chain.flush()

    def sum_last(self, out: Any, inboxes: Inboxes) -> bool:
        """Has the chain sum `out` over ranks; returns False unless its last product writes it."""
        return self._chain is not None and self._chain.sum_last(operand(out), inboxes)

    def limit_waits(self, seconds: float) -> None:
        """Sets how long kernels wait for one another, and for other ranks, before they give up."""
        if self._chain is not None:
            self._chain.limit_s = seconds

    def fence(self) -> Callable[[], bool]:
        """Returns a function that returns whether everything enqueued so far is over."""
        self.flush()
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return lambda: reached(event)

    def destroy_graphs(self) -> None:
        """Destroys the graphs of all programs; a later launch would run its body eagerly."""
        for program in list(self._programs):
            program.close()

    def close(self) -> None:
        self.destroy_graphs()
        self._gemm.close()
        if self._chain is not None:
            self._chain.close()
        self._workspace = self._sums = None
        self._scratches.clear()

    def _whole(self, body: Callable[[], None]) -> Callable[[], None]:
        """Returns the body with its products chained."""
        chain = self._chain
        if chain is None:
            return body

        def whole() -> None:
            with chain.held():
                body()

        return whole

    def _scratch(self, count: int) -> Any:
        """Returns scratch words, kept because a captured graph may hold their address."""
        if count not in self._scratches:
            self._scratches[count] = device_empty((count,), np.uint32)
        return self._scratches[count]

    def random_words(self, num_bytes: int) -> Any:
        """Returns a buffer of at least num_bytes of random data, so that no read is cheap."""
        return self.table(ceil_div(max(num_bytes, 16), 2 * _FILL_COLUMNS), _FILL_COLUMNS, 1)

    def read_words(self, buffer: Any, num_bytes: int, passes: int) -> None:
        args = (buffer, np.int64(ceil_div(num_bytes, 16)), np.int32(passes), self._sums)
        self._launch("read_words", (self._read_blocks,), (_READ_THREADS,), args)

    def _filled(self, shape: tuple[int, int], dtype: Any, value: float) -> Any:
        array = device_empty(shape, dtype)
        with self.stream:
            array.fill(value)
        return array

    def _copy(self, to: int, source: int, array: Any, kind: int) -> None:
        assert array.flags.c_contiguous, f"{array.shape} has gaps"
        self.flush()
        runtime.memcpyAsync(to, source, array.nbytes, kind, self.stream.ptr)

    def _launch(self, name: str, grid: Any, block: Any, args: Any, shared_mem: int = 0) -> None:
        self.flush()
        kernel = self._launcher.function(name, kernels.BACKEND)
        self._launcher.launch(kernel, grid, block, args, shared_mem)
