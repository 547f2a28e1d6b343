"""The sentence beside a figure says what its numbers say."""

from __future__ import annotations

import pandas as pd

from analysis.build import Drawn, draw
from analysis.findings import throughput
from analysis.load import Data
from tests.analysis.test_figures import data, drawn, poster


def numbers(*told: tuple[str, str, float | None, float]) -> pd.DataFrame:
    return pd.DataFrame(told, columns=["panel", "series", "x", "y"])


def test_ar_on_fewer_gpus_is_no_rival_on_as_many() -> None:
    """There SD is the only one, however much faster AR is."""
    raw, each = "own best K, all GPUs", "own best K, per GPU"
    said = throughput(
        numbers(
            (raw, "AR, 1 GPU", None, 600.0),
            (raw, "SD", 0.8, 400.0),
            (raw, "SSD", 0.8, 500.0),
            (each, "AR, 1 GPU", None, 600.0),
            (each, "SD", 0.8, 200.0),
            (each, "SSD", 0.8, 250.0),
        )
    )
    assert "best of SD on as many GPUs: 1.25× at α=0.8 (AR was not measured on as many)" in said
    assert "Per GPU against the best of SD and AR: 0.42× at α=0.8" in said


def test_ar_on_as_many_gpus_is_one() -> None:
    raw, each = "own best K, all GPUs", "own best K, per GPU"
    said = throughput(
        numbers(
            (raw, "AR, 1 GPU", None, 300.0),
            (raw, "AR, 2 GPUs", None, 520.0),
            (raw, "SD", 0.8, 400.0),
            (raw, "SSD", 0.8, 500.0),
            (each, "SD", 0.8, 200.0),
            (each, "SSD", 0.8, 250.0),
        )
    )
    assert "best of SD and AR on as many GPUs: 0.96× at α=0.8" in said


def test_gains_of_few_seeds_are_intervals_and_no_speedup() -> None:
    """The fixture's rows have one seed each; what formulas model is no claim of a measurement."""
    for name in ("cache_hits", "batch", "head"):
        said = drawn(name).finding
        measured = said.split("The default hit law is assumed")[0]  # what follows is predicted
        assert "few seeds" in measured and "×" not in measured, said
        assert "FEW SEEDS" in poster(name).caption
    assert "FEW SEEDS" not in poster("latency").caption


def test_a_gain_is_claimed_from_enough_seeds() -> None:
    """Five rows for every one, each under a seed of its own and of 400 rounds."""
    rows = data().rows
    many = [
        rows.assign(seed=seed, num_rounds=400, tok_per_s=rows["tok_per_s"] * (1 + seed / 10))
        for seed in range(5)
    ]
    (item,) = draw(Data(pd.concat(many, ignore_index=True)), "cache_hits")
    assert isinstance(item, Drawn) and "× (" in item.finding and "few seeds" not in item.finding
    assert "FEW SEEDS" not in item.poster.caption and "5 seeds" in item.poster.caption
