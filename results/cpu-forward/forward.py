"""Times forwards of 1 … 32 rows on one core a rank: [mpirun -n T] python forward.py [flags]

--model=smollm2 (any name that --target takes; --beside=TARGET of a draft) --rows=1,2,3,5,8,15,32
--context=320 --repeats=60 --kinds=trunk,lanes. Forwards of all row counts take turns. One JSON line
a row count goes to stdout: `best_ms` and `median_ms` are of the forward's own time on rank 0
(embedding, layers, attention over `context` cached tokens, LM head, candidates), `cpu_ms` is the
least time for which the core ran it, and r is cpu_ms over that of 1 row (best_ms with T > 1, whose
ranks wait busily).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.stack import TransformerStacks

PROMPT = 32  # rows of a prompt's chunk


class Bench:
    """A stepper whose cache holds `context` tokens of one sequence."""

    def __init__(self, model: str, beside: str | None, rows: list[int], context: int) -> None:
        world, backend = MPI.COMM_WORLD, NumpyBackend()
        self.waiter, self.context = Waiter(60.0, spin=True), context
        self.dice = np.random.default_rng(0)
        group = open_group(backend, world, "auto", self.waiter)
        begun = time.perf_counter()
        config = config_of(model, beside)
        options = ForwardOptions(
            lm_head=True, values=True, capacity=context + 64, lanes=max(rows), steps=8
        )
        self.stepper = Stepper(
            backend,
            group,
            TransformerShard(config, world.size, world.rank),
            options,
            buckets=sorted({*rows, PROMPT}),
            num_sequences=1,
            seed=0,
            stacks=TransformerStacks(model, beside),
        )
        self.load_s = time.perf_counter() - begun
        self.vocab, self.tp = config.shape.vocab_size, world.size
        begun = time.perf_counter()
        self.forward(trunk_rows(0, 0, 1))
        self.first_s = time.perf_counter() - begun
        for start in range(1, context, PROMPT):
            self.forward(trunk_rows(0, start, min(start + PROMPT, context), reads=False))

    def forward(self, places: Places) -> tuple[float, float]:
        """Returns the (seconds, seconds on the core) of one forward of random tokens."""
        tokens = self.dice.integers(0, self.vocab, len(places.slots)).astype(np.int32)
        self.stepper.upload(len(tokens), tokens, places)
        MPI.COMM_WORLD.Barrier()
        begun = time.thread_time()
        self.stepper.launch()
        self.stepper.wait(self.waiter)
        return self.stepper.elapsed_s(), time.thread_time() - begun

    def places(self, kind: str, rows: int) -> Places:
        """Returns the places of a verification, or of lanes that grow their fourth token."""
        if kind == "trunk":
            return trunk_rows(0, self.context, self.context + rows)
        slots, lanes = np.zeros(rows, np.int32), np.arange(rows, dtype=np.int32)
        trunks = np.full(rows, self.context, np.int32)
        return Places(slots, trunks + np.int32(3), lanes, trunks)


def main() -> None:
    flags = argparse.ArgumentParser()
    flags.add_argument("--model", default="smollm2")
    flags.add_argument("--beside")
    flags.add_argument("--rows", default="1,2,3,5,8,15,32")
    flags.add_argument("--kinds", default="trunk,lanes")
    flags.add_argument("--context", type=int, default=320)
    flags.add_argument("--repeats", type=int, default=60)
    told = flags.parse_args()
    rows = [int(n) for n in told.rows.split(",")]
    bench = Bench(told.model, told.beside, rows, told.context)
    cells = [(kind, n) for kind in told.kinds.split(",") for n in rows]
    times: dict[tuple[str, int], list[tuple[float, float]]] = {cell: [] for cell in cells}
    for _ in range(told.repeats):
        for cell in cells:
            times[cell].append(bench.forward(bench.places(*cell)))
    if MPI.COMM_WORLD.rank:
        return
    said = {"library": "mpissd", "model": Path(told.model).stem, "tp": bench.tp}
    said |= {"cpu": bench.stepper.backend.info.name, "context": told.context}
    said |= {"load_s": round(bench.load_s, 2), "first_s": round(bench.first_s, 2)}
    measure = int(bench.tp == 1)
    one = {kind: min(found[measure] for found in times[kind, rows[0]]) for kind, _ in cells}
    for kind, n in cells:
        wall, core = zip(*times[kind, n], strict=True)
        row = said | {"kind": kind, "rows": n, "repeats": len(wall)}
        row |= {"best_ms": 1e3 * min(wall), "median_ms": 1e3 * statistics.median(wall)}
        row |= {"cpu_ms": 1e3 * min(core), "r": min((wall, core)[measure]) / one[kind]}
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}))


if __name__ == "__main__":
    main()
