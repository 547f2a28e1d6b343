"""What a figure compares: rivals that are there, and which are not; medians; no empty panel."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from analysis.build import Drawn, Skipped, draw
from analysis.load import Data
from analysis.notes import Notes
from analysis.select import cases, plain
from analysis.summary import best_of_each
from analysis.uses import BESIDE, _uses, best_rows
from tests.analysis.test_figures import data, drawn, legend, poster, rate


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


def without(name: str, lost: pd.Series) -> Drawn:
    (item,) = draw(data().with_rows(data().rows[~lost]), name)
    assert isinstance(item, Drawn), item
    return item


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


def test_a_finding_says_which_use_was_not_measured() -> None:
    rows = data().rows
    told = drawn("throughput").finding
    assert "fastest measured use of 2 GPUs" in told and "best other" not in told.split("per GPU")[0]
    assert "(not measured: SD inline T=2)" in told and "AR T=2" not in told
    told = without("throughput", (rows["mode"] == "ar") & (rows["gpus"] == 2)).finding
    assert "(not measured: AR T=2, SD inline T=2)" in told
    told = without("throughput", rows["method"] == "SD inline").finding
    assert "SSD per GPU against the fastest measured" in told and "SD inline T=1" in told


@pytest.mark.parametrize("folder", [None, "elsewhere"])
def test_sd_inline_over_all_gpus_is_a_rival(folder: str | None) -> None:
    """Also of another folder, as AR there."""
    (item,) = draw(Data(both_gpus(folder)), "throughput")
    assert isinstance(item, Drawn) and "not measured" not in item.finding
    assert "SSD against the best other use of 2 GPUs" in item.finding
    assert "SD inline, T=2" in legend(item.poster)
    table = item.poster.table()
    raw = table[(table["panel"] == "own best K, all GPUs") & (table["x"] == 0.8)]
    found = raw.set_index("series")
    assert found.loc[BESIDE, "rival"] == "SD inline T=2"
    wanted = found.loc["SSD", "y"] / found.loc["SD inline, T=2", "y"]
    assert found.loc[BESIDE, "y"] == pytest.approx(wanted)


def _raw(table: pd.DataFrame, series: str) -> pd.Series:
    return table[(table["series"] == series) & table["panel"].str.contains("raw")]["gain"]


def test_the_map_of_break_even_and_its_dots_know_it_too() -> None:
    (item,) = draw(Data(both_gpus(faster=3.0)), "break_even")
    assert isinstance(item, Drawn) and "Not measured" not in item.poster.caption
    assert "Not measured: SD inline T=2" in poster("break_even").caption
    for series in ("measured", "formula"):
        here, before = (_raw(p.table(), series) for p in (item.poster, poster("break_even")))
        assert (here <= before + 1e-9).all() and here.max() < 0.9 * before.max()


def test_the_table_of_the_best_says_over_what() -> None:
    lines = {}
    for name, rows in (("without", data().rows), ("with", both_gpus())):
        table = best_of_each(Data(rows), "NVIDIA H100 80GB SXM (emulated)")
        ssd = table[table["method"].str.startswith("SSD")]
        assert "hits imposed" in ssd["over the best other use"].iloc[0]  # p_hit:0.0
        lines[name] = ssd["over the best other use"].iloc[-1]  # power law
        assert (table["method"] == "SD inline").sum() == 1 + (name == "with")
    assert lines["without"].endswith("the fastest measured: no claim (not measured: SD inline T=2)")
    assert lines["with"].endswith("of SD inline T=2")


def test_a_method_of_one_batch_size_is_set_beside_the_others_there() -> None:
    rows = data().rows
    told = without("pareto", (rows["method"] == "SD inline") & (rows["batch_size"] > 1)).finding
    at = {"acceptance": "alpha:0.8", "lookahead": 4, "batch_size": 1, "lm_head": False}
    inline = rate(mode="sd", num_drafts=0, **at)
    assert re.search(
        rf"SD inline, T GPUs only at b=1: {inline:.0f} \(\d+–\d+\) a GPU, where ", told
    )
    assert "only at" not in drawn("pareto").finding.split("AR, T+1")[0]
    lost = (rows["method"] == "SD inline") & (rows["lm_head"] | (rows["context"] > 0))
    assert "(at one of them alone)" in without("head", lost).finding


def test_how_many_gpus_more_is_said_and_ticks_are_plain_numbers() -> None:
    rows = data().rows
    wide = (rows["mode"] == "ar") & (rows["gpus"] == 2)
    four = rows.assign(gpus=rows["gpus"].where(~wide, 4), tp=rows["tp"].where(~wide, 4))
    (item,) = draw(Data(four), "pareto")
    assert isinstance(item, Drawn)
    assert "AR, T+3 GPUs" in legend(item.poster) and "AR, T+1 GPUs" not in legend(item.poster)
    for name in ("pareto", "predicted"):
        ticks = [t.get_text() for t in poster(name).axes[0].get_yticklabels(which="both")]
        assert any(ticks) and all(re.fullmatch(r"[\d.]*", t) for t in ticks), ticks


def test_growth_that_never_ended_is_said_on_the_empty_panel() -> None:
    rows = data().rows.assign(t_growth_s=float("nan"))
    (item,) = draw(Data(rows), "fan_out")
    assert isinstance(item, Drawn)
    told = [text.get_text() for text in item.poster.axes[1].texts]
    assert any("never grown to its end" in text for text in told)
    assert not any("never" in t.get_text() for t in poster("fan_out").axes[1].texts)


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


def test_measured_gains_are_of_medians() -> None:
    rows = data().rows
    lucky = rows[rows["method"] == "SSD"].assign(tok_per_s=lambda r: 3 * r["tok_per_s"])
    unlucky = lucky.assign(tok_per_s=lucky["tok_per_s"] / 9)
    (item,) = draw(Data(pd.concat([rows, lucky, unlucky], ignore_index=True)), "break_even")
    assert isinstance(item, Drawn)
    gains = [
        p.table().query("series == 'measured'")["gain"] for p in (item.poster, poster("break_even"))
    ]
    assert np.allclose(*gains)


def test_a_picture_without_a_point_is_none() -> None:
    rows = data().rows
    sd = rows["mode"] == "sd"
    (item,) = draw(Data(rows[~sd]), "cache_hits")
    assert isinstance(item, Skipped) and "compare" in item.why


def test_titles_of_neighbours_stay_apart_where_rivals_are_not_known() -> None:
    rows = data().rows
    figure = without("break_even", (rows["mode"] == "ar") & (rows["gpus"] == 2)).poster
    renderer = figure.canvas.get_renderer()
    raw, per_gpu = (ax.title.get_window_extent(renderer) for ax in figure.axes[:2])
    assert "not known" in figure.axes[0].get_title()
    assert figure.bbox.x0 <= raw.x0 and raw.x1 < per_gpu.x0


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
    uses = _uses(ssd, per_gpu=False)
    assert [use.tok_per_s for use in uses] == [500.0 if best == 4 else 450.0]
