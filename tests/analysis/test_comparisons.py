"""What a figure compares: rivals that are there, and which are not; medians; no empty panel."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from analysis.build import Drawn, draw
from analysis.load import Data, Notes
from analysis.select import cases, plain
from analysis.uses import best_rows
from tests.analysis.test_figures import data, legend, poster, rate


def test_ar_on_the_draft_gpu_too_may_come_from_another_folder() -> None:
    rows = data().rows
    is_wide = (rows["mode"] == "ar") & (rows["gpus"] == 2)
    apart = rows.assign(folder=rows["folder"].where(~is_wide, "elsewhere"))
    other = apart[is_wide].assign(fuse=~apart["fuse"][is_wide], tok_per_s=1.0, run_id="x")
    notes = Notes()
    both = pd.concat([apart, other], ignore_index=True)
    (first, *_) = cases(Data(both, (), notes), plain(both), ["lookahead"])
    point = first.ar_on(2)
    assert point is not None and point["tok_per_s"] == rate(mode="ar", tp=2)
    assert any("AR of 8B on 2 GPUs: rows of elsewhere" in line for line in notes.lines)
    (item,) = draw(Data(both), "throughput")
    assert isinstance(item, Drawn) and "elsewhere" in item.poster.caption


def both_gpus(folder: str | None = None, faster: float = 1.6) -> pd.DataFrame:
    """The fixture's rows, and SD inline over two target GPUs as if it had been measured."""
    rows = data().rows
    inline = rows[(rows["method"] == "SD inline") & (rows["batch_size"] == 1)]
    rates = {name: faster * inline[name] for name in ("tok_per_s", "low", "high")}
    wide = inline.assign(
        tp=2, gpus=2, world_size=2, run_id="wide-" + inline["run_id"], **rates,
        expected_tok_per_s=faster * inline["expected_tok_per_s"],
        t_target_s=inline["t_target_s"] / 2, per_gpu=rates["tok_per_s"] / 2,
    )  # fmt: skip
    if folder is not None:
        wide = wide.assign(folder=folder)
    return pd.concat([rows, wide], ignore_index=True)


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_sd_inline_over_all_gpus_is_a_rival(folder: str | None) -> None:
    """Also of another folder, as AR there; what was measured is not drawn as expected."""
    (item,) = draw(Data(both_gpus(folder)), "throughput")
    assert isinstance(item, Drawn)
    assert "SD inline, T=2" in legend(item.poster)
    assert "SD inline T=2 (expected, not measured)" not in legend(item.poster)


def _raw(table: pd.DataFrame, series: str) -> pd.Series:
    return table[(table["series"] == series) & table["panel"].str.contains("raw")]["gain"]


def test_the_map_of_break_even_and_its_dots_know_it_too() -> None:
    (item,) = draw(Data(both_gpus(faster=3.0)), "break_even")
    assert isinstance(item, Drawn)
    for series in ("measured", "formula"):
        here, before = (_raw(p.table(), series) for p in (item.poster, poster("break_even")))
        assert (here <= before + 1e-9).all() and here.max() < 0.9 * before.max()


def test_another_draft_device_is_a_point_of_its_own_and_in_no_other_figure() -> None:
    rows = data().rows
    drafted = rows[rows["method"].isin(["SD", "SSD"]) & (rows["batch_size"] == 1)]
    slow = drafted.assign(other_draft="NVIDIA Old (emulated)", step_s=2 * drafted["step_s"])
    both = Data(pd.concat([rows, slow.assign(tok_per_s=50.0)], ignore_index=True))
    (item,) = draw(both, "heterogeneity")
    assert isinstance(item, Drawn)
    here, alone = item.poster.table(), poster("heterogeneity").table()
    for method in ("SD", "SSD"):
        name = f"{method}, measured"
        own, other = here[here["series"] == name].sort_values("x").to_dict("records")
        assert other["x"] == pytest.approx(2 * own["x"], rel=0.05) and other["y"] < own["y"]
        assert own["y"] == alone.loc[alone["series"] == name, "y"].iloc[0]
    curves = [t[t["series"].str.contains("raw|per GPU")]["y"] for t in (here, alone)]
    assert np.array_equal(*curves)
    assert "Old" in [text.get_text() for text in item.poster.axes[0].texts]
    assert "drafts also on NVIDIA Old" in item.poster.caption
    for name in ("throughput", "latency", "pareto"):
        (item,) = draw(both, name)
        assert isinstance(item, Drawn)
        assert item.poster.table().equals(poster(name).table())


def test_ar_is_the_rival_of_drafts_on_other_devices_too() -> None:
    rows = data().rows
    named = pd.Series("NVIDIA Old (emulated)", rows.index).where(rows["num_drafts"] > 0)
    apart = Data(rows.assign(other_draft=named), (), Notes())
    (found, *_) = cases(apart, plain(apart.rows), ["lookahead"])
    assert len(found.ar) and found.ar_on(2) is not None


@pytest.mark.parametrize("error, best", [(0.1, 7), (0.3, 4), (None, 7)])
def test_predictions_that_miss_by_far_choose_no_k_as_in_best(
    error: float | None, best: int
) -> None:
    """K = 4 was the faster of them, K = 7 was predicted to be."""
    rows = data().rows
    ssd = rows[rows["method"] == "SSD"].head(2).assign(
        lookahead=[4, 7], policy="uniform:3", tok_per_s=[500.0, 400.0],
        expected_tok_per_s=[300.0, 450.0],
        prediction_error=float("nan") if error is None else error,
    )  # fmt: skip
    assert best_rows(ssd)["lookahead"].tolist() == [best]
