"""Times forwards of a whole transformer on T GPUs, and compares its rows' bits.

    mpirun -np 2 python3 -m mpi4py results/h200-transformer/ranks.py llama-3.1-70b

Each line: median device time of a captured forward of M rows behind a context, all-reduces
included, and the share of its floor: weights, LM head and the context's keys and values of a rank
over the read rate measured here. A launch counts as long as it took the rank that began last.
`bits`: whether the logits of rows computed M at a time are those of the rows alone, on every rank.
The last line is what the all-reduces take alone, in a chain. --rows and --contexts choose others
(--rows=1,5,8: bits are compared in parts of the last). --backend=emulated rehearses.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import Waiter
from mpissd.engine.backend.registry import open_backend
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.stack import TransformerStacks
from mpissd.lab.measure.calibrate import chain_s

COMM, WAITER = MPI.COMM_WORLD, Waiter(15.0, spin=True)
ROWS, CONTEXTS = "1,2,5,8,16", "512,4096"
LAUNCHES, WARM_UP, BEHIND = 20, 3, 96


class Bench:
    """A model over all ranks."""

    def __init__(self, backend: Any, where: str, every: list[int], contexts: list[int]) -> None:
        self.backend, self.group = backend, open_group(backend, COMM, "auto", WAITER)
        self.most = max(every)
        self.shard = TransformerShard(config_of(where), COMM.size, COMM.rank)
        self.options = ForwardOptions(
            fuse=True, lm_head=True, values=True, capacity=max(contexts) + self.most
        )
        self.stepper = Stepper(
            backend,
            self.group,
            self.shard,
            self.options,
            buckets=every,
            num_sequences=1,
            seed=1,
            stacks=TransformerStacks(where),
        )

    def forward(self, start: int, tokens: Any) -> float:
        """Runs a forward of the tokens from position `start` on; returns its device seconds."""
        places = trunk_rows(0, start, start + len(tokens))
        self.stepper.upload(len(tokens), np.asarray(tokens, np.int32), places)
        COMM.Barrier()
        self.stepper.launch()
        self.stepper.wait(WAITER)
        return self.stepper.elapsed_s()

    def seconds(self, rows: int, context: int) -> float:
        """Returns the median seconds of a forward of rows that ends a context."""
        taken = np.array(
            [self.forward(context, range(rows)) for _ in range(WARM_UP + LAUNCHES)][WARM_UP:]
        )
        COMM.Allreduce(MPI.IN_PLACE, taken, op=MPI.MIN)
        return statistics.median(taken.tolist())

    def floor_s(self, context: int, rate: float) -> float:
        """Returns the seconds that reading a rank's weights, LM head and keys and values takes."""
        cost = self.shard.cost(1, 1, 2, ForwardOptions(lm_head=True, context=context))
        return (cost.weight_bytes + cost.kv_bytes) / rate

    def alone(self) -> Any:
        """Returns the logits of the tokens behind BEHIND ones, a row a forward."""
        tokens = np.random.default_rng(0).integers(0, 1000, BEHIND + self.most)
        for start in range(0, BEHIND, self.most):
            self.forward(start, tokens[start : min(start + self.most, BEHIND)])
        rows = []
        for at in range(BEHIND, len(tokens)):
            self.forward(at, tokens[at : at + 1])
            rows.append(self.stepper.logits([0])[0])
        self.tokens = tokens
        return np.stack(rows)

    def has_bits(self, rows: int, alone: Any) -> bool:
        """Returns whether rows computed `rows` at a time are those of `alone`, on every rank."""
        same = True
        for start in range(0, len(alone), rows):
            part = self.tokens[BEHIND + start : BEHIND + start + rows]
            self.forward(BEHIND + start, part)
            found = self.stepper.logits(range(len(part)))
            same &= np.array_equal(found, alone[start : start + rows]) and np.isfinite(found).all()
        return bool(COMM.allreduce(same, op=MPI.LAND))

    @property
    def stack(self) -> Any:
        return self.stepper.stack


def main() -> int:
    """Measures one model; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="cupy")
    parser.add_argument("--rows", default=ROWS)
    parser.add_argument("--contexts", default=CONTEXTS)
    given = parser.parse_args()
    device = "h200" if given.backend == "emulated" else None
    backend = open_backend(given.backend, device=device, local_rank=COMM.rank, graph=True)
    rate, begun = backend.read_bandwidth(4 * 10**9) or 0.0, MPI.Wtime()
    every, contexts = ([int(n) for n in many.split(",")] for many in (given.rows, given.contexts))
    bench = Bench(backend, given.model, every, contexts)
    made_s = COMM.allreduce(MPI.Wtime() - begun, op=MPI.MAX)
    say(f"{backend.info.name}, {given.model}, T={COMM.size}, {bench.group.name}, graphs:", end=" ")
    say(f"{backend.capture}; read rate {rate / 1e9:.0f} GB/s; weights and programs {made_s:.1f} s;")
    say(f"kernels: {bench.stack.weights.kernel}")
    is_real = backend.info.kind != "emulated"
    alone = bench.alone() if is_real else None
    good = True
    for context in contexts:
        for rows in every:
            took, floor = bench.seconds(rows, context), bench.floor_s(context, rate)
            bits = bench.has_bits(rows, alone) if is_real and context == contexts[0] else None
            good &= bits is not False
            line = f"context {context:5} M={rows:3} {1e3 * took:8.3f} ms, floor {1e3 * floor:7.3f}"
            say(f"{line}, {floor / took:.3f} of it" + ("" if bits is None else f", bits {bits}"))
    if COMM.size > 1 and is_real:
        cost = bench.shard.cost(1, 1, 2, bench.options)
        width = bench.shard.shape.hidden
        alone_s = chain_s(backend, bench.group, width, cost, WAITER)
        count = cost.num_all_reduces
        say(
            f"{count} all-reduces alone {1e3 * alone_s:.3f} ms, {1e6 * alone_s / count:.2f} µs each"
        )
    bench.stepper.close()
    backend.synchronize()
    bench.group.close()
    backend.close()
    return int(not good)


def say(text: str, end: str = "\n") -> None:
    """Prints on the first rank."""
    if COMM.rank == 0:
        print(text, end=end, flush=True)


if __name__ == "__main__":
    sys.exit(main())
