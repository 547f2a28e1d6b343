"""Measures one rank's device: bandwidths, products, launches, and copies to and from the host.

A product's time is measured in a chain of products in one program, divided by their number. The
chain's weights together exceed the last-level cache. A chain lasts at least 1 ms on a GPU, so that
the microseconds of its launch do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, cast

import numpy as np

from mpissd.common.wait import Waiter
from mpissd.engine.backend import weights
from mpissd.engine.backend.base import Backend, Cost, Program, WeightPart
from mpissd.engine.comm.group import Device
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.lab.probe.sample import Checks, Entry, Pace, Sample, entry, sample, samples

ROWS = (1, 2, 4, 8, 16, 32, 64)
COPY_BYTES = (64, 4 << 10, 64 << 10, 1 << 20)
NOTHING = Cost(1, 0, 0, 0, 0, 0, 0, 1)
_CACHES = 3  # A chain's weights have this many times the bytes of the last-level cache.
_UNKNOWN_CACHE_BYTES = 64 << 20
_CPU_CHAIN_BYTES = (
    64 << 20
)  # Most bytes of a chain's weights; a CPU makes weights slowly (4.5 s a GB).
_GPU_CHAIN_SHARE = 0.2  # Largest share of the device's memory for a chain's weights.
_CHAIN_S = 1e-3
_LONGEST_CHAIN = 512
# The modelled launch is included, so the chain must be long enough to hide it.
_MODELLED_CHAIN = 64
_CHECKED_COLUMNS = 8
_SQUARE = {"gpu": 8192, "emulated": 8192, "cpu": 1024}
_KEY = 0x5EED


def product_shapes(shard: AnyShard, options: ForwardOptions) -> list[tuple[int, int]]:
    """Returns every distinct (in, out) of a rank's products, fused or not, with the LM head's if
    any; none of a transformer's, which have kernels of their own."""
    if isinstance(shard, TransformerShard):
        return []
    both = [ForwardOptions(fuse, options.lm_head) for fuse in (options.fuse, not options.fuse)]
    return list(dict.fromkeys(shape for one in both for shape in shard.products(one)))


class DeviceProbe:
    """Measures one device; errors in its data go to `checks`."""

    def __init__(self, backend: Backend, waiter: Waiter, checks: Checks, source: str) -> None:
        self._backend, self._waiter, self._checks = backend, waiter, checks
        self._source = source
        self._pace = Pace.of(backend.info)
        self._real = backend.info.kind != "emulated"

    def bandwidths(self, num_bytes: int) -> dict[str, Any]:
        """Measures the read bandwidth over num_bytes, a rank's weights; None: unknown."""
        return {
            "bytes": num_bytes,
            "from": self._source,
            "read_bytes_per_s": self._backend.read_bandwidth(num_bytes),
        }

    def products(self, shapes: Sequence[tuple[int, int]], read_rate: float | None) -> list[Entry]:
        """Measures products of ROWS rows with weights of these (in, out); one "products" entry
        each."""
        return [self._product(k, n, read_rate) for k, n in shapes]

    def square(self) -> tuple[str, float | None]:
        """Measures one large square product; returns (its name, flop/s of its fastest launch).

        The fastest launch is reported, because chips slow down when hot.
        """
        side = _SQUARE[self._backend.info.kind]
        weight, x = self._weight(side, side, 0), self._backend.table(side, side, _KEY)
        out = self._backend.activation(side, side)
        flops = 2 * side**3
        cost = Cost(side, side * side * self._backend.itemsize, 0, flops, 1, 0, 0, 1)
        program = self._backend.program(lambda: self._backend.matmul(x, weight, out), cost)
        taken = self._timed({side: program}, 1)[side]
        self._check_product(out, side, side, side, 0)
        return f"{side}-cubed product", flops / taken.least if taken.least else None

    def launch(self) -> Entry:
        """Measures an empty program: the host's part of its launch, and the device's time."""
        program = self._backend.program(lambda: None, NOTHING)
        host: list[float] = []
        device = sample(launched(program.launch, program, self._waiter, host), self._pace)
        program.close()
        return {
            "what": "empty",
            "from": self._source,
            "host_s": float(np.median(host)),
            "device_s": device.seconds,
        }

    def copies(self) -> list[Entry]:
        """Measures copies between page-locked host memory and a GPU, with their wait; [] without a
        GPU."""
        if self._backend.info.kind != "gpu":
            return []
        taken: dict[str, dict[int, Sample]] = {"in": {}, "out": {}}
        for size in COPY_BYTES:
            self._copy(cast(Device, self._backend), size, taken)
        return [entry({"direction": way}, self._source, times) for way, times in taken.items()]

    def _product(self, k: int, n: int, read_rate: float | None) -> Entry:
        size = k * n * self._backend.itemsize
        count = self._num_weights(size)
        held = [self._weight(k, n, number) for number in range(count)]
        x = self._backend.table(ROWS[-1], k, _KEY)
        outs = {rows: self._backend.activation(rows, n) for rows in ROWS}
        length, programs = self._length(size, count, read_rate), {}
        for rows in ROWS:
            body = self._chain(self._backend.view(x, rows, 0, k), held, outs[rows], length)
            flops = 2 * rows * k * n * length
            cost = Cost(rows, size * length, 0, flops, length, 0, 0, 1)
            programs[rows] = self._backend.program(body, cost)
        taken = self._timed(programs, length)
        for rows in ROWS:
            self._check_product(outs[rows], rows, k, n, (length - 1) % count)
        product = entry({"k": k, "n": n}, self._source, taken)
        cache = self._backend.info.cache_bytes
        product["graph"], product["num_weights"] = self._backend.capture, count
        product["beyond_cache"] = None if cache is None else size * count >= _CACHES * cache
        product["read_share"] = {
            str(rows): size / read_rate / s.seconds if read_rate and s.seconds else None
            for rows, s in taken.items()
        }
        return product

    def _num_weights(self, size: int) -> int:
        """Returns the number of weights of `size` bytes in a chain: more than the cache, less than
        memory."""
        if not self._real:
            return 1
        info = self._backend.info
        wanted = _CACHES * (info.cache_bytes or _UNKNOWN_CACHE_BYTES)
        limit = _CPU_CHAIN_BYTES
        if info.kind == "gpu":
            limit = int(_GPU_CHAIN_SHARE * (info.memory_bytes or 0))
        return max(2, min(math.ceil(wanted / size), limit // size))

    def _length(self, size: int, count: int, read_rate: float | None) -> int:
        """Returns a chain's number of products: a multiple of its weights, enough to be timed."""
        if not self._real:
            return _MODELLED_CHAIN
        wanted = min(_CHAIN_S * (read_rate or 0) / size, _LONGEST_CHAIN)
        return count * max(1, round(wanted / count))

    def _chain(self, x: Any, held: list[Any], out: Any, length: int) -> Callable[[], None]:
        def body() -> None:
            for number in range(length):
                self._backend.matmul(x, held[number % len(held)], out)

        return body

    def _timed(self, programs: Mapping[int, Program], per: int) -> dict[int, Sample]:
        onces = {at: launched(one.launch, one, self._waiter) for at, one in programs.items()}
        taken = samples(onces, self._pace, per=per)
        for program in programs.values():
            program.close()
        return taken

    def _part(self, k: int, number: int, start: int, stop: int) -> WeightPart:
        return WeightPart(_KEY + 1 + number, 0, k, start, stop, k**-0.5)

    def _weight(self, k: int, n: int, number: int) -> Any:
        return self._backend.weight([self._part(k, number, 0, n)])

    def _check_product(self, out: Any, rows: int, k: int, n: int, number: int) -> None:
        """Checks that every element was written, and the first and last columns against NumPy."""
        if not self._real:
            return
        computed = self._backend.to_host(out)
        what = f"product {rows}x{k} @ {k}x{n}"
        self._checks.expect(bool(np.isfinite(computed).all()), f"{what}: an element is not finite")
        checked = min(rows, 64)
        x = weights.element(_KEY, np.arange(checked), np.arange(k))
        tolerance = 0.03 if self._backend.itemsize == 2 else 1e-3
        for start in (0, max(0, n - _CHECKED_COLUMNS)):
            stop = min(n, start + _CHECKED_COLUMNS)
            wanted = x @ weights.part(self._part(k, number, start, stop))
            self._checks.close(computed[:checked, start:stop], wanted, tolerance, what)

    def _copy(self, device: Device, size: int, taken: dict[str, dict[int, Sample]]) -> None:
        array = self._backend.activation(1, size // self._backend.itemsize)
        here, back = device.host_ints(size // 4), device.host_ints(size // 4)
        here[:] = np.arange(size // 4)

        def timed(start: Callable[[], None]) -> Callable[[], float]:
            def once() -> float:
                begin = perf_counter()
                start()
                self._waiter.until(device.fence(), "copy")
                return perf_counter() - begin

            return once

        taken["in"][size] = sample(timed(lambda: device.copy_in(here, array)), self._pace)
        taken["out"][size] = sample(timed(lambda: device.copy_out(array, back)), self._pace)
        same = bool(np.array_equal(here, back))
        self._checks.expect(same, f"{size} B copied to the device and back have changed")


def launched(
    launch: Callable[[], None], program: Any, waiter: Waiter, host: list[float] | None = None
) -> Callable[[], float]:
    """Returns a function that launches, waits and returns device seconds.

    It appends the host's seconds of the launch to `host`.
    """

    def once() -> float:
        start = perf_counter()
        launch()
        if host is not None:
            host.append(perf_counter() - start)
        program.wait(waiter)
        return float(program.elapsed_s())

    return once
