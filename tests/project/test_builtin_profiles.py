"""Built-in profiles of real devices against the committed rows of their device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpissd.common.row import Row
from mpissd.engine.backend.profile import known_profiles
from mpissd.lab.predict.accuracy import (
    MEAN_BAR,
    errors_of,
    groups,
    is_biased,
    meets,
    profile_of_another_job,
)
from mpissd.lab.tables.load import load_rows

RESULTS = Path(__file__).parents[2] / "results"
WITHOUT = {  # reasons why rows of GPUs have no forecast, and how many rows have each
    "a recording decides their tokens": 46,
    "the models' own text decides their tokens": 106,
    "they adapt": 30,
    "pearl keeps candidates": 9,
    "amusd keeps candidates": 9,
    "num_drafts=2": 13,
    "serve late hits": 9,
    "ran other kernels": 67,
    "read lists of candidates": 25,
}


def gpu_rows() -> list[Row]:
    """Returns every committed row of a run on a GPU; servers' rows have no rounds."""
    rows: list[Row] = []
    for path in sorted(RESULTS.glob("**/*.jsonl")):
        first = json.loads(path.open().readline() or "{}")
        if "num_rounds" in first and first.get("schema") is not None:
            rows += [row for row in load_rows([path]) if row.backend == "cupy"]
    return rows


@pytest.mark.parametrize("every", [10, pytest.param(1, marks=pytest.mark.long)])
def test_every_row_of_a_gpu_is_judged_or_counted_with_its_reason(every: int) -> None:
    """Products and whole transformers meet their bars where nothing was derived."""
    rows = gpu_rows()[::every]
    judged, left = errors_of(rows, map(profile_of_another_job(None, None), rows))
    assert len(judged) + sum(left.values()) == len(rows)
    assert all(any(reason in full for reason in WITHOUT) for full in left)
    if every == 1:
        counts = {why: sum(n for full, n in left.items() if why in full) for why in WITHOUT}
        assert counts == WITHOUT and sum(left.values()) == sum(WITHOUT.values())
    bars = {(g["machine"], g["forwards"]): g for g in groups(judged) if g["tp"] is None}
    for machine in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        for forwards in ("products", "whole"):
            assert meets(bars[machine, forwards]), (machine, forwards)
    assert bars["NVIDIA H200", "products"]["rows"] > 900 // every
    kinds = {forwards for _, forwards in bars}
    assert kinds == {"products", "products, derived", "whole", "whole, derived"}
    assert bars["NVIDIA H200", "whole, derived"]["without_luck"][0] < 0.09


def test_rows_of_the_kernels_before_are_judged_by_their_own_probe() -> None:
    rows = load_rows([RESULTS / "transformer-cells/gpu.jsonl"])
    probe = str(RESULTS / "transformer-cells/h200.json")
    judged, left = errors_of(rows, map(profile_of_another_job(probe, None), rows))
    assert len(judged) == 36 and not left and all(meets(group) for group in groups(judged))


@pytest.mark.parametrize("share", [1.06, pytest.param(0.94, marks=pytest.mark.long)])
def test_a_profile_that_parts_from_the_rows_is_noticed(share: float, tmp_path: Path) -> None:
    """Forwards that take 6% more or less than the rows' lie beyond the bar in every group."""
    profile = json.loads(known_profiles()["h200"].read_text())
    for entry in profile["tables"]["forwards"]:
        entry["seconds"] = {rows: share * taken for rows, taken in entry["seconds"].items()}
    (tmp_path / "off.json").write_text(json.dumps(profile))
    rows = load_rows([RESULTS / "h200-pairs/runs_t1.jsonl"])
    found, _ = errors_of(rows, map(profile_of_another_job(str(tmp_path / "off.json"), None), rows))
    every = [group for group in groups(found) if group["tp"]]
    assert all(is_biased(group) for group in every) and len(every) == 5
    assert all((g["without_luck_signed"] > MEAN_BAR) == (share > 1) for g in every)
