"""Runs consecutive products as one persistent kernel (kernels/chain.cu), on compute capability ≥
9.0.

While a program's body runs, products are only recorded; the next other operation, or the end of the
body, launches the recorded ones as one chain. Outside a body each product is its own chain. Every
shape is compared with a slow kernel (packed_product) before its first use in a chain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from mpissd.common.errors import FaultError
from mpissd.engine.backend import chain_plan, kernels
from mpissd.engine.backend.chain_plan import (
    GEOMETRIES,
    MAX_ROWS,
    PAIR,
    THREADS,
    Multiplication,
    Operand,
)
from mpissd.engine.backend.cupy_device import device_empty, step

FIRST_CAPABILITY = 90
TOLERANCE = 2e-3  # The largest relative error of a product, compared with the slow kernel.
_CHECK_LIMIT_S = 5.0
_MAX_SHARED_BYTES = 97  # The number of the attribute cudaDevAttrMaxSharedMemoryPerBlockOptin.
Launch = Callable[..., None]


class Inboxes(Protocol):
    """The group's shared state that a chain needs to sum over the ranks by itself."""

    everybody: int  # The address of struct Peers.
    capacity: int  # In messages of two float16 values.
    done_counts: int  # The number of counters of finished exchanges.


@dataclass(frozen=True)
class Chain:
    """A chain's table of products on the device, and the counters of its launches."""

    table: Any
    finished: Any
    count: int
    exchanges: int
    row_tiles: int


def why_not(device_id: int) -> str | None:
    """Returns why this GPU cannot run chains, or None if it can."""
    capability = cupy.cuda.Device(device_id).compute_capability  # For example "90".
    if int(capability) < FIRST_CAPABILITY:
        return f"compute capability {capability[:-1]}.{capability[-1]}"
    room = runtime.deviceGetAttribute(_MAX_SHARED_BYTES, device_id)
    wanted = max(geometry.shared_bytes for geometry in GEOMETRIES.values())
    return f"{room} bytes of shared memory a block" if room < wanted else None


class ChainRunner:
    """Records products and launches them on one stream; `launch` runs the backend's own kernels.

    stop: a page-locked int32. If it is set, every wait inside the kernels ends; the kernels set it
    when a wait lasted `limit_s` seconds.
    """

    def __init__(self, stream: Any, num_sms: int, stop: NDArray[np.int32], launch: Launch) -> None:
        self.limit_s = 60.0
        self._stream, self._num_sms, self._stop, self._launch = stream, num_sms, stop, launch
        self._noted: list[tuple[int, ...]] = []
        self._inboxes: Inboxes | None = None
        self._held = False
        self._chains: dict[tuple[tuple[int, ...], ...], Chain] = {}
        self._kernels: dict[int, Any] = {}
        self._checked: set[tuple[int, int, int]] = set()

    def multiply(self, x: Operand, weight: int, out: Operand) -> None:
        """Records out = x @ the packed weight at an address; the operands' widths give its
        shape."""
        self._noted.append((weight, *_flat(x), *_flat(out), 0))
        if not self._held:
            self.flush()

    def sum_last(self, out: Operand, inboxes: Inboxes) -> bool:
        """Makes the chain sum `out` over the ranks.

        Returns False if `out` is not the last recorded product's output, or exceeds the inboxes.
        """
        if not self._noted or self._noted[-1][5:9] != _flat(out) or self._noted[-1][9]:
            return False
        if min(out.rows, MAX_ROWS) * out.width > 2 * inboxes.capacity:
            return False
        self._noted[-1] = (*self._noted[-1][:9], 1)
        self._inboxes = inboxes
        return True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Records products until the block ends, then launches them; after an error it drops
        them."""
        self._held = True
        try:
            yield
            self.flush()
        finally:
            self._held = False
            self._noted.clear()

    def flush(self) -> None:
        """Launches the recorded products."""
        if not self._noted:
            return
        key = tuple(self._noted)
        self._noted.clear()
        if key not in self._chains:
            self._chains[key] = self._made(key)
        self._start(self._chains[key])

    def close(self) -> None:
        """Frees the tables; call it after the graphs that read them are destroyed."""
        self._chains.clear()

    def _made(self, key: tuple[tuple[int, ...], ...]) -> Chain:
        chain = [
            Multiplication(weight, Operand(*place[:4]), Operand(*place[4:8]), bool(place[8]))
            for weight, *place in key
        ]
        table = chain_plan.plan(chain)
        self._check_shapes(chain)
        exchanges = int((table["exchange"] > 0).sum())
        return Chain(
            table=self._uploaded(table.view(np.uint8)),
            finished=self._uploaded(np.zeros(4 * (len(table) + 1), np.uint8)),
            count=len(table),
            exchanges=exchanges,
            row_tiles=chain_plan.row_tiles(table),
        )

    def _uploaded(self, data: NDArray[np.uint8]) -> Any:
        array = device_empty(data.shape, np.uint8)
        array.set(data, stream=self._stream)
        self._stream.synchronize()
        return array

    def _start(self, chain: Chain) -> None:
        geometry = GEOMETRIES[chain.row_tiles]
        everybody, done_counts = 0, 0
        if chain.exchanges:
            assert self._inboxes is not None, "sums over ranks without inboxes"
            everybody, done_counts = self._inboxes.everybody, self._inboxes.done_counts
        args = (
            chain.table,
            np.int32(chain.count),
            chain.finished,
            np.uintp(everybody),
            np.int32(chain.exchanges),
            np.int32(done_counts),
            np.uintp(self._stop.ctypes.data),
            np.uint64(int(self.limit_s * 1e9)),
        )
        with self._stream:
            self._kernel(chain.row_tiles)(
                (self._num_sms,),
                (THREADS,),
                args,
                shared_mem=geometry.shared_bytes,
            )

    def _kernel(self, row_tiles: int) -> Any:
        if row_tiles not in self._kernels:
            geometry = GEOMETRIES[row_tiles]
            source = kernels.source(kernels.CHAIN)
            module = cupy.RawModule(code=source, options=geometry.options)
            kernel = module.get_function("chain")
            kernel.max_dynamic_shared_size_bytes = geometry.shared_bytes
            self._kernels[row_tiles] = kernel
        return self._kernels[row_tiles]

    def _check_shapes(self, chain: list[Multiplication]) -> None:
        """Compares each product of a new shape, with random rows, with the slow kernel."""
        for product in chain:
            rows = min(product.x.rows, MAX_ROWS)
            shape = (product.x.width, product.out.width, -(-rows // chain_plan.ROW_TILE))
            if shape not in self._checked:
                self._checked.add(shape)
                self._check(product.weight, rows, *shape[:2])

    def _check(self, weight: int, rows: int, depth: int, width: int) -> None:
        values = np.random.default_rng(rows).standard_normal((rows, depth)).astype(np.float16)
        x = device_empty(values.shape, np.float16)
        x.set(values, stream=self._stream)
        fast, slow = (device_empty((rows, width), np.float16) for _ in range(2))
        with self._stream:
            fast.fill(np.nan)
        limit_s, self.limit_s = self.limit_s, _CHECK_LIMIT_S
        alone = [Multiplication(weight, operand(x), operand(fast))]
        table = chain_plan.plan(alone)
        finished = self._uploaded(np.zeros(4 * (len(table) + 1), np.uint8))
        tiles = chain_plan.row_tiles(table)
        self._start(Chain(self._uploaded(table.view(np.uint8)), finished, len(table), 0, tiles))
        self.limit_s = limit_s
        packed_product(self._launch, operand(x), weight, operand(slow))
        computed, expected = (
            cupy.asnumpy(a, stream=self._stream).astype(float) for a in (fast, slow)
        )
        error = float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))
        if not error <= TOLERANCE:
            self._stop[0] = 0
            raise FaultError(
                f"chain of one product {rows}x{depth} @ {depth}x{width}: relative error "
                f"{error:.1e} against its slow twin, at most {TOLERANCE:.0e}"
            )


def packed_product(launch: Launch, x: Operand, weight: int, out: Operand) -> None:
    """Computes out = x @ the packed weight by the slow kernel, which takes any alignment and
    rows."""
    grid = (-(-out.width // 128), out.rows)
    source = (np.uintp(x.address), np.int64(x.step))
    packed = (np.uintp(weight), np.int32(x.width // PAIR))
    to = (np.uintp(out.address), np.int64(out.step), np.int32(out.width))
    launch("packed_product", grid, (128,), (*source, *packed, *to))


def operand(array: Any) -> Operand:
    """Returns a two-dimensional array as an address with its sizes and row step."""
    return Operand(int(array.data.ptr), int(array.shape[0]), int(array.shape[1]), step(array))


def _flat(array: Operand) -> tuple[int, int, int, int]:
    return array.address, array.rows, array.width, array.step
