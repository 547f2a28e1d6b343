"""How far a float16 device may be from the float32 oracle, and a device made of host memory."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpissd.engine.backend.base import WeightPart
from mpissd.engine.backend.numpy_backend import NumpyBackend

HALF_EPSILON = 2.0**-11  # largest relative error of rounding to float16


def relative_error(out: Any, ref: Any) -> float:
    """‖out − ref‖ / ‖ref‖ in float64; NaN if an element was never written."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    return float(np.linalg.norm(out - ref) / np.linalg.norm(ref))


def tolerance(products: int) -> float:
    """Bound on the relative error after a chain of products.

    Each product adds two independent errors, the rounding of its weights and of its output, of at
    most 2⁻¹¹ each (about 0.4 of that in the mean); independent errors add in squares. The chain of
    a layer is q, o, gate, down: 2e-3 after two layers, 7e-4 after one product.
    """
    return HALF_EPSILON * math.sqrt(2 * products)


class HostDevice(NumpyBackend):
    """A device whose memory is the host's: float16 arrays, products in float32, copies at once.

    It lets the groups for device arrays run, and be tested, without a GPU.
    """

    name = "host"
    itemsize = 2
    dtype_name = "float16"

    def __init__(self, bus_id: str) -> None:
        super().__init__()
        self.info = replace(self.info, bus_id=bus_id)
        self.stream: Any = contextlib.nullcontext()
        self.stop = self.host_ints(1)

    def activation(self, rows: int, width: int) -> Any:
        return super().activation(rows, width).astype(np.float16)

    def weight(self, parts: Sequence[WeightPart]) -> Any:
        return super().weight(parts).astype(np.float16).astype(np.float32)

    def table(self, entries: int, width: int, key: int) -> Any:
        return super().table(entries, width, key).astype(np.float16)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        out[...] = x.astype(np.float32) @ weight

    def to_host(self, array: Any) -> Any:
        return array.astype(np.float32) if array.dtype == np.float16 else array.copy()

    def copy_out(self, array: Any, host: Any) -> None:
        host[...] = array.reshape(-1).view(host.dtype)

    def copy_in(self, host: Any, array: Any) -> None:
        array[...] = host.view(array.dtype).reshape(array.shape)

    def flush(self) -> None:
        return None

    def fence(self) -> Callable[[], bool]:
        return lambda: True
