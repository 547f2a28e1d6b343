"""The sentence beside a figure says what its numbers say."""

from __future__ import annotations

import pandas as pd

from analysis.build import Drawn, draw
from analysis.findings import pareto, throughput
from analysis.load import Data
from analysis.uses import BESIDE
from tests.analysis.test_figures import data, drawn, poster

SAYS = "panel series x y low high headline rival gpus missing".split()


def numbers(*told: tuple[object, ...]) -> pd.DataFrame:
    return pd.DataFrame([("own best K, all GPUs", BESIDE, *one) for one in told], columns=SAYS)


def test_the_best_other_use_is_named_with_its_interval() -> None:
    said = throughput(
        numbers(
            (0.5, 0.83, 0.80, 0.86, True, "SD inline T=2", 2, ""),
            (0.8, 1.02, 0.97, 1.07, True, "SD inline T=2", 2, ""),
        )
    )
    assert said == (
        "SSD against the best other use of 2 GPUs: 0.83× (0.80–0.86) of SD inline T=2 at α=0.5, "
        "no difference (0.97–1.07) of SD inline T=2 at α=0.8."
    )


def test_where_one_was_not_measured_nothing_is_called_best() -> None:
    lacking = (0.8, 1.35, 1.3, 1.4, True, "SD inline T=1", 2, "SD inline T=2")
    said = throughput(numbers(lacking))
    assert "the fastest measured use of 2 GPUs: 1.30–1.40 of SD inline T=1" in said
    assert said.endswith("no claim (not measured: SD inline T=2).")
    assert "best" not in said and "×" not in said


def test_nothing_is_said_of_nothing() -> None:
    assert throughput(numbers()) == ""


def test_gains_of_few_seeds_are_intervals_and_no_speedup() -> None:
    """The fixture's rows have one seed each; what formulas model is no claim of a measurement."""
    for name in ("cache_hits", "batch", "head"):
        said = drawn(name).finding
        measured = said.split("The hit law of these rows is assumed")[
            0
        ]  # what follows is predicted
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


def test_every_measured_gain_has_its_interval() -> None:
    """What the formulas model has none, and says so."""
    for name in ("cache_hits", "fan_out", "batch", "head", "heterogeneity", "break_even"):
        numbers = poster(name).table()
        gains = numbers[numbers["headline"].notna()]
        value = gains["gain"] if name == "break_even" else gains["y"]
        assert len(gains) and (gains["low"] <= value).all() and (value <= gains["high"]).all()
        assert (gains["low"] < gains["high"]).all() and not gains["headline"].any(), name
        assert "FEW SEEDS" in poster(name).caption
    dots = poster("break_even").table().query("series.str.startswith('measured')")
    assert dots["headline"].notna().all()


def test_the_ends_of_the_frontier_have_intervals() -> None:
    """low and high are those of y, tok/s a GPU; of a sequence they are as far off."""
    said = pareto(
        pd.DataFrame(
            [
                ("8B", "SSD", 200.0, 100.0, 90.0, 120.0, 1),
                ("8B", "SSD", 150.0, 300.0, 290.0, 310.0, 4),
                ("8B", "SD inline", 190.0, 190.0, 180.0, 200.0, 1),
            ],
            columns="panel series x y low high b".split(),
        )
    )
    assert "that of SSD, 200 (180–240) tok/s at b=1" in said and "300 (290–310) at b=4" in said
    assert "SD inline only at b=1: 190 (180–200) a GPU, where SSD gives 100 (90–120)" in said
