"""The figure of pools, drawn from made-up rows and from the committed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import draw
from analysis.rows import Data, load
from analysis.style import Poster


def row(mode: str, targets: int, tok_per_s: float, **values: Any) -> str:
    gpus = targets + (mode == "ssd")
    about = {"schema": 1, "device_name": "D (emulated)", "pair": "8b/1b", "mode": mode, "tp": 1}
    about |= {"batch_size": 1, "targets": targets, "gpus": gpus, "tok_per_s": tok_per_s}
    laws = {"acceptance": "alpha:0.8", "hit_law": "smollm2", "hit_rate": 0.8, "lookahead": 4}
    return json.dumps({**about, **laws, **values})


def written(folder: Path, *lines: str) -> Data:
    (folder / "pools.jsonl").write_text("\n".join(lines))
    return load([folder])


def drawn(data: Data, device: str | None = None) -> Poster:
    (item,) = draw(data, "pools", device)
    assert item.poster is not None, item.why
    return item.poster


LINES = (
    row("ar", 1, 100.0),
    row("sd", 1, 210.0),
    row("ssd", 1, 300.0),
    row("ssd", 2, 580.0),
    row("ssd", 4, 1100.0),
    row("ssd", 16, 1700.0),
)


def test_a_gpu_and_a_sequence_by_targets_a_draft(tmp_path: Path) -> None:
    figure = drawn(written(tmp_path, *LINES))
    numbers = figure.table().set_index(["panel", "series", "x"]).sort_index()["y"]
    rates, times = "8B/1B, T=1, b=1", "8B/1B, T=1, b=1, time a token"
    pool = "a shared draft (1: a draft each)"
    assert numbers[rates, pool].to_dict() == {1: 150, 2: 580 / 3, 4: 220, 16: 100}
    assert numbers[times, pool, 4] == pytest.approx(4e3 / 1100)
    assert set(numbers[rates, "SD inline, same T"]) == {210}
