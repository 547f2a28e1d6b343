"""Measures collectives of T ranks: whole forwards by rows, and all-reduces by bytes.

All-reduces are timed in a chain, one after the other over separate buffers, inside one program.
Before every launch the buffers are filled anew, because repeated sums would exceed float16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard, ReadOut
from mpissd.engine.model.stepper import ModelSource, Stepper, Weights
from mpissd.engine.workload.sequence import timed_places
from mpissd.lab.probe.sample import (
    Checks,
    Entry,
    Pace,
    Sample,
    entry,
    launched,
    sample,
    samples,
)

ROWS = (1, 2, 4, 8, 16, 32, 64)
FORWARD_ROWS = (*ROWS, 24, 128, 256)
LISTS = (1, 4, 16, 32, 64)  # candidates a row
TRANSFORMER_ROWS = (*ROWS, 24)  # fewer, because each is measured after several contexts
GPU_ROWS = (40, 128, 256)  # and these on a GPU, whose kernel for more than 32 rows is another one
SHARDS = (2, 3, 4)  # numbers of ranks whose share one rank measures, without all-reduces
LARGE_BYTES = 1 << 20
NEAR = 64  # the shortest context of a transformer's measurement
_FAR = 1024  # the longest one, unless --context is longer
_CHAIN = {"gpu": 16, "cpu": 8, "emulated": 16}
NOTHING = Cost(1, 0, 0, 0, 0, 0, 0, 1)

Made = tuple[ModelSource, Weights]  # weights, and what they were made from


def contexts(longest: int, *, ends: bool = False) -> list[int]:
    """Returns the contexts after which transformers are measured: near, far and two between.

    Time grows in straight lines while all sequences' KV caches fit in one level of memory. ends:
    near and far only.
    """
    far = max(longest, _FAR)
    return [NEAR, far] if ends else [NEAR, far // 4, far // 2, far]


class GroupProbe:
    """Measures on all ranks of `comm`; every method is collective."""

    def __init__(
        self, backend: Backend, comm: MPI.Comm, waiter: Waiter, checks: Checks, source: str
    ) -> None:
        self._backend, self._comm, self._waiter = backend, comm, waiter
        self._checks, self._source = checks, source
        self._pace = Pace.of(backend.info)
        self._real = backend.info.kind != "emulated"
        self._together = comm if comm.size > 1 else None
        self.read_outs: list[Entry] = []  # of the first model measured that reads out lists

    def forwards(
        self,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        rows: Sequence[int],
        sequences: int,
        most_rows: int | None = None,
        model: Made | None = None,
    ) -> Entry:
        """Measures one model; returns its "forwards" entry by rows.

        most_rows: row limit of the jobs that run this kernel (None: no limit). model: weights to
        use (None: bare products, made here).
        """
        source, weights = model or (ModelSource(), None)
        stepper = Stepper(
            self._backend,
            group,
            shard,
            options,
            buckets=rows,
            num_sequences=sequences,
            seed=1,
            model=source,
            weights=weights,
        )
        try:
            onces = {rows: self._forward(stepper, rows, sequences) for rows in stepper.buckets}
            taken = samples(onces, self._pace, together=self._together)
            self._check_forward(stepper)
            kernel = stepper.kernel
            if options.top_k > 1 and not self.read_outs:
                self.read_outs = self._lists(stepper)
        finally:
            stepper.close()
        key, params = shard.key(sequences, options), shard.num_params(options)
        which = {"params": params, "kernel": kernel, "most_rows": most_rows}
        return entry(vars(key) | which, self._source, taken)

    def _lists(self, stepper: Stepper) -> list[Entry]:
        """Measures the choice and copy of 1 … 64 candidates a row, of the last forward's logits.

        They run in a chain, one after the other in one program, so that its launch does not
        matter. An emulated device has none.
        """
        if not self._real:
            return []
        key = stepper.shard.key(1, stepper.options)
        columns = stepper.cost(1).columns
        rows = [n for n in ROWS if n <= stepper.most_rows]
        return [
            entry(
                {"columns": columns, "forward": key.forward, "candidates": k},
                self._source,
                {n: self._list(stepper, n, k) for n in rows},
            )
            for k in LISTS
            if k <= columns
        ]

    def _list(self, stepper: Stepper, rows: int, k: int) -> Sample:
        length = _CHAIN[self._backend.info.kind]
        read_out = ReadOut(self._backend, SoloGroup(), rows, k, values=stepper.options.values)
        find = stepper.stack.best(rows)

        def body() -> None:
            for _ in range(length):
                read_out.issue(find, rows, k)

        program = self._backend.program(body, NOTHING)
        taken = sample(launched(program.launch, program, self._waiter), self._pace, per=length)
        program.close()
        return taken

    def empty(self) -> Entry:
        """Measures an empty program: the host's part of its launch, and the device's time."""
        program, host = self._backend.program(lambda: None, NOTHING), list[float]()

        def launch() -> None:
            start = perf_counter()
            program.launch()
            host.append(perf_counter() - start)

        device = sample(launched(launch, program, self._waiter), self._pace)
        program.close()
        host_s = float(np.median(host))
        return {
            "what": "empty",
            "from": self._source,
            "host_s": host_s,
            "device_s": device.seconds,
        }

    def all_reduces(self, groups: Mapping[str, Group], hidden: int) -> list[Entry]:
        """Measures every group's all-reduce of ROWS hidden vectors and of 1 MB, in a graph and
        eagerly."""
        itemsize = self._backend.itemsize
        widths = [(rows, hidden) for rows in ROWS] + [(1, LARGE_BYTES // itemsize)]
        entries = []
        for name, group in groups.items():
            for graph in self._ways(group):
                taken = {
                    rows * width * itemsize: self._all_reduce(group, rows, width, graph)
                    for rows, width in widths
                }
                identity = {"name": name, "ranks": self._comm.size, "graph": graph}
                entries.append(entry(identity, self._source, dict(sorted(taken.items()))))
        return entries

    def _ways(self, group: Group) -> tuple[bool, ...]:
        if not self._real:
            return (True,)
        return (True, False) if group.capturable and self._backend.capture else (False,)

    def transformer(
        self,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        rows: Sequence[int],
        batches: Iterable[int],
        source: ModelSource,
        *,
        ends: bool = False,
    ) -> list[Entry]:
        """Measures a transformer for each number of sequences after each of `contexts`.

        ends: as `contexts` takes it. Returns the "forwards" entries. What does not fit in memory
        with the weights is left out.
        """
        weights = source.weights(self._backend, shard, options, max_rows=rows[-1], seed=1)
        forwards = []
        for batch in batches:
            for context in contexts(options.context, ends=ends):
                behind = replace(options, context=context, capacity=context + rows[-1])
                if not self._has_room(shard, behind, rows[-1], batch):
                    continue
                model = source, weights
                forwards.append(self.forwards(group, shard, behind, rows, batch, None, model))
        return forwards

    def _has_room(
        self, shard: AnyShard, options: ForwardOptions, rows: int, sequences: int
    ) -> bool:
        """Returns whether weights and KV cache fit on every rank; True if memory is unknown."""
        size = self._backend.itemsize
        needed = shard.weight_bytes(options, size)
        needed += shard.cache_bytes(rows, sequences, options, size)
        room = self._backend.info.memory_bytes
        return bool(self._comm.allreduce(room is None or needed <= room, op=MPI.LAND))

    def _forward(self, stepper: Stepper, rows: int, sequences: int) -> Callable[[], float]:
        tokens = np.arange(rows, dtype=np.int32)
        places = timed_places(rows, sequences, stepper.options)

        # The tokens are uploaded each time, because forwards of other row counts run in between.
        def launch() -> None:
            stepper.upload(rows, tokens, places)
            stepper.launch()

        return launched(launch, stepper, self._waiter)

    def _check_forward(self, stepper: Stepper) -> None:
        """Checks that the hidden vectors are finite, not all equal, and the same on every rank."""
        if not self._real:
            return
        rows = stepper.buckets[-1]
        places = timed_places(rows, 1, replace(stepper.options, context=0))
        stepper.upload(rows, np.arange(rows, dtype=np.int32), places)
        stepper.launch()
        stepper.wait(self._waiter)
        hidden = self._backend.to_host(stepper.stack.buffers.hidden)[:rows]
        what = f"{stepper.shard.shape.name}: hidden vectors of {rows} rows"
        spread = float(hidden.std())
        self._checks.expect(bool(np.isfinite(hidden).all()), f"{what}: not finite")
        self._checks.expect(spread > 0 or not np.isfinite(spread), f"{what}: all equal")
        leads = self._comm.bcast(hidden[:, :64])
        self._checks.close(hidden[:, :64], leads, 0.01 * spread, f"{what}: unlike the lead's")

    def _all_reduce(self, group: Group, rows: int, width: int, graph: bool) -> Sample:
        count, backend = _CHAIN[self._backend.info.kind], self._backend
        dtype = np.float16 if backend.itemsize == 2 else np.float32
        buffers = [backend.activation(rows, width) for _ in range(count)]

        def body() -> None:
            for buffer in buffers:
                group.all_reduce(buffer)

        size = rows * width * backend.itemsize
        cost = Cost(rows, 0, 0, 0, 0, count, size, self._comm.size)
        program = backend.program(body, cost, capturable=graph)
        parts = [addend(rank, rows, width) for rank in range(self._comm.size)]
        mine, wanted = parts[self._comm.rank].astype(dtype), sum(parts)
        timed = launched(program.launch, program, self._waiter)

        def check(what: str) -> None:
            for buffer in buffers if self._real else ():
                self._checks.close(backend.to_host(buffer), wanted, 0.0, what)

        def once() -> float:
            if self._real:
                for buffer in buffers:
                    backend.from_host(mine, buffer)
                self._waiter.until(self._comm.Ibarrier().Test, "the ranks of an all-reduce")
            return timed()

        what = f"all-reduce {group.name} of {size} B"
        once()
        check(what)
        taken = sample(once, self._pace, per=count, together=self._together)
        check(f"{what}, repeated")
        program.close()
        return taken


def addend(rank: int, rows: int, width: int) -> NDArray[np.float32]:
    """Returns a rank's test values [rows, width] for an all-reduce.

    They are multiples of 1/64 within ±1/4: sums over up to 32 ranks are exact in float16, in any
    order. Their order differs from rank to rank.
    """
    place = np.arange(rows * width).reshape(rows, width)
    return np.asarray(((place * 7 + rank * 13) % 33 - 16) / 64, np.float32)


def open_groups(
    own: Group, backend: Backend, comm: MPI.Comm, waiter: Waiter, *, cuda_aware: bool
) -> tuple[dict[str, Group], list[str]]:
    """Opens every all-reduce that is possible here; collective.

    Returns ({name: group}, reasons why others are not possible). `own`, the job's group, is among
    them; the caller closes the others after their programs.
    """
    if backend.info.kind == "emulated":
        return {"modelled": own}, []
    if backend.info.kind == "cpu":
        return {own.name: own}, []
    groups, refused = {own.name: own}, []
    for choice in ("oneshot", "nccl", "staged") + ("device",) * cuda_aware:
        if choice in groups:
            continue
        try:
            groups[choice] = open_group(backend, comm, choice, waiter)
        except ConfigError as error:  # All ranks raise the same error here.
            refused.append(str(error))
    return groups, refused
