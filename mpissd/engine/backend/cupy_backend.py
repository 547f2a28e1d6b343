"""The cupy backend: float16 on one NVIDIA GPU, with forwards as captured CUDA graphs.

Products are computed by cuBLAS, called through nvmath-python, because CuPy refuses cuBLAS while its
stream is captured (cupy#6290). From compute capability 9.0 on, consecutive products of up to 32
rows run as one persistent kernel (ChainRunner), for which weights are stored in a special order.

Everything is enqueued on one stream. A program is captured once and replayed. Data that differ
between launches (token ids) are in page-locked buffers that the kernels read, never in captured
values. Only the thread that opened a backend may use it.

Closing order: programs (their graphs) → the group's NCCL communicator → cuBLAS → memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.engine.backend import chain_plan, kernels
from mpissd.engine.backend.base import Backend, Cost, WeightPart
from mpissd.engine.backend.chain_plan import Multiplication, Operand
from mpissd.engine.backend.cupy_device import (
    HALF,
    CupyProgram,
    Launcher,
    bind,
    device_empty,
    device_info,
    reached,
    step,
)
from mpissd.engine.backend.kernels import ceil_div

if TYPE_CHECKING:
    from mpissd.engine.comm.mpi_group import OneshotGroup

MAX_TOP_K = 64
_CHUNK_COLUMNS = 4096  # columns of one chunk in top_k: 16 warps of 32 threads, 8 columns each
_FILL_COLUMNS = 4096  # row length of a buffer of random data that is only read
_WORKSPACE_BYTES = 64 << 20
_HALF = 2  # CUDA_R_16F
_SINGLE = 0  # CUDA_R_32F
_COMPUTE_FLOAT = 68  # CUBLAS_COMPUTE_32F
_DEFAULT_ALGORITHM = -1  # CUBLAS_GEMM_DEFAULT
# In this mode, cuBLAS never adds the parts of a split product in float16, as it may by default.
# Sums in float32 cost at most 1% (H200, 1B model, 24 rows: 0.733 ms a forward, not 0.726).
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
_MAX_SHARED_BYTES = 97  # CUDA's number for cudaDevAttrMaxSharedMemoryPerBlockOptin


@dataclass(frozen=True)
class Weight:
    """A weight [in, out] on the device: row-major, or `packed` into the order that chain.cu reads
    (in an array of the same shape)."""

    values: Any
    packed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The sizes (in, out), whether packed or not."""
        rows, columns = self.values.shape
        return rows, columns


def why_not(device_id: int) -> str | None:
    """Returns the reason why this GPU cannot run the chain kernel (chain.cu); None if it can."""
    capability = cupy.cuda.Device(device_id).compute_capability  # For example "90".
    if int(capability) < 90:
        return f"compute capability {capability[:-1]}.{capability[-1]}"
    room = runtime.deviceGetAttribute(_MAX_SHARED_BYTES, device_id)
    wanted = max(geometry.shared_bytes for geometry in chain_plan.GEOMETRIES.values())
    return f"{room} bytes of shared memory a block" if room < wanted else None


class ChainRunner:
    """Runs consecutive products as one persistent kernel (kernels/chain.cu) on one stream.

    While a program's body runs, products are only recorded; the next operation of another kind, or
    the end of the body, launches all recorded ones at once. Outside a body each product is launched
    by itself. stop: a page-locked int32. While it is not 0, no kernel waits for others; a kernel
    sets it after waiting `limit_s` seconds.
    """

    def __init__(self, launcher: Launcher, stop: NDArray[np.int32]) -> None:
        self.limit_s = 60.0
        self._launcher = launcher
        self._stop = stop
        self._noted: list[Multiplication] = []
        self._inboxes: OneshotGroup | None = None
        self._held = False
        # For each chain: its table, its counters, and how many products, rank sums and row tiles.
        self._chains: dict[tuple[Multiplication, ...], tuple[Any, Any, int, int, int]] = {}

    def multiply(self, x: Operand, weight: int, out: Operand) -> None:
        """Records the product out = x @ the packed weight at device address `weight`."""
        self._noted.append(Multiplication(weight, x, out))
        if not self._held:
            self.flush()

    def sum_last(self, out: Operand, inboxes: OneshotGroup) -> bool:
        """Makes the kernel also sum `out`, the last recorded product's output, over the ranks.
        Returns whether that is done; not if `out` is another array, or exceeds the inboxes (buffers
        into which other ranks write)."""
        if not self._noted or self._noted[-1].out != out or self._noted[-1].summed:
            return False
        if min(out.rows, chain_plan.MAX_ROWS) * out.width > 2 * inboxes.capacity:
            return False
        self._noted[-1] = self._noted[-1]._replace(summed=True)
        self._inboxes = inboxes
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Records products until the block ends, and then launches them; drops them on an error."""
        self._held = True
        try:
            yield
            self.flush()
        finally:
            self._held = False
            self._noted.clear()

    def flush(self) -> None:
        """Launches the recorded products as one kernel."""
        if not self._noted:
            return
        key = tuple(self._noted)
        self._noted.clear()
        if key not in self._chains:
            planned = chain_plan.plan(key)
            self._chains[key] = (
                self._launcher.uploaded(planned.view(np.uint8), np.uint8),
                self._launcher.zeros((len(planned) + 1,), np.uint32),
                len(planned),
                int((planned["exchange"] > 0).sum()),
                chain_plan.row_tiles(planned),
            )
        table, finished, count, exchanges, row_tiles = self._chains[key]
        geometry = chain_plan.GEOMETRIES[row_tiles]
        inboxes = self._inboxes if exchanges else None
        assert inboxes is not None or not exchanges, "sums over ranks without inboxes"
        everybody = np.uintp(inboxes.everybody if inboxes else 0)
        done_counts = np.int32(inboxes.done_counts if inboxes else 0)
        sums = (everybody, np.int32(exchanges), done_counts)
        limit = (np.uintp(self._stop.ctypes.data), np.uint64(int(self.limit_s * 1e9)))
        args = (table, np.int32(count), finished, *sums, *limit)
        grid = (self._launcher.multiprocessors,)
        how = (geometry.shared_bytes, geometry.macros)
        self._launcher.launch("chain", kernels.CHAIN, grid, (chain_plan.THREADS,), args, *how)

    def close(self) -> None:
        """Frees the tables of products; graphs that read them must be destroyed before."""
        self._chains.clear()


def operand(array: Any) -> Operand:
    """Returns the address and the sizes of a two-dimensional device array as an Operand."""
    return Operand(int(array.data.ptr), int(array.shape[0]), int(array.shape[1]), step(array))


class CupyBackend(Backend):
    """The backend of the GPU that `bind` chooses, with one stream."""

    name = "cupy"
    itemsize = 2
    dtype_name = "float16"

    def __init__(self, local_rank: int, *, graph: bool = True) -> None:
        """Opens the GPU of the rank with this number on its host; raises ConfigError if there is
        none. graph: whether to capture programs as CUDA graphs."""
        binding = bind(local_rank)
        self.device_id = binding.device
        self.use_here()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._launcher = self.launcher(early=False)
        self._open_cublas()
        self.capture = self.chains = graph
        self._read_blocks = 8 * self._launcher.multiprocessors
        self._sums = device_empty((self._read_blocks,), np.uint32)
        self._scratches: dict[int, Any] = {}
        self._programs: weakref.WeakSet[CupyProgram] = weakref.WeakSet()
        self.info = device_info(binding)
        self.stop = self.host_ints(1)  # Any value but 0 makes kernels stop waiting for other ranks.
        self._chain: ChainRunner | None = None
        self._packs = False
        self.no_chain_reason = why_not(self.device_id)
        if self.no_chain_reason is None:
            self._chain = ChainRunner(self._launcher, self.stop)
            self.few_rows = chain_plan.MAX_ROWS

    def use_here(self) -> None:
        cupy.cuda.Device(self.device_id).use()

    def _open_cublas(self) -> None:
        """Creates a cuBLAS handle; raises ConfigError if nvmath-python or cuBLAS is not there."""
        try:
            from nvmath.bindings import cublas

            self._cublas = cublas
            self._handle = cublas.create()
        except (ImportError, RuntimeError) as error:  # RuntimeError: cuBLAS cannot be loaded
            raise ConfigError(
                f"backend 'cupy': nvmath-python: {error}; pip install '.[cuda12]' (or cuda13)"
            ) from error
        self._one = np.array(1, np.float32)
        self._zero = np.array(0, np.float32)
        self._workspace = device_empty((_WORKSPACE_BYTES,), np.uint8)
        cublas.set_stream(self._handle, self.stream.ptr)
        # set_stream resets the workspace, without which captured products would allocate.
        cublas.set_workspace(self._handle, self._workspace.data.ptr, _WORKSPACE_BYTES)
        cublas.set_math_mode(self._handle, _DISALLOW_REDUCED_PRECISION_REDUCTION)

    def plan_rows(self, max_rows: int | None) -> None:
        """Decides how weights made from now on are stored: for the kernel chain.cu if it can
        multiply `max_rows` rows, else for cuBLAS."""
        self._packs = max_rows is not None and max_rows <= self.few_rows

    def kernel(self, weight: Weight) -> str:
        return "chain" if weight.packed else "cublas"

    def weight(self, parts: Sequence[WeightPart]) -> Weight:
        rows = parts[0].in_stop - parts[0].in_start
        widths = [part.out_stop - part.out_start for part in parts]
        values = device_empty((rows, sum(widths)), HALF)
        fits = [chain_plan.suits(rows, width) for width in widths]
        packed = self._packs and all(fits)
        column = 0
        for part, width in zip(parts, widths, strict=True):
            if packed:
                self._fill_packed(values.data.ptr + values.itemsize * rows * column, part)
            else:
                self._fill(values[:, column : column + width], part)
            column += width
        return Weight(values, packed)

    def _fill(self, out: Any, part: WeightPart) -> None:
        rows, columns = out.shape
        grid = (ceil_div(columns, 8 * 32), min(ceil_div(rows, 8), 65535))
        key, first, scale = _numbers(part)
        args = (out, np.int64(step(out)), key, *first, np.int32(rows), np.int32(columns), scale)
        self._launch("fill", grid, (32, 8), args)

    def _fill_packed(self, address: int, part: WeightPart) -> None:
        rows = part.in_stop - part.in_start
        columns = part.out_stop - part.out_start
        units = rows * columns // 8  # the number of 16-byte units in the part
        key, (row, column), scale = _numbers(part)
        half = chain_plan.TILE // 2
        halves = key, column, key, np.uint32(column + half)
        widths = np.int32(columns), np.int32(columns - half), np.int32(2 * half)
        sizes = np.int64(units), np.int32(rows // chain_plan.PAIR), np.int32(rows)
        args = (np.uintp(address), *sizes, row, *halves, *widths, scale)
        self._launch("pack_random", (min(ceil_div(units, 256), 1 << 16),), (256,), args)

    def activation(self, rows: int, width: int) -> Any:
        return self._filled((rows, width), HALF, np.nan)

    def host_ints(self, count: int) -> NDArray[np.int32]:
        memory = cupy.cuda.alloc_pinned_memory(max(1, count) * 4)
        host = np.frombuffer(memory, np.int32, count)
        host[...] = 0
        return host

    def table(self, entries: int, width: int, key: int) -> Any:
        values = device_empty((entries, width), HALF)
        self._fill(values, WeightPart(key, 0, entries, 0, width, 1.0))
        return values

    def gather(self, table: Any, tokens: Any, out: Any) -> None:
        """Reads the ids from page-locked host memory at every launch, which on an H200 is faster
        than copying them to the device before (2.4-3.9 us instead of 4.3-5.3 for 1-64 rows)."""
        entries, width = table.shape
        sizes = (np.int32(entries), np.int32(width))
        args = (table, *sizes, np.uintp(tokens.ctypes.data), out, np.int64(step(out)))
        self._launch("gather", (len(out),), (256,), args)

    def matmul(self, x: Any, weight: Weight, out: Any) -> None:
        sizes = f"{x.shape} @ {weight.shape} -> {out.shape}"
        assert (x.shape[0], *weight.shape) == (out.shape[0], x.shape[1], out.shape[1]), sizes
        if self._chain is not None and weight.packed:
            if not chain_plan.aligned(operand(x), operand(out)):
                sizes = f"rows of {step(x)} and {step(out)} values"
                raise ConfigError(f"backend 'cupy': {sizes}: allowed: multiples of 8")
            self._chain.multiply(operand(x), weight.values.data.ptr, operand(out))
            return
        self.flush()
        m, k = x.shape
        kind = _SINGLE if out.dtype == np.float32 else _HALF
        # cuBLAS is column-major, so that it is called for outᵀ = weightᵀ xᵀ, with swapped operands.
        self._cublas.gemm_ex(
            self._handle, 0, 0, out.shape[1], m, k, self._one.ctypes.data,
            weight.values.data.ptr, _HALF, step(weight.values), x.data.ptr, _HALF, step(x),
            self._zero.ctypes.data, out.data.ptr, kind, step(out), _COMPUTE_FLOAT,
            _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def read(self, num_bytes: int) -> Callable[..., None]:
        buffer = self.random_words(num_bytes)
        return lambda count=num_bytes: self.read_words(buffer, count, 1)

    def top_k(self, values: Any, k: int, out_ids: Any, out_values: Any) -> None:
        rows, width = values.shape
        assert 1 <= k <= min(width, MAX_TOP_K), f"k={k} of {width}, at most {MAX_TOP_K}"
        assert out_ids.shape == (rows, k) == out_values.shape, f"{out_ids.shape} for {rows}x{k}"
        assert out_ids.flags.c_contiguous and out_values.flags.c_contiguous
        chunk = _CHUNK_COLUMNS * ceil_div(width, 32 * _CHUNK_COLUMNS)
        chunks = ceil_div(width, chunk)
        warps = min(16, ceil_div(width, 256))
        kind, words = ("_float32", 2) if values.dtype == np.float32 else ("", 1)
        count = rows * chunks * k * words
        if count not in self._scratches:  # Buffers are kept, because graphs hold their addresses.
            self._scratches[count] = device_empty((count,), np.uint32)
        merged = self._scratches[count]
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
        """Enqueues a kernel that writes the ids to page-locked host memory. A copy as the last node
        of a graph would end up to 60 us later (H200: 74 us from launch to done instead of 15)."""
        assert ids.flags.c_contiguous and ids.size <= host.size, f"{ids.shape} to {host.size}"
        args = (np.uintp(host.ctypes.data), ids, np.int32(ids.size))
        self._launch("copy_ints", (ceil_div(ids.size, 256),), (256,), args)

    def program(
        self, body: Callable[[], None], cost: Cost, *, capturable: bool = True
    ) -> CupyProgram:
        def recorded() -> None:
            assert self._chain is not None
            with self._chain.held():
                body()

        run = body if self._chain is None else recorded
        program = CupyProgram(self.stream, run, capturable and self.capture, self.stop)
        self._programs.add(program)
        return program

    def synchronize(self) -> None:
        self.stream.synchronize()

    def to_host(self, array: Any) -> Any:
        if isinstance(array, Weight):
            host = cupy.asnumpy(array.values, stream=self.stream)
            host = chain_plan.unpack(host) if array.packed else host
        else:
            host = cupy.asnumpy(array, stream=self.stream)
        return host.astype(np.float32) if host.dtype == HALF else host

    def from_host(self, values: Any, out: Any) -> None:
        target = out.values if isinstance(out, Weight) else out
        if isinstance(out, Weight) and out.packed:
            values = chain_plan.pack(np.asarray(values))
        with self.stream:
            target[...] = cupy.asarray(np.ascontiguousarray(values, dtype=target.dtype))
        self.stream.synchronize()

    def read_bandwidth(self, num_bytes: int) -> float | None:
        """Returns the median of seven samples, each of at least 4 GiB, after a warm-up of 50 ms:
        after memory was allocated or freed, an H200 read at 3.9 TB/s for some milliseconds, and
        then at 4.5. The buffer has num_bytes, but at most 4 GB or half of the free memory."""
        room = min(4 * 10**9, runtime.memGetInfo()[0] // 2)
        size = max(16, min(num_bytes, room) // 16 * 16)
        passes = ceil_div(4 << 30, size)
        buffer = self.random_words(size)
        body = partial(self.read_words, buffer, size, passes)
        program = CupyProgram(self.stream, body, capture=True)
        warm_s = 0.0
        while warm_s < 0.05:
            warm_s += self._timed_s(program)
        return float(size * passes / np.median([self._timed_s(program) for _ in range(7)]))

    def peak_flops(self) -> float | None:
        """Returns the operations a second of the fastest of several square matrix products, which
        last 30 ms in all, because a hot chip slows down. The side is 8192 if memory allows; None if
        even 1024 does not fit."""
        room = runtime.memGetInfo()[0] // 2  # the bytes for x, the weight and the output
        sides = (n for n in (8192, 4096, 2048, 1024) if 3 * n * n * HALF.itemsize <= room)
        if (side := next(sides, None)) is None:
            return None
        x = self.table(side, side, 1)
        weight = Weight(self.table(side, side, 2))
        body = partial(self.matmul, x, weight, device_empty((side, side), HALF))
        program = CupyProgram(self.stream, body, capture=self.capture)
        seconds = [self._timed_s(program)]
        while sum(seconds) < 0.03 or len(seconds) < 3:
            seconds.append(self._timed_s(program))
        return float(2 * side**3 / min(seconds))

    def _timed_s(self, program: CupyProgram) -> float:
        program.launch()
        self.stream.synchronize()
        return program.elapsed_s()

    def copy_out(self, array: Any, host: Any) -> None:
        """Starts to copy a contiguous device array to page-locked `host`, of as many bytes."""
        self._copy(host.ctypes.data, array.data.ptr, array, runtime.memcpyDeviceToHost)

    def copy_in(self, host: Any, array: Any) -> None:
        """Starts to copy page-locked `host` to a contiguous device array of as many bytes."""
        self._copy(array.data.ptr, host.ctypes.data, array, runtime.memcpyHostToDevice)

    def launcher(self, *, early: bool) -> Launcher:
        """Returns a Launcher. early: whether a kernel may start before the previous one ends."""
        return Launcher(self.stream, self.device_id, early=early)

    def flush(self) -> None:
        """Launches products that ChainRunner has recorded from a program's body so far."""
        if self._chain is not None:
            self._chain.flush()

    def sum_last(self, out: Any, inboxes: OneshotGroup) -> bool:
        """Makes the product that computed `out` also sum it over the ranks, and returns True;
        returns False if `out` is not the output of the last recorded product, or is too large."""
        return self._chain is not None and self._chain.sum_last(operand(out), inboxes)

    def limit_waits(self, seconds: float) -> None:
        """Sets how long kernels wait at most, in seconds, for each other and for other ranks."""
        if self._chain is not None:
            self._chain.limit_s = seconds

    def fence(self) -> Callable[[], bool]:
        """Returns a function that returns whether all work enqueued before `fence` has finished."""
        self.flush()
        event = cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return lambda: reached(event)

    def destroy_graphs(self) -> None:
        """Destroys all programs' CUDA graphs; later launches call the programs' Python bodies."""
        for program in list(self._programs):
            program.close()

    def close(self) -> None:
        self.destroy_graphs()
        if self._handle:  # cuBLAS is destroyed after the graphs that captured it.
            self._cublas.destroy(self._handle)
            self._handle = 0
        if self._chain is not None:
            self._chain.close()
        self._workspace = self._sums = None
        self._scratches.clear()

    def random_words(self, num_bytes: int) -> Any:
        """Returns num_bytes or more of random data, which memory compression cannot shrink."""
        return self.table(ceil_div(max(num_bytes, 16), 2 * _FILL_COLUMNS), _FILL_COLUMNS, 1)

    def read_words(self, buffer: Any, num_bytes: int, passes: int) -> None:
        args = (buffer, np.int64(ceil_div(num_bytes, 16)), np.int32(passes), self._sums)
        self._launch("read_words", (self._read_blocks,), (256,), args)

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
        self._launcher.launch(name, kernels.BACKEND, grid, block, args, shared_mem)


def _numbers(part: WeightPart) -> tuple[Any, tuple[Any, Any], Any]:
    """Returns a part's key, its (first row, first column) and its scale, typed for kernels."""
    first = (np.uint32(part.in_start), np.uint32(part.out_start))
    return np.uint32(part.key & 0xFFFFFFFF), first, np.float32(part.scale)
