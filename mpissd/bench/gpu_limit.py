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
from mpissd.comm.group import Group, SoloGroup
from mpissd.comm.mpi_group import open_group
from mpissd.comm.topology import open_topology
from mpissd.errors import ConfigError
from mpissd.model.shard import ForwardOptions, Shard
from mpissd.model.stepper import Stepper
from mpissd.presets import resolve_model
from mpissd.wait import Waiter

_READ_BYTES = 4 * 10**9
_QUEUED = 4  # replays in a row, of which the last counts
_SAMPLES, _REDUCES = 60, 64
_HALF_EPSILON = 2.0**-11
_HIDDEN = 8192  # of the all-reduced vectors
_WAITER = Waiter(60.0, spin=True)


@dataclass(frozen=True)
class Forward:
    """What is measured of a model on T ranks: {rows: bar}, of the floor or in seconds."""

    model: str
    bars: dict[int, float | None]
    in_seconds: bool = False


FORWARDS = {
    1: (
        Forward("8b", {1: 0.92, 5: None, 8: None, 16: 0.88}),
        Forward("1b", {1: 0.56e-3, 24: 0.60e-3}, in_seconds=True),
    ),
    2: (Forward("70b", {1: 0.87, 5: None, 8: None, 16: 0.83}),),
    4: (Forward("70b", {1: 0.80, 5: None, 8: None, 16: 0.76}),),
}
REDUCE_BARS_S = {2: 3.8e-6, 4: 4.8e-6}  # of 16 KB; of 128 KB: NCCL's in the same job
LAUNCH_BAR_S = 10e-6


class Limits:
    """Measures on the ranks of `comm`, which call every method together."""

    def __init__(self, comm: MPI.Comm, local_rank: int, out: Path) -> None:
        self.comm, self.local_rank, self.out = comm, local_rank, out
        self.rows: list[dict[str, Any]] = []
        self.read_rate = math.nan
        self.device = ""

    @contextmanager
    def opened(self, all_reduce: str, *, chain: bool = True) -> Iterator[tuple[Any, Group]]:
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

    def measure(self) -> None:
        """Everything that this number of ranks has bars for."""
        with self.opened("auto") as (backend, group):
            self.device = backend.info.name
            self.read_rate = self._slowest_rate(backend)
            self._tell("read", rate_tb_per_s=self.read_rate / 1e12)
            if self.comm.size > 1:
                self._all_reduces(backend, group)
        for forward in FORWARDS.get(self.comm.size, ()):
            for fuse in (True, False):
                found = {}
                for way, all_reduce, chain in self._ways(fuse):
                    with self.opened(all_reduce, chain=chain) as (backend, group):
                        found[way] = self._forwards(way, backend, group, forward, fuse)
                self._compare(found, forward)
            if self.comm.size == 1:
                self._torch(forward)

    def _ways(self, fuse: bool) -> Iterable[tuple[str, str, bool]]:
        """(name, all-reduce, chained?): the fast path; its slow twin only where it tells more."""
        yield "fast", "auto", True
        if fuse:
            yield "cublas", "nccl", False

    def _forwards(
        self, way: str, backend: Any, group: Group, forward: Forward, fuse: bool
    ) -> dict[int, Any]:
        """Times each row count; the hidden vectors of the last forward of each."""
        shard = Shard(resolve_model(forward.model), self.comm.size, self.comm.rank)
        options = ForwardOptions(fuse=fuse)
        stepper = Stepper(
            backend, group, shard, options, buckets=forward.bars, num_sequences=1, seed=1
        )
        hidden = {}
        for rows, bar in forward.bars.items():
            floor_s = stepper.cost(rows).weight_bytes / self.read_rate
            alone, queued, host = self._timed(stepper, rows)
            hidden[rows] = self._checked(stepper, rows)
            self._tell(
                "forward", model=shard.shape.name, way=way, fuse=fuse, group=group.name, rows=rows,
                seconds=queued, alone_s=alone, launch_s=host, floor_s=floor_s,
                floor_fraction=floor_s / queued, bar=bar, in_seconds=forward.in_seconds,
            )  # fmt: skip
        stepper.close()
        return hidden

    def _timed(self, stepper: Stepper, rows: int) -> tuple[float, float, float]:
        """Medians: a forward launched alone, one behind others, host seconds of a launch."""
        rng = np.random.default_rng(rows)
        alone: list[float] = []
        queued: list[float] = []
        host: list[float] = []
        for sample in range(_SAMPLES):
            stepper.upload(rows, rng.integers(0, 1 << 30, rows).astype(np.int32))
            for count, times in ((1, alone), (_QUEUED, queued)):
                self.comm.Barrier()
                start = time.perf_counter()
                for _ in range(count):
                    stepper.launch()
                launched = time.perf_counter() - start
                stepper.wait(_WAITER)
                if sample >= 3:
                    times.append(self._slowest(stepper.elapsed_s()))
                    host += [launched] if count == 1 else []
        return float(np.median(alone)), float(np.median(queued)), float(np.median(host))

    def _checked(self, stepper: Stepper, rows: int) -> Any:
        """The hidden vectors of a forward into poisoned buffers, all of whose places it wrote."""
        memory, backend = stepper.stack.buffers, stepper.backend
        names = ("hidden", "qkv", "middle", "gate_up")
        for name in names:
            array = getattr(memory, name)
            backend.from_host(np.full(array.shape, np.nan, np.float32), array)
        stepper.upload(rows, np.arange(rows, dtype=np.int32))
        self.comm.Barrier()
        stepper.launch()
        stepper.wait(_WAITER)
        for name in names:
            found = backend.to_host(getattr(memory, name))[:rows]
            if not np.isfinite(found).all():
                raise ConfigError(f"{stepper.shard.shape.name}: {name} of {rows} rows: not written")
        return backend.to_host(memory.hidden)[:rows]

    def _compare(self, found: dict[str, dict[int, Any]], forward: Forward) -> None:
        """The fast path's hidden vectors against its slow twin's."""
        if "cublas" not in found:
            return
        layers = resolve_model(forward.model).num_layers
        allowed = _HALF_EPSILON * math.sqrt(2 * 4 * layers)
        for rows, expected in found["cublas"].items():
            error = np.linalg.norm(found["fast"][rows] - expected) / np.linalg.norm(expected)
            self._tell("agreement", model=forward.model, rows=rows, error=float(error), bar=allowed)

    def _all_reduces(self, backend: Any, own: Group) -> None:
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
            bar = REDUCE_BARS_S.get(self.comm.size) if rows == 1 else None
            if rows == 8 and ("nccl", 8) in found:
                bar = found["nccl", 8][0]
            size = rows * _HIDDEN * 2
            self._tell("all_reduce", group=name, bytes=size, seconds=seconds, error=error, bar=bar)
        for group in groups.values():
            if group is not own:
                group.close()

    def _all_reduce(self, backend: Backend, group: Group, rows: int) -> tuple[float, float]:
        """(seconds of one in a graph of 64, relative error of the sums)."""
        buffers = [backend.activation(rows, _HIDDEN) for _ in range(_REDUCES)]
        rng = np.random.default_rng((self.comm.rank, rows))
        values = rng.standard_normal((rows, _HIDDEN)).astype(np.float16).astype(np.float32) / 64
        total = self.comm.allreduce(values.astype(np.float16).astype(np.float32))

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
            import torch  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return
        shard = Shard(resolve_model(forward.model))
        shapes = shard.products(ForwardOptions(fuse=True))
        layers = range(shard.shape.num_layers)
        kind: dict[str, Any] = {"device": f"cuda:{self.local_rank}", "dtype": torch.float16}
        weights = [
            [torch.randn(shape, **kind) * shape[0] ** -0.5 for shape in shapes] for _ in layers
        ]
        for rows in forward.bars:
            outs = [torch.empty((rows, columns), **kind) for _, columns in shapes]
            first = torch.randn((rows, shapes[0][0]), **kind)

            def body(weights: Any = weights, outs: Any = outs, first: Any = first) -> None:
                x = first
                for layer in weights:
                    for weight, out in zip(layer, outs, strict=True):
                        torch.mm(x[:, : len(weight)], weight, out=out)
                        x = out

            seconds = _torch_graph_s(torch, body)
            floor_s = (
                shard.cost(rows, 1, 2, ForwardOptions(fuse=True)).weight_bytes / self.read_rate
            )
            self._tell(
                "forward", model=shard.shape.name, way="torch", fuse=True, group="solo", rows=rows,
                seconds=seconds, floor_s=floor_s, floor_fraction=floor_s / seconds,
                in_seconds=forward.in_seconds,
            )  # fmt: skip
        weights.clear()
        torch.cuda.empty_cache()

    def _slowest_rate(self, backend: Backend) -> float:
        rate = backend.read_bandwidth(_READ_BYTES)
        assert rate is not None, "a GPU's read rate is measured"
        return float(self.comm.allreduce(rate, MPI.MIN))

    def _slowest(self, value: float) -> float:
        return float(self.comm.allreduce(value, MPI.MAX))

    def _tell(self, what: str, **found: Any) -> None:
        row = {"what": what, "tp": self.comm.size, "device": self.device, **found}
        self.rows.append(row)
        if self.comm.rank == 0:
            with open(self.out / "gpu_limit.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(line_of(row), flush=True)


def _torch_graph_s(torch: Any, body: Any) -> float:
    """Median seconds of a replay behind others."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    times = []
    for _ in range(_SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(_QUEUED - 1):
            graph.replay()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(np.median(times))


def line_of(row: dict[str, Any]) -> str:
    """A row of the table."""
    what, bar = row["what"], row.get("bar")
    if what == "read":
        return f"{row['device']}: reads {row['rate_tb_per_s']:.3f} TB/s"
    if what == "all_reduce":
        told = f"all-reduce {row['group']:8s} T={row['tp']} {row['bytes'] >> 10:4d} KB"
        told += f" {1e6 * row['seconds']:6.2f} us, error {row['error']:.1e}"
        return told + verdict(row["seconds"], bar, scale=1e6, unit="us")
    if what == "agreement":
        told = f"agreement {row['model']} T={row['tp']} M={row['rows']}: {row['error']:.1e}"
        return told + verdict(row["error"], bar, scale=1.0, unit="")
    if what != "forward":
        return f"{what}: {row['why']}"
    told = f"{row['model']} T={row['tp']} M={row['rows']:<2d} {row['way']:6s} {row['group']:7s} "
    told += f"{'fused' if row['fuse'] else 'seven'} {1e3 * row['seconds']:7.3f} ms"
    told += f" = {row['floor_fraction']:.3f} of the floor"
    if "launch_s" in row:
        told += f", alone {1e3 * row['alone_s']:.3f} ms, launch {1e6 * row['launch_s']:.1f} us"
    if row["in_seconds"]:
        return told + verdict(row["seconds"], bar, scale=1e3, unit="ms")
    return told + verdict(-row["floor_fraction"], bar and -bar, scale=-1.0, unit="")


def verdict(value: float, bar: float | None, *, scale: float, unit: str) -> str:
    """'  (bar 3.8 us: met)'; smaller is better."""
    if bar is None:
        return ""
    return f"  (bar {scale * bar:.3g}{unit and ' ' + unit}: {'met' if value <= bar else 'MISSED'})"


def main() -> int:
    """Measures on the ranks of the world."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    topology = open_topology(0)
    if topology.world.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
    topology.world.Barrier()
    Limits(topology.world, topology.local_rank, out).measure()
    return 0


if __name__ == "__main__":
    sys.exit(main())
