"""Runs consecutive products as one persistent kernel (kernels/chain.cu), on compute capability ≥
9.0.

While a program's body runs, products are only recorded; the next other operation, or the end of the
body, launches the recorded ones as one chain. Outside a body each product is its own chain.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from mpissd.engine.backend import chain_plan, kernels
from mpissd.engine.backend.chain_plan import GEOMETRIES, MAX_ROWS, THREADS, Multiplication, Operand
from mpissd.engine.backend.cupy_device import Launcher, step

FIRST_CAPABILITY = 90
_MAX_SHARED_BYTES = 97  # The number of the attribute cudaDevAttrMaxSharedMemoryPerBlockOptin.


class Inboxes(Protocol):
    """The group's shared state that a chain needs to sum over the ranks by itself."""

    everybody: int  # The address of struct Peers.
    capacity: int  # In messages of two float16 values.
    done_counts: int  # The number of counters of finished exchanges.


def why_not(device_id: int) -> str | None:
    """Returns why this GPU cannot run chains, or None if it can."""
    capability = cupy.cuda.Device(device_id).compute_capability  # For example "90".
    if int(capability) < FIRST_CAPABILITY:
        return f"compute capability {capability[:-1]}.{capability[-1]}"
    room = runtime.deviceGetAttribute(_MAX_SHARED_BYTES, device_id)
    wanted = max(geometry.shared_bytes for geometry in GEOMETRIES.values())
    return f"{room} bytes of shared memory a block" if room < wanted else None


class ChainRunner:
    """Records products and launches them on one stream.

    stop: a page-locked int32. If it is set, every wait inside the kernels ends; the kernels set it
    when a wait lasted `limit_s` seconds.
    """

    def __init__(self, launcher: Launcher, stop: NDArray[np.int32]) -> None:
        self.limit_s = 60.0
        self._launcher, self._stop = launcher, stop
        self._noted: list[tuple[int, ...]] = []
        self._inboxes: Inboxes | None = None
        self._held = False
        # By products: their table on the device, the counters of its launches, and the numbers of
        # products, exchanges and row tiles.
        self._chains: dict[tuple[tuple[int, ...], ...], tuple[Any, Any, int, int, int]] = {}

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
            chain = [
                Multiplication(weight, Operand(*place[:4]), Operand(*place[4:8]), bool(place[8]))
                for weight, *place in key
            ]
            planned = chain_plan.plan(chain)
            self._chains[key] = (
                self._launcher.uploaded(planned.view(np.uint8), np.uint8),
                self._launcher.zeros((len(planned) + 1,), np.uint32),
                len(planned),
                int((planned["exchange"] > 0).sum()),
                chain_plan.row_tiles(planned),
            )
        table, finished, count, exchanges, row_tiles = self._chains[key]
        geometry = GEOMETRIES[row_tiles]
        everybody, done_counts = 0, 0
        if exchanges:
            assert self._inboxes is not None, "sums over ranks without inboxes"
            everybody, done_counts = self._inboxes.everybody, self._inboxes.done_counts
        args = (
            table,
            np.int32(count),
            finished,
            np.uintp(everybody),
            np.int32(exchanges),
            np.int32(done_counts),
            np.uintp(self._stop.ctypes.data),
            np.uint64(int(self.limit_s * 1e9)),
        )
        macros, shared = geometry.macros, geometry.shared_bytes
        kernel = self._launcher.function("chain", kernels.CHAIN, macros, shared)
        grid = (self._launcher.multiprocessors,)
        self._launcher.launch(kernel, grid, (THREADS,), args, shared)

    def close(self) -> None:
        """Frees the tables; call it after the graphs that read them are destroyed."""
        self._chains.clear()


def operand(array: Any) -> Operand:
    """Returns a two-dimensional array as an address with its sizes and row step."""
    return Operand(int(array.data.ptr), int(array.shape[0]), int(array.shape[1]), step(array))


def _flat(array: Operand) -> tuple[int, int, int, int]:
    return array.address, array.rows, array.width, array.step
