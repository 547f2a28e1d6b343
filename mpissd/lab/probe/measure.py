"""Measures forwards by rows, and all-reduces by bytes, whose sums it checks.

Launches are sampled within a time budget. A rank that finds a wrong sum continues, so that the
others are not left waiting in a collective: it adds a line to `faults`, and all ranks stop together
at the end of the stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
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

Entry = dict[str, Any]  # An entry of one of a profile's tables, as JSON.

ROWS = (1, 2, 4, 8, 16, 32, 64)
FORWARD_ROWS = (*ROWS, 24, 128, 256)
TRANSFORMER_ROWS = (*ROWS, 24)  # fewer, because each is measured after several contexts
LARGE_BYTES = 1 << 20
NEAR, FAR = 64, 1024  # contexts of transformers; --context may be longer than FAR
_LISTS = (1, 4, 16, 32, 64)  # candidates a row
_CHAIN = {"gpu": 16, "cpu": 8, "emulated": 16}  # operations of one program, one after the other
# (seconds of warm-up, seconds of timed launches, the fewest and the most of these): GPUs are warmed
# up, as an H200 reads slowly for some ms after an allocation, and modelled durations never vary.
_PACE = {"gpu": (0.03, 0.05, 5, 25), "cpu": (0.0, 0.06, 5, 25), "emulated": (0.0, 0.0, 1, 1)}
_NOTHING = Cost(1, 0, 0, 0, 0, 0, 0, 1)


def contexts(longest: int, *, ends: bool = False) -> list[int]:
    """Returns the contexts after which transformers are measured: near, far and two between. Time
    grows in straight lines while all sequences' KV caches fit in one level of memory. ends: no
    others."""
    far = max(longest, FAR)
    return [NEAR, far] if ends else [NEAR, far // 4, far // 2, far]


def entry(identity: Mapping[str, Any], source: str, times: Mapping[int, Any]) -> Entry:
    """Makes one entry of a profile's table from the seconds of each launch, by rows or bytes. It
    has their number, their median, and their interquartile range over it (None if it is 0)."""
    seconds, spread = dict[str, float](), dict[str, float | None]()
    for at, taken in times.items():
        low, seconds[str(at)], high = (float(q) for q in np.percentile(taken, [25, 50, 75]))
        spread[str(at)] = (high - low) / seconds[str(at)] if seconds[str(at)] else None
    counts = {str(at): len(taken) for at, taken in times.items()}
    about = {**identity, "from": source}
    return {**about, "seconds": seconds, "spread": spread, "num_launches": counts}


class GroupProbe:
    """Measures on all ranks of `comm`; every method is collective. faults: receives a line for each
    error in this rank's data. show: called between launches."""

    show: Callable[[], None] = staticmethod(lambda: None)

    def __init__(
        self, backend: Backend, comm: MPI.Comm, waiter: Waiter, faults: list[str], source: str
    ) -> None:
        self._backend, self._comm, self._waiter = backend, comm, waiter
        self._faults, self._source = faults, source
        self._kind = backend.info.kind
        self._real = self._kind != "emulated"
        self.read_outs: list[Entry] = []  # of the first model measured that reads out lists

    def times(
        self, onces: Mapping[int, Callable[[], float]], per: int = 1
    ) -> dict[int, NDArray[np.float64]]:
        """Returns the seconds of each launch; once() launches `per` operations and returns its
        seconds. They take turns, so that a disturbance hits all of them and no median. The ranks
        launch equally often, and each launch counts with the time of the rank that began last,
        because the others' times include waiting for it."""
        warm_s, budget_s, least, most = _PACE[self._kind]
        counts, seconds = {}, dict[int, list[float]]()
        for at, once in onces.items():
            once()  # The first launch also loads libraries, so its time is dropped.
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
        """Launches a program and waits; returns the device's seconds."""
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
        """Measures one model; returns its "forwards" entry by rows. most_rows: row limit of the
        jobs that run this kernel (None: no limit). model: weights to use, and their source
        (default: bare products, made here)."""
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
        """Measures the choice and copy of 1 … 64 candidates a row, of the last forward's logits.
        They run in a chain, one after the other in one program, so that its launch does not matter.
        """
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
        """Measures the device's time of an empty program."""
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
        """Measures a transformer for each number of sequences after each of `contexts`. ends: as
        `contexts` takes it. Returns the "forwards" entries, without those that do not fit in
        memory."""
        most, itemsize = rows[-1], self._backend.itemsize
        weights = source.weights(self._backend, shard, options, max_rows=most, seed=1)
        entries = []
        for batch in batches:
            for context in contexts(options.context, ends=ends):
                past = replace(options, context=context, capacity=context + most)
                needed = shard.weight_bytes(past, itemsize)
                needed += shard.cache_bytes(most, batch, past, itemsize)
                room = self._backend.info.memory_bytes
                fits = self._comm.allreduce(room is None or needed <= room, op=MPI.LAND)
                if fits:
                    model = source, weights
                    entries.append(self.forwards(group, shard, past, rows, batch, model=model))
        return entries

    def all_reduces(self, group: Group, hidden: int) -> Entry:
        """Returns the "all_reduces" entry of ROWS hidden vectors and of 1 MB."""
        itemsize = self._backend.itemsize
        shapes = sorted(
            [*((rows, hidden) for rows in ROWS), (1, LARGE_BYTES // itemsize)], key=prod
        )
        taken = {prod(shape) * itemsize: self._all_reduce(group, *shape) for shape in shapes}
        graph = not self._real or (group.capturable and self._backend.capture)
        name = group.name if self._real else "modelled"
        return entry({"name": name, "ranks": self._comm.size, "graph": graph}, self._source, taken)

    def _all_reduce(self, group: Group, rows: int, width: int) -> Any:
        """Returns the seconds of all-reduces, launched in a chain over separate buffers. The
        buffers are filled anew before every launch: repeated sums would exceed float16."""
        count, backend = _CHAIN[self._kind], self._backend
        buffers = [backend.activation(rows, width) for _ in range(count)]

        def body() -> None:
            for buffer in buffers:
                group.all_reduce(buffer)

        size = rows * width * backend.itemsize
        cost = Cost(rows, 0, 0, 0, 0, count, size, self._comm.size)
        program = backend.program(body, cost, capturable=group.capturable)
        # Multiples of 1/64 within ±1/4, in another order on each rank: sums over up to 32 ranks are
        # exact in float16, in any order of summation.
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
