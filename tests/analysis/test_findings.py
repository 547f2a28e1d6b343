"""The sentence beside a figure says what its numbers say."""

from __future__ import annotations

import pandas as pd

from analysis.findings import throughput


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
