"""The interface of a backend: arrays, products, and programs (one forward, run asynchronously).

A program's body enqueues the operations of a forward. NumPy calls the body at each launch, CuPy
replays a CUDA graph that it captured once, and the emulated backend lets the modelled duration pass
without calling the body.
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
# Multipliers of the row and of the column; constants of fmix32, the last step of MurmurHash3.
ROW_PRIME = 0x9E3779B1
COLUMN_PRIME = 0x85EBCA77
MIX_1 = 0x85EBCA6B
MIX_2 = 0xC2B2AE35
_SQRT_12 = np.float32(12.0**0.5)  # A uniform variable on [-½, ½) has standard deviation 1/√12.
_CACHED = 1 << 17  # elements made at once, which stay in a core's cache


def element(key: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.float32]:
    """Returns elements of the random matrix `key`, float32 [rows, columns], uniform, variance 1."""
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
        # 24 bits are exact in float32, so host and device agree to the last bit.
        np.multiply(h >> np.uint32(8), np.float32(2.0**-24), out=out, casting="unsafe")
        out -= np.float32(0.5)
        out *= _SQRT_12
    return values


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank; a field is None where it is unknown."""

    name: str
    kind: str  # "cpu", "gpu" or "emulated"
    uuid: str | None = None
    bus_id: str | None = None
    memory_bytes: int | None = None  # Bytes that are free for weights at start-up.
    cache_bytes: int | None = None  # The last-level cache.
    compute_capability: str | None = None


@dataclass(frozen=True)
class WeightPart:
    """A slice of the random matrix `key`, [in_features, out_features], of all ranks. Element (i, o)
    depends only on (key, i, o), so that T ranks together hold exactly the values of the whole
    matrix (see `element`). A fused weight is a list of parts side by side."""

    key: int
    in_start: int
    in_stop: int
    out_start: int
    out_stop: int
    scale: float  # Standard deviation of the elements.

    def values(self) -> NDArray[np.float32]:
        """Returns the elements, float32 [in, out]."""
        rows = np.arange(self.in_start, self.in_stop, dtype=np.int64)
        columns = np.arange(self.out_start, self.out_stop, dtype=np.int64)
        return np.asarray(element(self.key, rows, columns) * np.float32(self.scale), np.float32)


@dataclass(frozen=True)
class ForwardKey:
    """Identifies a forward in tables of measured times, where equal keys differ in rows only."""

    model: str  # The shape's name; a depth-scaled shape has its own.
    tp: int
    fuse: bool
    lm_head: bool
    kv_tokens: int  # Tokens of context read, summed over all sequences.
    sequences: int = 0  # Those that have these tokens; 0: the model is bare matrix products.

    @property
    def context(self) -> int:
        """Tokens of context of one of a transformer's sequences."""
        return self.kv_tokens // self.sequences

    @property
    def forward(self) -> str:
        """The kind of forward, as a value of --forward."""
        return "transformer" if self.sequences else "gemm"

    def __str__(self) -> str:
        if self.sequences:
            return f"transformer {self.model} T={self.tp} context={self.context} b={self.sequences}"
        parts = [self.model, f"T={self.tp}"]
        parts += [name for name in ("fuse", "lm_head") if getattr(self, name)]
        return " ".join(parts + [f"kv_tokens={self.kv_tokens}"] * (self.kv_tokens > 0))


@dataclass(frozen=True)
class Cost:
    """Cost of one forward on one rank: the bytes that it moves and the work that it does."""

    rows: int
    weight_bytes: int
    kv_bytes: int
    flops: int
    num_products: int
    num_all_reduces: int
    all_reduce_bytes: int  # Bytes of each all-reduce.
    tp: int
    key: ForwardKey | None = None  # The forward's key in measured tables; None for a lone product.
    most_rows: int | None = None  # Of the job's largest forward (None: this), decides the kernel.
    params: int = 0  # Weights that the forward reads; 0 for a lone product.
    candidates: int = 1  # Ids that are read out of each row.
    columns: int = 0  # Logits of a row on this rank, from which they are chosen; 0: no LM head.


class Program(ABC):
    """A compiled forward. Launches on one backend run one after the other, as on a stream."""

    @abstractmethod
    def launch(self) -> None:
        """Starts the forward; may return before it is over."""

    @abstractmethod
    def done(self) -> bool:
        """Returns whether the last launch is over; never blocks."""

    def wait(self, waiter: Waiter) -> None:
        """Returns when the last launch is over; raises FaultError at the waiter's deadline."""
        waiter.until(self.done, "forward")

    @abstractmethod
    def elapsed_s(self) -> float:
        """Returns the device time of the last finished launch, in seconds."""

    def after_s(self, earlier: Program) -> float:
        """Returns the seconds from the end of `earlier`'s last launch to this one's start."""
        raise NotImplementedError(f"{type(self).__name__} keeps no clock")

    def close(self) -> None:  # noqa: B027  (most programs hold nothing)
        """Frees the program's graph, which must not outlive the group's communicator."""


class Backend(ABC):
    """The interface of all backends. Operations of arrays are called in a program's body, which
    enqueues them. The methods that are not abstract hold and compute nothing, as on an emulated
    device."""

    name: str
    info: DeviceInfo
    itemsize: int  # Bytes of one weight or activation element.
    dtype_name: str
    chains: bool = False  # Whether the device decides rounds where it can (DeviceRounds).
    few_rows: int = 0  # The most rows for which weights are stored in a special order; 0: never.
    capture: bool = False  # Whether programs are replayed as captured graphs.

    def use_here(self) -> None:  # noqa: B027  (few have a current device)
        """Makes this backend's device the current one of the calling thread."""

    def plan_rows(self, max_rows: int | None) -> None:  # noqa: B027  (few choose a layout)
        """Announces the most rows of products with weights made from now on; None: unknown."""

    def kernel(self, weight: Array) -> str:
        """Returns the name of the kernel that multiplies by this weight inside a program."""
        return self.name

    def weight(self, parts: Sequence[WeightPart]) -> Array:
        """Returns the parts side by side, [in, Σout], in this backend's own layout."""
        return None

    def activation(self, rows: int, width: int) -> Array:
        """Returns a buffer [rows, width] of NaN, which show elements that were never written."""
        return None

    def view(self, array: Array, rows: int, start: int, stop: int) -> Array:
        """Returns the view array[:rows, start:stop]."""
        return None if array is None else array[:rows, start:stop]

    def host_ints(self, count: int) -> HostArray:
        """Returns an int32 buffer on the host, which programs read and write asynchronously."""
        return np.zeros(count, np.int32)

    def table(self, entries: int, width: int, key: int) -> Array:
        """Returns an embedding table [entries, width] of random rows with variance 1."""
        return None

    def gather(self, table: Array, tokens: HostArray, out: Array) -> None:  # noqa: B027
        """Sets out[m] = table[tokens[m] mod entries]; the tokens are read when the program runs."""

    def matmul(self, x: Array, weight: Array, out: Array) -> None:  # noqa: B027
        """Sets out = x @ weight, accumulated in float32; x may be a column view."""

    def read(self, num_bytes: int) -> Callable[..., None]:
        """Returns an operation that reads num_bytes, or as many as its argument says, as a forward
        reads its KV cache."""
        return lambda count=num_bytes: None

    def top_k(  # noqa: B027
        self, values: Array, k: int, out_ids: Array, out_values: Array
    ) -> None:
        """Writes the k largest values of each row and their columns (int32), [rows, k], in falling
        order; of equal values the lower column comes first."""

    def top_buffers(self, rows: int, k: int) -> tuple[Array, Array]:
        """Returns the device buffers for `top_k`: (int32 ids, float32 values), both [rows, k]."""
        return None, None

    def read_out(self, ids: Array, host: HostArray) -> None:  # noqa: B027
        """Copies the int32 device array `ids` to the host buffer."""

    @abstractmethod
    def program(self, body: Callable[[], None], cost: Cost, *, capturable: bool = True) -> Program:
        """Compiles a body into a program; all ranks must call it if the body has an all-reduce.
        cost: of the forward. capturable: whether the body may be captured as a graph."""

    def synchronize(self) -> None:  # noqa: B027
        """Waits until everything launched is over."""

    def to_host(self, array: Array) -> Any:
        """Returns a NumPy copy, float32 for activations; waits for the device."""
        raise NotImplementedError(f"the {self.name} backend holds no numbers")

    def from_host(self, values: Any, out: Array) -> None:
        """Writes NumPy values into a device array; waits for the device."""
        raise NotImplementedError(f"the {self.name} backend holds no numbers")

    @abstractmethod
    def read_bandwidth(self, num_bytes: int) -> float | None:
        """Measures the bytes a second of repeated reads of num_bytes; None if unknown."""

    @abstractmethod
    def peak_flops(self) -> float | None:
        """Measures the flop a second of a large square product, in at most 0.1 s; None if
        unknown."""

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Frees programs, then buffers; hangs once the group's communicator is closed."""
