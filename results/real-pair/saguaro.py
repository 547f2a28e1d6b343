#!/usr/bin/env python3
"""Saguaro sampling on SmolLM2 and its draft: C from 1 to 0 at two temperatures, decisions alone.

    results/real-pair/saguaro.py OUT [--target=FILE] [--prompts=24] [--tokens=48] [--fan_outs=1,2]

Each cell answers the first prompts of both files of tests/data/prompts in one process, K = 4, with
hits finished and jit backups, so that what happens depends on no time. Lines go to
OUT/saguaro.jsonl: counts by prompt, so that intervals can resample prompts. An interrupted study
goes on where it stopped; tables.py prints what is there.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from itertools import islice, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from mpissd.common.config import parse_flags  # noqa: E402
from mpissd.common.output import append_row, read_rows  # noqa: E402
from mpissd.engine.decode.in_process import Decoder  # noqa: E402
from mpissd.lab.measure.provenance import commit  # noqa: E402

TEMPERATURES, FAN_OUTS = (1.0, 0.7), (4, 2, 1)
EACH_C = (1.0, 0.1, 0.5, 0.0, 0.7, 0.3)  # the ends and the middle of the range first
LOOKAHEAD = 4
FILES = ("chat", "humaneval")


def main() -> int:
    """Measures the cells that OUT lacks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2", help="SmolLM2's file, if no package has it")
    parser.add_argument("--draft", default="smollm2-draft")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--fan_outs", default=",".join(map(str, FAN_OUTS)))
    given = parser.parse_args()
    commit()  # kept: of the tree that this process reads
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "saguaro.jsonl"
    done = {(row["temperature"], row["fan_out"], row["saguaro_c"]) for row in read_rows(path)}
    fan_outs = tuple(map(int, given.fan_outs.split(",")))
    for c, temperature, fan_out in product(EACH_C, TEMPERATURES, fan_outs):
        if (temperature, fan_out, c) not in done:
            append_row(path, cell(given, temperature, fan_out, c))
            print(f"T = {temperature}, F = {fan_out}, C = {c}", flush=True)
    return 0


def cell(given: Any, temperature: float, fan_out: int, c: float) -> dict[str, Any]:
    """Decodes one cell; returns its counts by prompt."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as prompts:
        for name in FILES:
            with (ROOT / f"tests/data/prompts/{name}.jsonl").open() as file:
                prompts.writelines(islice(file, given.prompts))
        prompts.flush()
        flags = {
            "workload": "text",
            "backend": "numpy",
            "target": given.target,
            "draft": given.draft,
            "prompts": prompts.name,
            "num_tokens": given.tokens,
            "temperature": temperature,
            "mode": "ssd",
            "lookahead": LOOKAHEAD,
            "fan_out": f"uniform:{fan_out}",
            "saguaro_c": c,
            "batch_size": 16,
        }
        with Decoder(parse_flags({name: str(value) for name, value in flags.items()})) as decoder:
            while not decoder.is_over:
                decoder.step()
            sequences = decoder.records.sequences()
    return {
        "temperature": temperature,
        "fan_out": fan_out,
        "saguaro_c": c,
        "lookahead": LOOKAHEAD,
        "draft": given.draft,
        "commit": commit(),
        "prompts": counts(sequences),
    }


def counts(sequences: np.ndarray[Any, Any]) -> list[list[int]]:
    """Returns, by prompt, counts of k = 0 … K, then lookups and hits behind a rejection, and behind
    K accepted tokens: [K + 1 + 4]."""
    found = []
    for name in np.unique(sequences[:, 1]):
        own = sequences[sequences[:, 1] == name]
        k, hit = own[:-1, 3], own[1:, 6] > 0  # a hit is seen in the round behind
        line = np.bincount(own[:, 3], minlength=LOOKAHEAD + 1).tolist()
        for chosen in (k < LOOKAHEAD, k == LOOKAHEAD):
            line += [int(chosen.sum()), int(hit[chosen].sum())]
        found.append(line)
    return found


if __name__ == "__main__":
    sys.exit(main())
