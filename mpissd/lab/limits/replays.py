"""Measures floors, forwards, all-reduces and launches of these ranks against the memory's limit.

    mpirun -np T python -m mpi4py -m mpissd.lab.limits.replays OUT [REPLAYS]

(results/h200-limit/measure.sh runs it.) One rank a GPU. Every number is a median over replays of a
captured graph in which each forward reads every weight; replays follow each other at once. Tokens
are random. The outputs are filled with NaN before, and checked after: they must be finite, and
equal up to rounding to those of cuBLAS with the portable all-reduce. The floor is the weights'
bytes over the read rate measured in the same job. What has a bar is measured in RUNS runs of
REPLAYS replays (default 2000). Rows go to OUT/T1.jsonl (T2 …) and, as lines, to stdout;
limits/bars.py makes the table.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError, GateError
from mpissd.common.presets import resolve_model
from mpissd.common.records import is_stable
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.comm.topology import open_topology
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper
from mpissd.lab.limits.bar import RUNS
from mpissd.lab.limits.bars import add
from mpissd.lab.limits.table import line_of

_READ_BYTES = 4 * 10**9
_QUEUED = 4  # Replays one after another, of which the last is timed.
# Samples of a forward without a bar; skipped samples of a run; all-reduces in one graph.
_SAMPLES, _SKIPPED, _REDUCES = 30, 3, 64
_STABLE = 0.02  # The largest difference between the blocks of a stable run.
_HALF_EPSILON = 2.0**-11
_HIDDEN = 8192  # The width of the all-reduced vectors.
_WAITER = Waiter(60.0, spin=True)


@dataclass(frozen=True)
class Forward:
    """The row counts that are measured for a model, and those that have a bar."""

    model: str
    rows: tuple[int, ...]
    barred: tuple[int, ...]


FORWARDS = {  # By T. 5 and 8 rows are verifications of K = 4 and 7.
    1: (Forward("8b", (1, 5, 16), (16,)), Forward("1b", (1, 24), (1, 24))),
    2: (Forward("70b", (1, 8, 16), (16,)),),
    4: (Forward("70b", (1, 8, 16), (16,)),),
}


class Limits:
    """Measures on the ranks of `comm`, which call every method together."""

    def __init__(self, comm: MPI.Comm, local_rank: int, out: Path, replays: int) -> None:
        self.comm, self.local_rank, self.out = comm, local_rank, out
        self.run_samples = _SKIPPED + max(1, replays // _QUEUED)
        self.read_rate, self.device = math.nan, ""

    def measure(self) -> None:
        """Measures everything that has a bar on this number of ranks."""
        with self._opened("auto") as (backend, group):
            self.device = backend.info.name
            rate = backend.read_bandwidth(_READ_BYTES)
            self.read_rate = float(self.comm.allreduce(rate, MPI.MIN))
            self._tell("read", rate_tb_per_s=self.read_rate / 1e12)
            if self.comm.size > 1:
                self._all_reduces(backend, group)
        for forward in FORWARDS.get(self.comm.size, ()):
            self._forwards(forward)
            if self.comm.size == 1:
                self._torch(forward)

    @contextmanager
    def _opened(self, all_reduce: str, *, chain: bool = True) -> Iterator[tuple[Any, Group]]:
        """Opens a backend and a group, and closes them in the right order."""
        from mpissd.engine.backend.cupy_backend import CupyBackend

        backend = CupyBackend(self.local_rank, chain=chain)
        group: Group = SoloGroup()
        try:
            if self.comm.size > 1:
                group = open_group(backend, self.comm, all_reduce, _WAITER)
            yield backend, group
        finally:
            group.close()
            backend.close()

    def _forwards(self, forward: Forward) -> None:
        """Measures the fast path and the cuBLAS path; raises GateError if they disagree."""
        results = {}
        for way, all_reduce, chain in (("fast", "auto", True), ("cublas", "nccl", False)):
            with self._opened(all_reduce, chain=chain) as (backend, group):
                results[way] = self._way(way, backend, group, forward)
        allowed = _HALF_EPSILON * math.sqrt(2 * 4 * resolve_model(forward.model).num_layers)
        for rows, expected in results["cublas"].items():
            error = np.linalg.norm(results["fast"][rows] - expected) / np.linalg.norm(expected)
            self._tell("agreement", model=forward.model, rows=rows, error=float(error), bar=allowed)
            if not error <= allowed:
                raise GateError(f"{forward.model}, {rows} rows: not what cuBLAS gives")

    def _way(self, way: str, backend: Any, group: Group, forward: Forward) -> dict[int, Any]:
        """Times each row count; returns the hidden vectors of the last forward of each, {rows:
        array}."""
        shard = Shard(resolve_model(forward.model), self.comm.size, self.comm.rank)
        options = ForwardOptions(fuse=True)
        stepper = Stepper(
            backend, group, shard, options, buckets=forward.rows, num_sequences=1, seed=1
        )
        hidden, name = {}, shard.shape.name
        for rows in forward.rows:
            at_stake = way == "fast" and rows in forward.barred
            for _ in range(RUNS if at_stake else 1):
                taken, _ = self._timed(
                    stepper, rows, _QUEUED, self.run_samples if at_stake else _SAMPLES
                )
                self._tell_forward(forward, way, group.name, rows, taken)
            for _ in range(RUNS if rows == 1 else 0):
                alone, host = self._timed(stepper, rows, 1, 2 * _SAMPLES)
                times = {"seconds": float(np.median(host)), "forward_s": float(np.median(alone))}
                self._tell("launch", model=name, way=way, **times)
            hidden[rows] = self._checked(stepper, rows)
        stepper.close()
        return hidden

    def _timed(
        self, stepper: Stepper, rows: int, queued: int, samples: int
    ) -> tuple[list[float], list[float]]:
        """Times `samples` forwards; returns (device seconds, host seconds of the first launch) of
        each.

        The device seconds are those of the last of `queued` forwards in a row, on the slowest rank.
        """
        rng = np.random.default_rng(rows)
        taken, host = [], []
        for _ in range(samples):
            stepper.upload(rows, rng.integers(0, 1 << 30, rows).astype(np.int32))
            self.comm.Barrier()
            start = time.perf_counter()
            stepper.launch()
            host.append(time.perf_counter() - start)
            for _ in range(queued - 1):
                stepper.launch()
            stepper.wait(_WAITER)
            taken.append(stepper.elapsed_s())
        slowest = np.empty(samples)
        self.comm.Allreduce(np.array(taken), slowest, MPI.MAX)
        return slowest[_SKIPPED:].tolist(), host[_SKIPPED:]

    def _checked(self, stepper: Stepper, rows: int) -> Any:
        """Runs one forward into buffers filled with NaN and returns its hidden vectors.

        Raises GateError if an element was not written or is not finite.
        """
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
        for name, group in groups.items():
            for rows in (1, 8, 16):
                for _ in range(RUNS):
                    taken, error = self._all_reduce(backend, group, rows)
                    self._tell(
                        "all_reduce", group=name, own=name == own.name, bytes=rows * _HIDDEN * 2,
                        seconds=float(np.median(taken)), num_rounds=len(taken) * _REDUCES,
                        error=error,
                    )  # fmt: skip
        for group in groups.values():
            if group is not own:
                group.close()

    def _all_reduce(self, backend: Backend, group: Group, rows: int) -> tuple[list[float], float]:
        """Returns (seconds of one all-reduce in each graph of 64, relative error of the sums)."""
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
        for sample in range(33):
            for buffer in buffers:
                backend.from_host(values, buffer)
            self.comm.Barrier()
            program.launch()
            program.wait(_WAITER)
            if sample:
                times.append(self._slowest(program.elapsed_s()) / _REDUCES)
        for buffer in buffers:
            summed = backend.to_host(buffer)
            error = max(error, float(np.linalg.norm(summed - total) / np.linalg.norm(total)))
        program.close()
        return times, self._slowest(error)

    def _torch(self, forward: Forward) -> None:
        """Times the same fused products as a CUDA graph of PyTorch, if it is installed."""
        try:
            from mpissd.lab.limits.torch_graph import graph_seconds
        except ImportError as missing:
            self._tell("refused", why=f"PyTorch's column: {missing}")
            return
        shard = Shard(resolve_model(forward.model))
        shapes = shard.products(ForwardOptions(fuse=True))
        for rows in forward.rows:
            layers = shard.shape.num_layers
            taken = graph_seconds(shapes, layers, rows, self.local_rank, _SAMPLES, _QUEUED)
            self._tell_forward(forward, "torch", "solo", rows, taken)

    def _tell_forward(
        self, forward: Forward, way: str, group: str, rows: int, taken: list[float]
    ) -> None:
        shard = Shard(resolve_model(forward.model), self.comm.size)
        weights = shard.cost(rows, 1, 2, ForwardOptions(fuse=True)).weight_bytes
        floor_s, seconds = weights / self.read_rate, float(np.median(taken))
        self._tell(
            "forward", model=shard.shape.name, way=way, group=group, rows=rows, seconds=seconds,
            p99_s=float(np.percentile(taken, 99)), floor_s=floor_s,
            floor_fraction=floor_s / seconds, num_rounds=len(taken) * _QUEUED,
            stable=is_stable(taken, _STABLE),
        )  # fmt: skip

    def _slowest(self, value: float) -> float:
        return float(self.comm.allreduce(value, MPI.MAX))

    def _tell(self, what: str, **values: Any) -> None:
        row = {"what": what, "tp": self.comm.size, "device": self.device, **values}
        if self.comm.rank == 0:
            add(self.out, [row])
            print(line_of(row), flush=True)


def main(arguments: Sequence[str]) -> int:
    """Measures on the ranks of the world and returns the exit code."""
    out, replays = (*arguments, "2000")[:2]
    topology = open_topology(0)
    if topology.world.rank == 0:
        Path(out).mkdir(parents=True, exist_ok=True)
    topology.world.Barrier()
    Limits(topology.world, topology.local_rank, Path(out), int(replays)).measure()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
