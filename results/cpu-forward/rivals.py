"""Times what other libraries take on one core: rivals.py numpy|torch|transformers [FILE.gguf]

numpy, torch: the products of SmolLM2's forward alone (30 layers, LM head), float32 by NumPy,
float32 and bfloat16 by PyTorch's linear. transformers: the whole forward of the .gguf in float32
behind 320 cached tokens. One JSON line a row count, as forward.py's.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np

ROWS = (1, 2, 3, 5, 8, 15, 32)
HIDDEN, FFN, VOCAB, LAYERS = 576, 1536, 49152, 30
LAYER = ((HIDDEN, 960), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))
CONTEXT, REPEATS = 320, 20


def sizes() -> list[tuple[int, int]]:
    return [*LAYER * LAYERS, (HIDDEN, VOCAB)]


def by_numpy() -> dict[str, Callable[[int], Callable[[], Any]]]:
    dice = np.random.default_rng(0)
    weights = [dice.standard_normal(size, np.float32) for size in sizes()]

    def forward(rows: int) -> Callable[[], Any]:
        inputs = {k: dice.standard_normal((rows, k), np.float32) for k in (HIDDEN, FFN)}
        return lambda: [inputs[len(weight)] @ weight for weight in weights]

    return {"numpy float32": forward}


def by_torch() -> dict[str, Callable[[int], Callable[[], Any]]]:
    import torch

    torch.set_num_threads(1)
    found = {}
    for kind in (torch.float32, torch.bfloat16):
        weights = [torch.randn(n, k).to(kind) for k, n in sizes()]

        def forward(rows: int, weights: Any = weights, kind: Any = kind) -> Callable[[], Any]:
            inputs = {k: torch.randn(rows, k).to(kind) for k in (HIDDEN, FFN)}
            linear = torch.nn.functional.linear
            return lambda: [linear(inputs[weight.shape[1]], weight) for weight in weights]

        found[f"torch {str(kind).removeprefix('torch.')}"] = forward
    return found


def by_transformers(path: str) -> dict[str, Callable[[int], Callable[[], Any]]]:
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    folder, name = str(Path(path).parent), Path(path).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    cache = DynamicCache()
    model(torch.randint(0, VOCAB, (1, CONTEXT)), past_key_values=cache, use_cache=True)

    def forward(rows: int) -> Callable[[], Any]:
        ids = torch.randint(0, VOCAB, (1, rows))

        def once() -> Any:
            model(ids, past_key_values=cache, use_cache=True)
            cache.crop(-rows)

        return once

    return {"transformers float32": forward}


def main() -> None:
    makers: dict[str, Any] = {"numpy": by_numpy, "torch": by_torch, "transformers": by_transformers}
    for library, forward in makers[sys.argv[1]](*sys.argv[2:]).items():
        bodies = {rows: forward(rows) for rows in ROWS}
        times: dict[int, list[tuple[float, float]]] = {rows: [] for rows in ROWS}
        for _ in range(REPEATS):
            for rows, body in bodies.items():
                begun = time.perf_counter(), time.thread_time()
                body()
                ended = time.perf_counter(), time.thread_time()
                times[rows].append((1e3 * (ended[0] - begun[0]), 1e3 * (ended[1] - begun[1])))
        one = min(core for _, core in times[1])
        for rows, found in times.items():
            wall, core = zip(*found, strict=True)
            row = {"library": library, "rows": rows, "repeats": REPEATS, "best_ms": min(wall)}
            row |= {"median_ms": statistics.median(wall), "cpu_ms": min(core), "r": min(core) / one}
            row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
            print(json.dumps(row))


if __name__ == "__main__":
    main()
