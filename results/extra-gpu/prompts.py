#!/usr/bin/env python3
"""Counts tokens, rounds and hits by prompt: results/extra-gpu/prompts.py OUT … > prompts.jsonl

OUT: folders of `sweep`, with the raw rounds of replays of whole recordings (num_tokens = 128).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from analysis.figures.study import drafted
from analysis.rows import load

for folder in map(Path, sys.argv[1:]):
    rows = load([folder]).rows
    for run_id, shape in zip(rows["run_id"], drafted(rows), strict=True):
        rounds = np.load(folder / "rounds" / f"{run_id}.npz")
        _, prompt, *_, hit, _ = rounds["sequences"].T
        count = len(rounds["token_counts"])
        counts = {
            "tokens": rounds["token_counts"],
            "rounds": np.bincount(prompt, minlength=count),
            "hits": np.bincount(prompt, hit > 0, count).astype(int),
        }
        lists = {name: of.tolist() for name, of in counts.items()}
        print(json.dumps({"shape": shape} | lists, default=lambda number: number.item()))
