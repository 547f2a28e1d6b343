#!/usr/bin/env python3
"""Times a step of each of the five shapes on one CPU core, beside the target's verifications.

    results/drafts/steps.py TARGET OUT [--repeats=60] [--context=320]

A step's time depends on a draft's shape alone, so the drafts here have random weights in the form
that `distill` stores (int8, the target's embedding and 12,288 rows of its head). Forwards take
turns in one process; `step_ms` and `verify_ms` are the least times for which the core ran one (as
in results/cpu-forward/forward.py). `predicted` is what SD inline would make of them on that core:
tokens a round of the trained drafts (distilled.jsonl), over K steps and a verification of K + 1
rows. OUT/steps.jsonl: one line a shape.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "results/cpu-forward")]

import numpy as np  # noqa: E402

from mpissd.common.output import append_row, read_rows  # noqa: E402
from mpissd.engine.model.transformer.checkpoint import EMBEDDING, HEAD, tensors  # noqa: E402
from mpissd.engine.model.transformer.sources import config_of  # noqa: E402
from mpissd.lab.measure.provenance import commit  # noqa: E402
from mpissd.learn.export import quantized, save  # noqa: E402

HERE = Path(__file__).resolve().parent
VOCAB, LOOKAHEADS, KV_BYTES = 12_288, (2, 4, 7), 2  # bytes of a key's or value's number


def write(folder: Path, target: str, name: str) -> Any:
    """Writes a draft of random weights; name: LAYERSxHEADSxKV_HEADSxFFN; returns its shape."""
    layers, heads, kv_heads, ffn = map(int, name.split("x"))
    whole = config_of(target, None)
    sizes = {"num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads, "ffn": ffn}
    shape = replace(whole.shape, name=name, **sizes)
    config = replace(whole, shape=shape, tied=False, head_vocab=VOCAB)
    dice = np.random.default_rng(17)
    stored = {
        of: dice.normal(0, 0.02, size).astype(np.float32) if len(size) == 2 else np.ones(size)
        for of, size in tensors(config)
        if of not in (EMBEDDING, HEAD)
    }
    about = {"head": "target", "target": whole.shape.name, "target_sha256": sha256_of(name)}
    save(folder, config, quantized(stored, np.arange(VOCAB, dtype=np.int32)), about)
    return shape


def sha256_of(name: str) -> str:
    """Returns the digest of the target that the trained draft of this shape was made of."""
    return str(trained()[name]["sha256"])


def trained() -> dict[str, Mapping[str, Any]]:
    """Returns the rows of the trained drafts by shape."""
    return {row["draft"]: row for row in read_rows(HERE / "distilled.jsonl")}


def predicted(name: str, step_ms: float, verify_ms: Mapping[int, float]) -> dict[str, Any]:
    """Returns by K: T_SD, and by prompts tok/s; tokens a round where distilled.jsonl has them."""
    found: dict[str, Any] = {}
    for lookahead in LOOKAHEADS:
        verify = verify_ms[lookahead + 1]
        found[str(lookahead)] = {"T_SD": round(lookahead * step_ms / verify, 4)}
        for prompts, of in trained()[name]["evaluation"].items():
            if told := of["by_lookahead"].get(str(lookahead)):
                rate = 1e3 * told["tokens_per_round"] / (lookahead * step_ms + verify)
                found[str(lookahead)][prompts] = round(rate, 2)
    return found


def main() -> int:
    """Times the shapes in turns, and writes OUT/steps.jsonl anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--context", type=int, default=320)
    given = parser.parse_args()
    measured_by = commit()
    from forward import Bench  # starts MPI

    with tempfile.TemporaryDirectory() as place:
        shapes = {name: write(Path(place, name), given.target, name) for name in trained()}
        steps = {
            name: Bench(str(Path(place, name)), given.target, [1], given.context) for name in shapes
        }
        rows = [1, *(k + 1 for k in LOOKAHEADS)]
        checks = Bench(given.target, None, rows, given.context)
        times: dict[Any, list[tuple[float, float]]] = {of: [] for of in (*steps, *rows)}
        for _ in range(given.repeats):
            for name, bench in steps.items():
                times[name].append(bench.forward(bench.places("trunk", 1)))
            for n in rows:
                times[n].append(checks.forward(checks.places("trunk", n)))
    core_ms = {of: 1e3 * min(core for _, core in each) for of, each in times.items()}
    verify_ms = {n: core_ms[n] for n in rows}
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "steps.jsonl"
    path.unlink(missing_ok=True)
    for name, shape in shapes.items():
        row = {
            "shape": name,
            "cpu": checks.stepper.backend.info.name,
            "commit": measured_by,
            "context": given.context,
            "repeats": given.repeats,
            "step_ms": round(core_ms[name], 4),
            "step_median_ms": round(1e3 * median(wall for wall, _ in times[name]), 4),
            "verify_ms": {str(n): round(ms, 4) for n, ms in verify_ms.items()},
            "kv_bytes": 2 * KV_BYTES * shape.num_layers * shape.num_kv_heads * shape.head_dim,
            "predicted": predicted(name, core_ms[name], verify_ms),
        }
        append_row(path, row)
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
