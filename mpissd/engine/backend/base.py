"""What a backend is: arrays, products and *programs* (one forward, launched asynchronously).

A model enqueues its operations once, inside the body of a program; a backend decides how a program
is launched again: NumPy calls the body, CuPy replays a captured CUDA graph of it, the emulated
backend never calls it and lets the modelled duration pass instead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpissd.common.wait import Waiter

Array = Any  # numpy.ndarray, cupy.ndarray, or the emulated backend's placeholder
HostArray = Any  # numpy.ndarray, page-locked on a GPU


@dataclass(frozen=True)
class DeviceInfo:
    """The device of one rank, as far as it can be known (None = unknown)."""

    name: str
    kind: str  # "cpu", "gpu" or "emulated"
    uuid: str | None = None
    bus_id: str | None = None
    memory_bytes: int | None = None  # free for weights, at start-up
    cache_bytes: int | None = None  # last-level cache
    compute_capability: str | None = None


@dataclass(frozen=True)
class WeightPart:
    """A slice of one global weight matrix; a fused weight is a list of parts side by side.

    The global matrix is [in_features, out_features]; element (i, o) depends on (key, i, o) only, so
    that a shard on T ranks holds the very numbers of the whole (see `weights.element`).
    """

    key: int
    in_start: int
    in_stop: int
    out_start: int
    out_stop: int
    scale: float  # standard deviation


@dataclass(frozen=True)
class ForwardKey:
    """Which forward a measured table is of: forwards with equal keys differ in their rows alone."""

    model: str  # the shape's name; a depth-scaled one has its own
    tp: int
    fuse: bool
    lm_head: bool
    kv_tokens: int  # of context read, over all sequences

    def __str__(self) -> str:
        told = [self.model, f"T={self.tp}"]
        told += [name for name in ("fuse", "lm_head") if getattr(self, name)]
        return " ".join(told + [f"kv_tokens={self.kv_tokens}"] * (self.kv_tokens > 0))


@dataclass(frozen=True)
class Cost:
    """What one forward on one rank must move and compute; a rank's share, not the group's."""

    rows: int
    weight_bytes: int
    kv_bytes: int
    flops: int
    num_products: int
    num_all_reduces: int
    all_reduce_bytes: int  # of one all-reduce
    tp: int
    key: ForwardKey | None = None  # whose forward it is; None: nobody's, a lone product, say
    most_rows: int | None = None  # of all forwards of its job, which decide the kernel; None: rows


class Program(ABC):
    """A compiled forward. Launches on one backend run one after the other, as on a stream."""

    @abstractmethod
    def launch(self) -> None:
        """Starts it; may return before it is over."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the last launch is over (never blocks)."""

    def wait(self, waiter: Waiter) -> None:
        """Returns when the last launch is over; FaultError at the waiter's deadline."""
        waiter.until(self.done, "forward")

    @abstractmethod
    def elapsed_s(self) -> float:
        """Device time of the last finished launch, in seconds."""

    def close(self) -> None:  # noqa: B027  (most programs hold nothing)
        """Frees what the device keeps of it (a graph); before the group's communicator."""


class Backend(ABC):
    """Few methods; everything between `begin` and the end of a program body is enqueued."""

    name: str
    info: DeviceInfo
    itemsize: int  # bytes of a weight or activation
    dtype_name: str
    few_rows: int = 0  # forwards of at most so many have weights in an order of their own

    def plan_rows(self, max_rows: int | None) -> None:  # noqa: B027  (few choose a layout)
        """Rows that products with the weights made from now on have at most; None: not known."""

    def kernel(self, weight: Array) -> str:
        """Name of what multiplies by this weight inside a program."""
        return self.name

    @abstractmethod
    def weight(self, parts: Sequence[WeightPart]) -> Array:
        """A weight [in, Σout] with deterministic random values, in this backend's own layout."""

    @abstractmethod
    def activation(self, rows: int, width: int) -> Array:
        """A [rows, width] buffer, poisoned with NaN so that an unwritten element is seen."""

    @abstractmethod
    def view(self, array: Array, rows: int, start: int, stop: int) -> Array:
        """The view array[:rows, start:stop]."""

    @abstractmethod
    def host_ints(self, count: int) -> HostArray:
        """A host int32 buffer that `gather` can read and `read_out` can write asynchronously."""

    @abstractmethod
    def table(self, entries: int, width: int, key: int) -> Array:
        """An embedding-like table [entries, width] of unit-variance random rows."""

    @abstractmethod
    def gather(self, table: Array, tokens: HostArray, out: Array) -> None:
        """out[m] = table[tokens[m] mod entries]: the tokens travel host → device."""

    @abstractmethod
    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        """out = x @ weight, accumulated in float32; x may be a column view."""

    @abstractmethod
    def read(self, num_bytes: int) -> Callable[..., None]:
        """An operation of an optional byte count that reads so much of a buffer of num_bytes, all
        of it by default (the KV cache's traffic)."""

    @abstractmethod
    def top_k(self, values: Array, k: int, out_ids: Array, out_values: Array) -> None:
        """The k largest of each row: ids int32 [rows, k], descending, ties to the smaller id."""

    @abstractmethod
    def top_buffers(self, rows: int, k: int) -> tuple[Array, Array]:
        """Device buffers for `top_k`: (int32 ids, float32 values), both [rows, k]."""

    @abstractmethod
    def read_out(self, ids: Array, host: HostArray) -> None:
        """Copies the int32 device array `ids` to the host buffer (device → host)."""

    @abstractmethod
    def program(self, body: Callable[[], None], cost: Cost, *, capturable: bool = True) -> Program:
        """Compiles a body. Collective over a group whose all-reduce is part of the body."""

    @abstractmethod
    def synchronize(self) -> None:
        """Returns when everything launched is over."""

    @abstractmethod
    def to_host(self, array: Array) -> Any:
        """A NumPy copy (float32 for activations); synchronises. Not for the hot path."""

    @abstractmethod
    def from_host(self, values: Any, out: Array) -> None:
        """Writes NumPy values into a device array; synchronises. Not for the hot path."""

    @abstractmethod
    def read_bandwidth(self, num_bytes: int) -> float | None:
        """Bytes a second when a buffer of num_bytes is read again and again; None = unknown."""

    @abstractmethod
    def copy_bandwidth(self, num_bytes: int) -> float | None:
        """Bytes a second, read and written ones, of a copy on the device; None = unknown."""

    @abstractmethod
    def peak_flops(self) -> float | None:
        """Flop a second of a large square product, the fastest of some; None = unknown.

        What bounds a forward of many rows. Takes ≤ 0.1 s.
        """

    @property
    def capture(self) -> bool:
        """Whether programs are replayed as captured graphs."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Frees programs, then buffers. After the group's communicator it would hang."""
