"""Measures forwards of SmolLM2 and its draft on one CPU core, by their rows: the fastest of many.

    taskset -c 0 python results/serving-control/cpu_rows.py > results/serving-control/cpu_rows.json

The fastest, because other work disturbs the rest. Rows stand behind 200 tokens of eight sequences.
"""

from __future__ import annotations

import json
import math
import time

import numpy as np

from mpissd.common.config import parse_flags
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.job import Serving, resolve
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.workload.placement import timed_places
from mpissd.engine.workload.registry import workload_of

ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)
SEQUENCES, TIMES = 8, 40


def measured(*, drafts: bool) -> dict[int, float]:
    """Returns {rows: seconds} of one model."""
    config = parse_flags(
        {"pair": "smollm2", "backend": "numpy", "workload": "text", "prompt_ids": "1",
         "batch_size": f"{SEQUENCES}", "context": "512", "lookahead": "7"}
    )  # fmt: skip
    job = resolve(config, 1, backend="numpy", memory_bytes=None, serving=Serving())
    workload = workload_of(job)
    shard = job.draft_shard if drafts else job.target_shard
    options = job.draft_options if drafts else job.options
    stacks = workload.draft_stacks if drafts else workload.target_stacks
    assert shard is not None
    stepper = Stepper(
        NumpyBackend(), SoloGroup(), shard, options,
        buckets=ROWS, num_sequences=SEQUENCES, seed=0, stacks=stacks,
    )  # fmt: skip
    found = dict.fromkeys(ROWS, math.inf)
    for rows in ROWS * TIMES:
        stepper.upload(rows, np.ones(rows, np.int32), timed_places(rows, SEQUENCES, options))
        start = time.perf_counter()
        stepper.launch()
        found[rows] = min(found[rows], round(time.perf_counter() - start, 6))
    return found


if __name__ == "__main__":
    print(json.dumps({"verify": measured(drafts=False), "draft": measured(drafts=True)}))
