"""The emulated backend: a forward takes a duration from a device profile and computes nothing.

Nothing is allocated and no body runs; ranks sleep until the modelled end, so a machine with many
GPUs can be rehearsed on two cores. Forwards of the `null` profile take 0 s, which measures the
framework itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost, DeviceInfo, Program
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

    def program(
        self, body: Callable[[], None], cost: Cost, *, capturable: bool = True
    ) -> ModelledProgram:
        return ModelledProgram(self, self.profile.forward_s(cost))

    def read_bandwidth(self, num_bytes: int) -> float | None:
        return self.profile.read_bytes_per_s

    def peak_flops(self) -> float | None:
        return self.profile.peak_flops_per_s
