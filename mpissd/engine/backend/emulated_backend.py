"""The emulated backend: a forward takes a duration from a device profile and computes nothing.

Nothing is allocated and no body runs; ranks sleep until the modelled end, so a machine with many
GPUs can be rehearsed on two cores. Forwards of the `null` profile take 0 s, which measures the
framework itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost, DeviceInfo, Program, WeightPart
from mpissd.engine.backend.profile import Profile


class ModelledProgram(Program):
    """A forward without work: it is over its modelled duration after it starts.

    It starts at its launch, or when the forward before it is over.
    """

    def __init__(self, backend: EmulatedBackend, duration_s: float) -> None:
        self._backend = backend
        self._duration_s = duration_s
        self._end = 0.0

    def launch(self) -> None:
        start = max(time.perf_counter(), self._backend.busy_until)
        self._end = self._backend.busy_until = start + self._duration_s

    def done(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self, waiter: Waiter) -> None:
        waiter.sleep_until(self._end)

    def elapsed_s(self) -> float:
        return self._duration_s


class EmulatedBackend(Backend):
    """A device whose only state is `busy_until`, the time at which its last forward ends."""

    name = "emulated"
    itemsize = 2
    dtype_name = "float16"

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.few_rows = profile.few_rows
        self.busy_until = 0.0
        self.info = DeviceInfo(
            name=f"{profile.device_name} (emulated)",
            kind="emulated",
            memory_bytes=profile.memory_bytes,
        )

    def kernel(self, weight: Any) -> str:
        return "modelled"

    def weight(self, parts: Sequence[WeightPart]) -> Any:
        return None

    def activation(self, rows: int, width: int) -> Any:
        return None

    def view(self, array: Any, rows: int, start: int, stop: int) -> Any:
        return None

    def host_ints(self, count: int) -> Any:
        return np.zeros(count, np.int32)

    def table(self, entries: int, width: int, key: int) -> Any:
        return None

    def gather(self, table: Any, tokens: Any, out: Any) -> None:
        return None

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        return None

    def read(self, num_bytes: int) -> Callable[..., None]:
        return lambda count=num_bytes: None

    def top_k(self, values: Any, k: int, out_ids: Any, out_values: Any) -> None:
        return None

    def top_buffers(self, rows: int, k: int) -> tuple[Any, Any]:
        return None, None

    def read_out(self, ids: Any, host: Any) -> None:
        return None

    def program(
        self, body: Callable[[], None], cost: Cost, *, capturable: bool = True
    ) -> ModelledProgram:
        return ModelledProgram(self, self.profile.forward_s(cost))

    def synchronize(self) -> None:
        Waiter(float("inf"), spin=False).sleep_until(self.busy_until)

    def to_host(self, array: Any) -> Any:
        raise NotImplementedError("the emulated backend holds no numbers")

    def from_host(self, values: Any, out: Any) -> None:
        raise NotImplementedError("the emulated backend holds no numbers")

    def read_bandwidth(self, num_bytes: int) -> float | None:
        return self.profile.read_bytes_per_s

    def peak_flops(self) -> float | None:
        return self.profile.peak_flops_per_s

    def close(self) -> None:
        return None
