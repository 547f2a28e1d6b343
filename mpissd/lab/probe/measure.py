"""Times forwards by row count and all-reduces by size, and checks the sums of the all-reduces.

Each compiled program (on GPUs a CUDA graph) is launched repeatedly within a time budget. A rank
that finds a wrong sum adds it to `faults` and continues, because other ranks wait for it in
collectives; all ranks stop together at the end of the stage.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf, prod
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost, Program
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard, ReadOut
from mpissd.engine.model.stepper import ModelSource, Stepper, Weights
from mpissd.lab.measure.calibrate import forwards

Entry = dict[str, Any]  # an entry of a table in a device profile, as a JSON object

ROWS = (1, 2, 4, 8, 16, 32, 64)
FORWARD_ROWS = (*ROWS, 24, 128, 256)
TRANSFORMER_ROWS = (*ROWS, 24)  # row counts for transformers, each timed at several contexts
LARGE_BYTES = 1 << 20
NEAR, FAR = 64, 1024  # shortest and longest context in tokens at which transformers are timed
_LISTS = (1, 4, 16, 32, 64)  # values of k for which the selection of the top k tokens is timed
_KERNEL_BYTES = 1 << 30  # device memory for kernels, graphs and activations, beyond weights and KV
_CHAIN = {"gpu": 16, "cpu": 8, "emulated": 16}  # number of operations in one timed launch
# {device: (seconds of warm-up, seconds to time for, fewest launches, most launches)}
# GPUs are warmed up, because an H200 reads slowly for some ms after an allocation.
_PACE = {"gpu": (0.03, 0.05, 5, 25), "cpu": (0.0, 0.06, 5, 25), "emulated": (0.0, 0.0, 1, 1)}
_NOTHING = Cost(1, 0, 0, 0, 0, 0, 0, 1)


def contexts(longest: int, *, ends: bool = False) -> list[int]:
    """Returns the context lengths at which a transformer is timed: the shortest, the longest and
    two between, from which other contexts are interpolated linearly. longest: the job's context.
    ends: whether to leave out the two between."""
    far = max(longest, FAR)
    return [NEAR, far] if ends else [NEAR, far // 4, far // 2, far]


def entry(identity: Mapping[str, Any], source: str, times: Mapping[int, Any]) -> Entry:
    """Makes an entry of a profile's table: the median seconds, the spread (interquartile range /
    median; None if the median is 0) and the number of launches at each point, which is a row count
    or a number of bytes. identity: keys that say what was measured. source: text that says how it
    was measured. times: {point: seconds of each launch}."""
    seconds, spread = dict[str, float](), dict[str, float | None]()
    for at, taken in times.items():
        low, seconds[str(at)], high = (float(q) for q in np.percentile(taken, [25, 50, 75]))
        spread[str(at)] = (high - low) / seconds[str(at)] if seconds[str(at)] else None
    counts = {str(at): len(taken) for at, taken in times.items()}
    about = {**identity, "from": source}
    return {**about, "seconds": seconds, "spread": spread, "num_launches": counts}


class GroupProbe:
    """Times compiled programs on all ranks of an MPI communicator, which must all call each method.
    faults: list to which the wrong sums found on this rank are added. source: text that says how
    entries were measured. show: function called between launches, to show progress."""

    show: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, backend: Backend, comm: MPI.Comm, waiter: Waiter, faults: list[str], source: str
    ) -> None:
        self._backend, self._comm, self._waiter = backend, comm, waiter
        self._faults, self._source = faults, source
        self._kind = backend.info.kind
        self._real = self._kind != "emulated"
        self.read_outs: list[Entry] = []

    def times(
        self, onces: Mapping[int, Callable[[], float]], per: int = 1
    ) -> dict[int, NDArray[np.float64]]:
        """Returns {point: seconds of an operation in each launch}. onces: {point: function that
        launches `per` operations once and returns the seconds}. The points take turns, so that a
        short disturbance shifts no median. All ranks launch equally often. The shortest time of any
        rank counts: it began last, and the others waited for it."""
        warm_s, budget_s, least, most = _PACE[self._kind]
        counts, seconds = {}, dict[int, list[float]]()
        for at, once in onces.items():
            once()  # The first launch also loads libraries, so it is not timed.
            first = max(self._comm.allreduce(once(), op=MPI.MAX), 1e-6)
            counts[at] = int(min(max(budget_s / first, least), most))
            for _ in range(int(min(warm_s / first, 200))):
                once()
            self.show()
        for turn in range(max(counts.values())):
            self.show()
            for at in (at for at, count in counts.items() if turn < count):
                seconds.setdefault(at, []).append(onces[at]())
        by_point = {at: np.array(taken) / per for at, taken in seconds.items()}
        for taken in by_point.values():
            self._comm.Allreduce(MPI.IN_PLACE, taken, op=MPI.MIN)
        return by_point

    def _once(self, program: Program) -> float:
        program.launch()
        program.wait(self._waiter)
        return program.elapsed_s()

    def forwards(
        self,
        group: Group,
        shard: AnyShard,
        options: ForwardOptions,
        rows: Sequence[int],
        sequences: int,
        most_rows: int | None = None,
        model: tuple[ModelSource, Weights | None] = (ModelSource(), None),
    ) -> Entry:
        """Times one model's forwards at each row count; returns the entry for the profile's table
        "forwards". sequences: batch size. most_rows: largest row count of jobs that use this kernel
        (None: no limit). model: (source of the weights, weights); default: random matrices."""
        stepper = Stepper(
            self._backend,
            group,
            shard,
            options,
            buckets=rows,
            num_sequences=sequences,
            seed=1,
            model=model[0],
            weights=model[1],
        )

        try:
            timed = {n: forwards(stepper, n, sequences, self._waiter) for n in stepper.buckets}
            taken = self.times({rows: partial(next, each) for rows, each in timed.items()})
            if self._real and options.top_k > 1 and not self.read_outs:
                self.read_outs = self._lists(stepper)
        finally:
            stepper.close()
        which = vars(shard.key(sequences, options)) | {"params": shard.num_params(options)}
        which |= {"kernel": stepper.kernel, "most_rows": most_rows}
        return entry(which, self._source, taken)

    def _lists(self, stepper: Stepper) -> list[Entry]:
        """Times the selection of the top k tokens per row, for k = 1 … 64, and their copy to the
        host, on the logits of the last forward; returns an entry for each k. Each program repeats
        the selection, so that launch overhead hardly counts."""
        kind = stepper.shard.key(1, stepper.options).forward
        length, columns, entries = _CHAIN[self._kind], stepper.cost(1).columns, list[Entry]()
        for k in (k for k in _LISTS if k <= columns):
            taken = dict[int, Any]()
            for rows in (n for n in ROWS if n <= stepper.most_rows):
                values = stepper.options.values
                read_out = ReadOut(self._backend, SoloGroup(), rows, k, values=values)
                find = stepper.stack.best(rows)

                def body(
                    out: ReadOut = read_out, find: Any = find, n: int = rows, k: int = k
                ) -> None:
                    for _ in range(length):
                        out.issue(find, n, k)

                program = self._backend.program(body, _NOTHING)
                taken |= self.times({rows: partial(self._once, program)}, length)
                program.close()
            identity = {"columns": columns, "forward": kind, "candidates": k}
            entries.append(entry(identity, self._source, taken))
        return entries

    def empty(self) -> Entry:
        """Times an empty program on the device; returns the entry for the table "launches"."""
        program = self._backend.program(lambda: None, _NOTHING)
        taken = self.times({1: partial(self._once, program)})[1]
        program.close()
        return {"what": "empty", "from": self._source, "device_s": float(np.median(taken))}

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
        """Times a transformer's forwards at each batch size and context length; returns the entries
        for the table "forwards", without those whose KV cache does not fit in memory. ends: whether
        only the shortest and the longest context are timed."""
        most, itemsize = rows[-1], self._backend.itemsize
        weights = source.weights(self._backend, shard, options, max_rows=most, seed=1)
        entries = []
        for batch in batches:
            for context in contexts(options.context, ends=ends):
                past = replace(options, context=context, capacity=context + most)
                needed = shard.weight_bytes(past, itemsize) + _KERNEL_BYTES
                needed += shard.cache_bytes(most, batch, past, itemsize)
                fits = needed <= (self._backend.info.memory_bytes or inf)
                if self._comm.allreduce(fits, op=MPI.LAND):
                    model = source, weights
                    entries.append(self.forwards(group, shard, past, rows, batch, model=model))
        return entries

    def all_reduces(self, group: Group, hidden: int) -> Entry:
        """Times all-reduces of 1 … 64 hidden vectors of length `hidden`, and of 1 MiB; returns the
        entry for the table "all_reduces"."""
        itemsize = self._backend.itemsize
        shapes = sorted(
            [*((rows, hidden) for rows in ROWS), (1, LARGE_BYTES // itemsize)], key=prod
        )
        taken = {prod(shape) * itemsize: self._all_reduce(group, *shape) for shape in shapes}
        graph = not self._real or (group.capturable and self._backend.capture)
        name = group.name if self._real else "modelled"
        return entry({"name": name, "ranks": self._comm.size, "graph": graph}, self._source, taken)

    def _all_reduce(self, group: Group, rows: int, width: int) -> Any:
        """Times one all-reduce of [rows, width] values and checks its sums; returns the seconds of
        each launch. A program reduces several buffers in sequence. They are refilled before every
        launch, because repeated sums would overflow float16."""
        count, backend = _CHAIN[self._kind], self._backend
        buffers = [backend.activation(rows, width) for _ in range(count)]

        def body() -> None:
            for buffer in buffers:
                group.all_reduce(buffer)

        size = rows * width * backend.itemsize
        cost = Cost(rows, 0, 0, 0, 0, count, size, self._comm.size)
        program = backend.program(body, cost, capturable=group.capturable)
        # Sums of multiples of 1/64 within ±1/4, over up to 32 ranks, are exact in float16.
        place, ranks = np.arange(rows * width).reshape(rows, width), range(self._comm.size)
        parts = [((place * 7 + r * 13) % 33 - 16).astype(np.float32) / 64 for r in ranks]
        mine = parts[self._comm.rank].astype(np.float16 if backend.itemsize == 2 else np.float32)

        def check(what: str) -> None:
            for buffer in buffers if self._real else ():
                if wrong := int((backend.to_host(buffer) != sum(parts)).sum()):  # NaN is wrong
                    self._faults.append(f"{what}: {wrong} of {rows * width} values are wrong")

        def once() -> float:
            if self._real:
                for buffer in buffers:
                    backend.from_host(mine, buffer)
                self._waiter.until(self._comm.Ibarrier().Test, "the ranks of an all-reduce")
            return self._once(program)

        what = f"all-reduce {group.name} of {size} B"
        once()
        check(what)
        taken = self.times({1: once}, count)[1]
        check(f"{what}, repeated")
        program.close()
        return taken
