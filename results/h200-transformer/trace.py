"""Says where a forward in one kernel spends its time, operation by operation.

    python3 results/h200-transformer/trace.py CASE…     # of CASES in measure.py

Every block notes its multiprocessor's cycles on its way through an operation (kernels/trace.cu).
Printed are medians over the blocks that had work, averaged over the layers but the first and last:
the wait for all other blocks, what is brought before the first product (the factors of norms), the
products, their epilogues, and the message to the others; then the slowest block without its wait.
"""

from __future__ import annotations

import sys
from typing import Any

import cupy
import measure
import numpy as np

from mpissd.engine.backend.cupy_backend import CupyBackend
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops import megakernel

OPERATIONS = ("q,k,v", "attention", "o", "gate,up", "down", "head")
PHASES = ("wait", "bring", "multiply", "finish", "tell")
MARKS, MOST = 12, 512  # of an operation; operations


def marks(bench: Any, rows: int, context: int) -> Any:
    """Returns the cycles [operation, block, mark] of a forward's blocks."""
    stack = bench.stack
    stack.place(trunk_rows(0, context - rows, context))
    megakernel.extra_macros = (("TRACE", MOST),)
    program = bench.program(stack.body(rows))
    measure.timed(program, 5)
    program.close()
    megakernel.extra_macros = ()
    launcher: Any = stack.weights.ops._launcher  # type: ignore[union-attr]
    tiles = f"-DROW_TILES={-(-rows // 8)}"
    every = launcher._modules.items()
    module = next(m for key, m in every if f"-DTRACE={MOST}" in key and tiles in key)
    blocks, count = launcher.multiprocessors, 5 * len(stack.weights.layers) + 1
    size = count * blocks * MARKS
    array = cupy.ndarray((size,), np.int64, module.get_global("whole_trace"))
    return cupy.asnumpy(array).reshape(count, blocks, MARKS)


def show(found: Any) -> None:
    """Prints a line for each kind of operation."""
    print(f"{'':10}{'blocks':>7}" + "".join(f"{name:>10}" for name in PHASES) + f"{'slowest':>10}")
    last = len(found) - 1
    for kind, name in enumerate(OPERATIONS):
        lines = []
        for number in range(5 + kind, last - 4, 5) if kind < 5 else [last]:
            ours = found[number][:, :6]
            ours = ours[(np.diff(ours, axis=1) >= 0).all(axis=1)]  # the others did not get there
            if len(ours):
                steps = np.median(np.diff(ours, axis=1), axis=0)
                lines.append([len(ours), *steps, (ours[:, 4] - ours[:, 1]).max()])
        if lines:
            values = np.mean(lines, axis=0)
            print(f"{name:10}{values[0]:7.0f}" + "".join(f"{v:10.0f}" for v in values[1:]))


def main(names: list[str]) -> None:
    """Traces each row count and context of the named cases."""
    backend = CupyBackend(0)
    for name in names:
        where, every_rows, contexts = measure.CASES[name]
        bench = measure.Bench(backend, where, max(contexts) + measure.CHUNK)
        for context in contexts:
            bench.fill(context)
            for rows in every_rows:
                print(f"\n{where}, {rows} rows, context {context}: cycles")
                show(marks(bench, rows, context))
    backend.close()


if __name__ == "__main__":
    main(sys.argv[1:])
