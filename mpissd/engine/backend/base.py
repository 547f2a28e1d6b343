"""The interface of a backend: arrays, matrix products, and programs (asynchronous forwards).

A program is made from a Python function, its body, which calls the operations of a forward. NumPy
calls the body at each launch; CuPy replays a CUDA graph captured from it; the emulated backend
waits for the modelled duration and never calls it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.wait import Waiter

Array = Any  # A numpy.ndarray, a cupy.ndarray, or the emulated backend's placeholder.
HostArray = Any  # A numpy.ndarray; page-locked on a GPU.
# Constants of a hash: multipliers of row and column, then those of MurmurHash3's fmix32.
ROW_PRIME = 0x9E3779B1
COLUMN_PRIME = 0x85EBCA77
MIX_1 = 0x85EBCA6B
MIX_2 = 0xC2B2AE35
_SQRT_12 = np.float32(12.0**0.5)  # A uniform variable on [-½, ½) has standard deviation 1/√12.
_CACHED = 1 << 17  # random elements made at once, which fit in a core's cache


def element(key: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns elements of the random matrix number `key`, float32 [len(rows), len(columns)]:
    uniform with mean 0 and variance 1. Each depends only on key, row and column, by a hash."""
    r = rows.astype(np.uint32) * np.uint32(ROW_PRIME) ^ np.uint32(key & 0xFFFFFFFF)
    c = columns.astype(np.uint32) * np.uint32(COLUMN_PRIME)
    values = np.empty((len(r), len(c)), np.float32)
    step = max(1, _CACHED // max(1, len(c)))
    for start in range(0, len(r), step):
        h = r[start : start + step, None] ^ c
        out = values[start : start + step]
        for shift, factor in ((16, MIX_1), (13, MIX_2)):
            h ^= h >> np.uint32(shift)
            h *= np.uint32(factor)
        h ^= h >> np.uint32(16)
        # float32 represents 24 bits exactly, so that host and device agree to the last bit.
        np.multiply(h >> np.uint32(8), np.float32(2.0**-24), out=out, casting="unsafe")
        out -= np.float32(0.5)
        out *= _SQRT_12
    return values


@dataclass(frozen=True)
class Binding:
    """The GPU that a rank takes: `device` is its number among the `visible` ones of the process,
    mask the value of CUDA_VISIBLE_DEVICES (None: not set). uuid: unique to a GPU or MIG instance,
    None if unknown."""

    device: int
    visible: int
    bus_id: str
    uuid: str | None
    mask: str | None

    def gpu(self, host: str) -> str:
        """Returns the name of this GPU of `host`, by which ranks find that they share it."""
        return self.uuid or f"GPU {self.bus_id} of {host}"

    def __str__(self) -> str:
        mask = "" if self.mask is None else f", CUDA_VISIBLE_DEVICES={self.mask}"
        return f"device {self.device} of {self.visible}{mask}"


@dataclass(frozen=True)
class DeviceInfo:
    """What is known about the device of one rank; unknown fields are None."""

    name: str
    kind: str  # "cpu", "gpu" or "emulated"
    uuid: str | None = None
    bus_id: str | None = None
    memory_bytes: int | None = None  # the free memory at start-up
    cache_bytes: int | None = None  # the size of the last-level cache
    compute_capability: str | None = None
    binding: Binding | None = None  # of a GPU


@dataclass(frozen=True)
class WeightPart:
    """A slice of the random matrix number `key`, [in_features, out_features]. Element (i, o)
    depends only on (key, i, o), so that T ranks with different slices together hold exactly the
    values of the whole matrix (see `element`). A fused weight is a list of parts side by side."""

    key: int
    in_start: int
    in_stop: int
    out_start: int
    out_stop: int
    scale: float  # the standard deviation of the elements

    def values(self) -> NDArray[np.float32]:
        """Returns the elements of the slice, float32 [in, out]."""
        rows = np.arange(self.in_start, self.in_stop, dtype=np.int64)
        columns = np.arange(self.out_start, self.out_stop, dtype=np.int64)
        return np.asarray(element(self.key, rows, columns) * np.float32(self.scale), np.float32)


@dataclass(frozen=True)
class ForwardKey:
    """Identifies a kind of forward in tables of measured times. Forwards with equal keys differ
    only in the number of rows."""

    model: str  # the model's name, with the number of layers if changed, as in 70b@8L
    tp: int
    fuse: bool
    lm_head: bool
    kv_tokens: int  # the cached tokens that a forward reads, summed over all sequences
    sequences: int = 0  # the number of sequences; 0 if the model is bare matrix products

    @property
    def context(self) -> int:
        """The context of each sequence of a transformer's forward, in tokens."""
        return self.kv_tokens // self.sequences

    @property
    def forward(self) -> str:
        """The kind of forward, "transformer" or "gemm" (bare products), as a value of --forward."""
        return "transformer" if self.sequences else "gemm"

    def __str__(self) -> str:
        if self.sequences:
            return f"transformer {self.model} T={self.tp} context={self.context} b={self.sequences}"
        parts = [self.model, f"T={self.tp}"]
        parts += [name for name in ("fuse", "lm_head") if getattr(self, name)]
        return " ".join(parts + [f"kv_tokens={self.kv_tokens}"] * (self.kv_tokens > 0))


@dataclass(frozen=True)
class Cost:
    """What one forward costs a rank: the bytes that it moves and the operations that it does."""

    rows: int
    weight_bytes: int
    kv_bytes: int
    flops: int
    num_products: int
    num_all_reduces: int
    all_reduce_bytes: int  # the bytes of each all-reduce
    tp: int
    key: ForwardKey | None = None  # the key in measured tables; None for a single matrix product
    most_rows: int | None = None  # rows of the job's largest forward (None: rows); selects kernels
    params: int = 0  # the number of weights that are read; 0 for a single matrix product
    candidates: int = 1  # k of the top-k token ids that are returned for each row
    columns: int = 0  # the number of logits a row on this rank, which top-k reads; 0: no LM head


class Program(ABC):
    """A compiled forward. Launches on one backend run one after the other, as on a CUDA stream."""

    @abstractmethod
    def launch(self) -> None:
        """Starts the forward; may return before the forward is over."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether the last launch has finished, without blocking."""

    def wait(self, waiter: Waiter) -> None:
        """Waits until the last launch has finished; raises FaultError at the waiter's deadline."""
        waiter.until(self.done, "forward")

    @abstractmethod
    def elapsed_s(self) -> float:
        """Returns the seconds that the last launch took on the device; it must have finished."""

    def after_s(self, earlier: Program) -> float:
        """Returns the seconds from the end of the last launch of `earlier` to the start of this
        program's last launch."""
        raise NotImplementedError(f"{type(self).__name__} keeps no clock")

    def close(self) -> None:  # noqa: B027  (most programs hold nothing)
        """Frees the CUDA graph: one that outlives the communicator of its all-reduces hangs."""


class Backend(ABC):
    """The interface of all backends. A program (a compiled forward) is made from a Python function
    that calls the array operations, which enqueue work. Methods that are not abstract do nothing
    here, as an emulated device needs."""

    name: str
    info: DeviceInfo
    itemsize: int  # bytes of an element of a weight or an activation
    dtype_name: str
    chains: bool = False  # whether the device can run decoding rounds without the host
    few_rows: int = 0  # weights have a special layout if forwards have at most so many rows
    capture: bool = False  # whether programs are captured as CUDA graphs and replayed

    def use_here(self) -> None:  # noqa: B027  (few have a current device)
        """Makes this backend's device the current one in the calling thread."""

    def plan_rows(self, max_rows: int | None) -> None:  # noqa: B027  (few choose a layout)
        """Announces the most rows that products with the weights made from now on will have (None:
        unknown). A backend may choose the layout of the weights by it."""

    def kernel(self, weight: Array) -> str:
        """Returns the name of the kernel that computes products with `weight`."""
        return self.name

    def weight(self, parts: Sequence[WeightPart]) -> Array:
        """Makes a random weight matrix [inputs, outputs] in this backend's layout. parts: slices of
        random matrices, with the same inputs, whose outputs are joined."""
        return None

    def activation(self, rows: int, width: int) -> Array:
        """Returns a buffer [rows, width] of NaN, which reveals elements that were never written."""
        return None

    def view(self, array: Array, rows: int, start: int, stop: int) -> Array:
        """Returns the view array[:rows, start:stop]."""
        return None if array is None else array[:rows, start:stop]

    def host_ints(self, count: int) -> HostArray:
        """Returns an int32 buffer on the host that programs read and write asynchronously."""
        return np.zeros(count, np.int32)

    def table(self, entries: int, width: int, key: int) -> Array:
        """Returns an embedding table [entries, width], random matrix `key` with variance 1."""
        return None

    def gather(self, table: Array, tokens: HostArray, out: Array) -> None:  # noqa: B027
        """Sets out[m] = table[tokens[m] mod entries]; `tokens` is read when the program runs."""

    def matmul(self, x: Array, weight: Array, out: Array) -> None:  # noqa: B027
        """Sets out = x @ weight, accumulated in float32; x may be a view of some columns."""

    def read(self, num_bytes: int) -> Callable[..., None]:
        """Returns a function that reads num_bytes of memory, as a forward reads its KV cache; its
        optional argument is a smaller number of bytes."""
        return lambda count=num_bytes: None

    def top_k(  # noqa: B027
        self, values: Array, k: int, out_ids: Array, out_values: Array
    ) -> None:
        """Writes the k largest values of each row to out_values and their columns (int32) to
        out_ids, both [rows, k], in falling order; of equal values the lower column comes first."""

    def top_buffers(self, rows: int, k: int) -> tuple[Array, Array]:
        """Returns buffers for the results of `top_k`: int32 ids and float32 values, [rows, k]."""
        return None, None

    def read_out(self, ids: Array, host: HostArray) -> None:  # noqa: B027
        """Copies the int32 device array `ids` to the buffer `host`."""

    @abstractmethod
    def program(self, body: Callable[[], None], cost: Cost, *, capturable: bool = True) -> Program:
        """Compiles `body`, which enqueues one forward, into a program. All ranks must call this if
        the body has an all-reduce. cost: what the forward costs, from which an emulated device
        derives its time. capturable: whether a CUDA graph may capture the body."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits until all launched work has finished."""

    def to_host(self, array: Array) -> Any:
        """Waits for the device; returns a NumPy copy of an array, in float32 for activations."""
        raise NotImplementedError(f"the {self.name} backend holds no numbers")

    def from_host(self, values: Any, out: Array) -> None:
        """Writes NumPy values into a device array, and waits for the device."""
        raise NotImplementedError(f"the {self.name} backend holds no numbers")

    @abstractmethod
    def read_bandwidth(self, num_bytes: int) -> float | None:
        """Measures the bytes a second at which num_bytes are read repeatedly; None if unknown."""

    @abstractmethod
    def peak_flops(self) -> float | None:
        """Measures, in 0.1 s, the operations a second of large matrix products; None if unknown."""

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Frees programs, then buffers. Must be called before the communicator of all-reduces is
        closed: a CUDA graph that outlives the communicator hangs."""
