"""How near to the memory's limit forwards run: floors, all-reduces and launches of these ranks.

    mpirun -np T python -m mpi4py -m mpissd.bench.gpu_limit OUT     (launch/gpu_limit.sh does it)

One rank a GPU. Every number is a median over replays of a captured graph in which each forward
reads every weight; a replay follows its predecessor at once. Tokens are random, what the forward
writes is poisoned before and checked after: finite everywhere, and within rounding what products by
cuBLAS and the portable all-reduce give. The floor is the weights' bytes over the read rate that the
same job measured. Rows go to OUT/gpu_limit.jsonl and, with the bars, to stdout.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.backend.base import Backend, Cost
from mpissd.bench.limit_table import line_of
from mpissd.comm.group import Group, SoloGroup
from mpissd.comm.mpi_group import open_group
from mpissd.comm.topology import open_topology
from mpissd.errors import ConfigError, GateError
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.model.stepper import Stepper
from mpissd.presets import resolve_model
from mpissd.wait import Waiter

_READ_BYTES = 4 * 10**9
_QUEUED = 4  # replays in a row, of which the last counts
_SAMPLES, _SKIPPED, _REDUCES = 60, 3, 64
_HALF_EPSILON = 2.0**-11
_HIDDEN = 8192  # of the all-reduced vectors
_WAITER = Waiter(60.0, spin=True)
_REDUCE_BARS_S = {2: 3.8e-6, 4: 4.8e-6}  # of 16 KB; of 128 KB: NCCL's in the same job
_LAUNCH_BAR_S = 10e-6


@dataclass(frozen=True)
class Forward:
    """What is measured of a model: the rows, and bars by rows, of the floor or in seconds."""

    model: str
    rows: tuple[int, ...]
    fractions: dict[int, float]
    seconds: dict[int, float]


FORWARDS = {  # by T
    1: (
        Forward("8b", (1, 5, 8, 16), {1: 0.92, 16: 0.88}, {}),
        Forward("1b", (1, 24), {}, {1: 0.56e-3, 24: 0.60e-3}),
    ),
    2: (Forward("70b", (1, 5, 8, 16), {1: 0.87, 16: 0.83}, {}),),
    4: (Forward("70b", (1, 5, 8, 16), {1: 0.80, 16: 0.76}, {}),),
}


class Limits:
    """Measures on the ranks of `comm`, which call every method together."""

    def __init__(self, comm: MPI.Comm, local_rank: int, out: Path) -> None:
        self.comm, self.local_rank, self.out = comm, local_rank, out
        self.read_rate, self.device = math.nan, ""

    def measure(self) -> None:
        """Everything that this number of ranks has bars for."""
        with self._opened("auto") as (backend, group):
            self.device = backend.info.name
            rate = backend.read_bandwidth(_READ_BYTES)
            self.read_rate = float(self.comm.allreduce(rate, MPI.MIN))
            self._tell("read", rate_tb_per_s=self.read_rate / 1e12)
            if self.comm.size > 1:
                self._all_reduces(backend, group)
        for forward in FORWARDS.get(self.comm.size, ()):
            for fuse in (True, False):
                self._forwards(forward, fuse)
            if self.comm.size == 1:
                self._torch(forward)

    @contextmanager
    def _opened(self, all_reduce: str, *, chain: bool = True) -> Iterator[tuple[Any, Group]]:
        """A backend and a group; closed in their order."""
        from mpissd.backend.cupy_backend import CupyBackend

        backend = CupyBackend(self.local_rank, chain=chain)
        group: Group = SoloGroup()
        try:
            if self.comm.size > 1:
                group = open_group(backend, self.comm, all_reduce, _WAITER)
            yield backend, group
        finally:
            group.close()
            backend.close()

    def _forwards(self, forward: Forward, fuse: bool) -> None:
        """The fast path and its slow twin (where it tells more), and whether they agree."""
        ways = [("fast", "auto", True)] + [("cublas", "nccl", False)] * fuse
        found = {}
        for way, all_reduce, chain in ways:
            with self._opened(all_reduce, chain=chain) as (backend, group):
                found[way] = self._way(way, backend, group, forward, fuse)
        allowed = _HALF_EPSILON * math.sqrt(2 * 4 * resolve_model(forward.model).num_layers)
        for rows, expected in found.get("cublas", {}).items():
            error = np.linalg.norm(found["fast"][rows] - expected) / np.linalg.norm(expected)
            self._tell("agreement", model=forward.model, rows=rows, error=float(error), bar=allowed)

    def _way(
        self, way: str, backend: Any, group: Group, forward: Forward, fuse: bool
    ) -> dict[int, Any]:
        """Times each row count; the hidden vectors of the last forward of each."""
        shard = Shard(resolve_model(forward.model), self.comm.size, self.comm.rank)
        options = ForwardOptions(fuse=fuse)
        stepper = Stepper(
            backend, group, shard, options, buckets=forward.rows, num_sequences=1, seed=1
        )
        hidden = {}
        for rows in forward.rows:
            alone, queued, host = self._timed(stepper, rows)
            hidden[rows] = self._checked(stepper, rows)
            counts = way == "fast" and fuse
            self._tell_forward(
                forward, way, group.name, fuse, rows, queued, alone_s=alone, counts=counts
            )
            if rows == 1:
                name = shard.shape.name
                self._tell("launch", model=name, way=way, seconds=host, bar_s=_LAUNCH_BAR_S)
        stepper.close()
        return hidden

    def _timed(self, stepper: Stepper, rows: int) -> tuple[float, float, float]:
        """Medians: a forward launched alone, one behind others, host seconds of a launch."""
        rng = np.random.default_rng(rows)
        times: dict[int, list[float]] = {1: [], _QUEUED: []}
        host = []
        for sample in range(_SAMPLES):
            stepper.upload(rows, rng.integers(0, 1 << 30, rows).astype(np.int32))
            for count, taken in times.items():
                self.comm.Barrier()
                start = time.perf_counter()
                stepper.launch()
                launched = time.perf_counter() - start
                for _ in range(count - 1):
                    stepper.launch()
                stepper.wait(_WAITER)
                if sample >= _SKIPPED:
                    taken.append(self._slowest(stepper.elapsed_s()))
                    host.append(launched)
        alone, queued = (float(np.median(taken)) for taken in times.values())
        return alone, queued, float(np.median(host))

    def _checked(self, stepper: Stepper, rows: int) -> Any:
        """The hidden vectors of a forward into poisoned buffers, all of whose places it wrote."""
        memory, backend = stepper.stack.buffers, stepper.backend
        arrays = [memory.hidden, memory.qkv, memory.middle, memory.gate_up]
        for array in arrays:
            backend.from_host(np.full(array.shape, np.nan, np.float32), array)
        stepper.upload(rows, np.arange(rows, dtype=np.int32))
        self.comm.Barrier()
        stepper.launch()
        stepper.wait(_WAITER)
        for array in arrays:
            if not np.isfinite(backend.to_host(array)[:rows]).all():
                name = stepper.shard.shape.name
                raise GateError(f"{name}, {rows} rows: a place was not written, or not finite")
        return backend.to_host(memory.hidden)[:rows]

    def _all_reduces(self, backend: Backend, own: Group) -> None:
        groups = {own.name: own}
        if own.name != "nccl":
            try:
                groups["nccl"] = open_group(backend, self.comm, "nccl", _WAITER)
            except ConfigError as refusal:
                self._tell("refused", why=str(refusal))
        found = {
            (name, rows): self._all_reduce(backend, group, rows)
            for name, group in groups.items()
            for rows in (1, 8, 16)
        }
        for (name, rows), (seconds, error) in found.items():
            bars = {1: _REDUCE_BARS_S.get(self.comm.size), 8: found.get(("nccl", 8), [None])[0]}
            bar = bars.get(rows) if name == own.name else None
            size = rows * _HIDDEN * 2
            told = {"group": name, "bytes": size, "seconds": seconds, "error": error, "bar_s": bar}
            self._tell("all_reduce", **told)
        for group in groups.values():
            if group is not own:
                group.close()

    def _all_reduce(self, backend: Backend, group: Group, rows: int) -> tuple[float, float]:
        """(seconds of one in a graph of 64, relative error of the sums)."""
        buffers = [backend.activation(rows, _HIDDEN) for _ in range(_REDUCES)]
        rng = np.random.default_rng((self.comm.rank, rows))
        values = rng.standard_normal((rows, _HIDDEN)).astype(np.float16).astype(np.float32)
        total = self.comm.allreduce(values)

        def body() -> None:
            for buffer in buffers:
                group.all_reduce(buffer)

        cost = Cost(rows, 0, 0, 0, 0, _REDUCES, rows * _HIDDEN * 2, self.comm.size)
        program = backend.program(body, cost)
        times, error = [], 0.0
        for sample in range(30):
            for buffer in buffers:
                backend.from_host(values, buffer)
            self.comm.Barrier()
            program.launch()
            program.wait(_WAITER)
            if sample:
                times.append(self._slowest(program.elapsed_s()) / _REDUCES)
        for buffer in buffers:
            found = backend.to_host(buffer)
            error = max(error, float(np.linalg.norm(found - total) / np.linalg.norm(total)))
        program.close()
        return float(np.median(times)), self._slowest(error)

    def _torch(self, forward: Forward) -> None:
        """The same fused products as a CUDA graph of PyTorch's, where it is installed."""
        try:
            from mpissd.bench.limit_torch import graph_seconds
        except ImportError as missing:
            self._tell("refused", why=f"PyTorch's column: {missing}")
            return
        shard = Shard(resolve_model(forward.model))
        shapes = shard.products(ForwardOptions(fuse=True))
        for rows in forward.rows:
            layers = shard.shape.num_layers
            seconds = graph_seconds(shapes, layers, rows, self.local_rank, _SAMPLES, _QUEUED)
            self._tell_forward(forward, "torch", "solo", True, rows, seconds)

    def _tell_forward(
        self,
        forward: Forward,
        way: str,
        group: str,
        fuse: bool,
        rows: int,
        seconds: float,
        *,
        counts: bool = False,
        **more: Any,
    ) -> None:
        shard = Shard(resolve_model(forward.model), self.comm.size)
        options = ForwardOptions(fuse=fuse)
        floor_s = shard.cost(rows, 1, 2, options).weight_bytes / self.read_rate
        self._tell(
            "forward", model=shard.shape.name, way=way, group=group, fuse=fuse, rows=rows,
            seconds=seconds, floor_s=floor_s, floor_fraction=floor_s / seconds,
            bar_fraction=forward.fractions.get(rows) if counts else None,
            bar_s=forward.seconds.get(rows) if counts else None, **more,
        )  # fmt: skip

    def _slowest(self, value: float) -> float:
        return float(self.comm.allreduce(value, MPI.MAX))

    def _tell(self, what: str, **found: Any) -> None:
        row = {"what": what, "tp": self.comm.size, "device": self.device, **found}
        if self.comm.rank == 0:
            with open(self.out / "gpu_limit.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)


def main(arguments: Iterable[str]) -> int:
    """Measures on the ranks of the world."""
    out = Path(next(iter(arguments), "out"))
    topology = open_topology(0)
    if topology.world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    topology.world.Barrier()
    Limits(topology.world, topology.local_rank, out).measure()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
