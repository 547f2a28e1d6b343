"""Every figure, as an object: axes, legends, points, caption; its numbers by hand; its rivals."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from analysis.__main__ import draw
from analysis.figures import FIGURES
from analysis.figures.roofline import roofline
from analysis.model import Times
from analysis.rows import Data, Notes, NothingLeft, complete, load, tidy
from analysis.select import cases, plain
from analysis.style import Poster, rendered, themed
from mpissd.lab.tables.claims import claims

FIXTURE = Path(__file__).parent / "fixture"
OF_ROWS = sorted(set(FIGURES) - {"roofline", "saguaro", "kinds", "drafts"})
Line = dict[str, Any]


@lru_cache(maxsize=1)
def data() -> Data:
    return load([FIXTURE])


def raw() -> list[Line]:
    return [json.loads(line) for line in (FIXTURE / "runs.jsonl").read_text().splitlines()]


def made(lines: list[Line]) -> Data:
    return Data(tidy(complete(line, FIXTURE) for line in lines))


@lru_cache(maxsize=1)
def five_seeds() -> Data:
    """The fixture as if each row were of 400 rounds and five seeds, 2% from each to the next."""
    many = {"num_rounds": 400}
    return made(
        [
            row | many | {"run_id": f"{row['run_id']}-{seed}", "seed": seed}
            | {"tok_per_s": row["tok_per_s"] * 1.02**seed}
            for row in raw()
            for seed in range(5)
        ]
    )  # fmt: skip


def drawn(source: Data, name: str) -> Poster:
    (item,) = draw(source, name)
    assert item.poster is not None, item.why
    return item.poster


@lru_cache(maxsize=20)
def poster(name: str) -> Poster:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = drawn(five_seeds() if name == "equal_gpus" else data(), name)
        rendered(figure, "png")  # a layout that collapses only warns
    return figure


def rate(**values: object) -> float:
    """tok/s of the one raw row that has these values."""
    (row,) = [r for r in raw() if all(r.get(k) == v for k, v in values.items())]
    return float(row["tok_per_s"])


def legend(figure: Poster) -> list[str]:
    return [text.get_text() for of in figure.legends for text in of.get_texts()]


def series(name: str, label: str, panel: str = "") -> pd.DataFrame:
    numbers = poster(name).table()
    found = numbers[
        (numbers["series"] == label) & numbers["panel"].str.contains(panel, regex=False)
    ]
    assert len(found), f"{name}: no {label!r} in {sorted(set(numbers['series']))}"
    return found


@pytest.mark.parametrize("name", OF_ROWS)
def test_a_figure_names_its_conditions_and_its_texts_stay_on_the_sheet(name: str) -> None:
    figure = poster(name)
    texts = " ".join(text.get_text() for text in figure.texts).replace("\n", " ")
    seeds = "5 seeds" if name == "equal_gpus" else "1 seed"
    conditions = "NVIDIA H100 80GB SXM (EMULATED", "GEMM-only", "float16", "01234567", "LM head"
    for what in (figure.heading, seeds, *conditions):
        assert what in texts, what
    figure.draw_without_rendering()  # labels make room for their ticks
    renderer, sheet = figure.canvas.get_renderer(), figure.bbox
    caption = figure.texts[1].get_window_extent(renderer)
    assert figure.texts[1].get_text().count("\n") < 3 and caption.x1 <= sheet.x1
    for ax in figure.axes:
        assert ax.has_data()
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            if text.get_text() and text.get_visible():
                box = text.get_window_extent(renderer)
                assert box.x0 >= sheet.x0 - 1 and box.x1 <= sheet.x1 + 1, text
                assert box.y0 >= caption.y1 - 1, text
    for of in figure.legends:
        box = of.get_window_extent(renderer)
        assert box.x1 <= sheet.x1 + 1
        assert all(box.y0 >= ax.get_window_extent(renderer).y1 - 1 for ax in figure.axes)


def test_a_second_run_gives_the_same_bytes() -> None:
    again = drawn(load([FIXTURE]), "latency")
    for kind in ("png", "pdf"):
        assert rendered(again, kind) == rendered(poster("latency"), kind)
    assert b"/Type /Font /Subtype /Type3" not in rendered(again, "pdf")


def test_throughput() -> None:
    figure = poster("throughput")
    assert "Hits assumed" in figure.caption
    titles = [ax.get_title() for ax in figure.axes[:3]]
    assert titles == ["α = 0.6", "α = 0.8", "each at its best K"]
    labels = {ax.get_ylabel() for ax in figure.axes}
    assert {"tok/s, all GPUs", "tok/s, per GPU"} <= labels
    expected = {f"{use} T=2 (expected, not measured)" for use in ("SD inline", "lookup")}
    assert {"AR, 1 GPU", "AR, 2 GPUs", "SD", "SD inline", "SSD"} | expected == set(legend(figure))
    ssd = series("throughput", "SSD", "α = 0.8, all GPUs")
    assert list(ssd["x"]) == [2, 4, 6, 8]
    assert (ssd["low"] <= ssd["y"]).all() and (ssd["y"] <= ssd["high"]).all()
    at = {"acceptance": "alpha:0.8", "hit_law": "power:A=0.75,r=1.0", "lookahead": 6, "mode": "ssd"}
    assert ssd["y"].iloc[2] == rate(**at)
    halves = series("throughput", "SSD", "α = 0.8, per GPU")["y"]
    assert np.allclose(halves * 2, ssd["y"])
    inline = series("throughput", "SD inline", "α = 0.8, per GPU")["y"]
    assert np.allclose(inline, series("throughput", "SD inline", "α = 0.8, all GPUs")["y"])
    best = series("throughput", "SSD", "own best K, all")
    assert best["y"].max() == ssd["y"].max() and len(best) == 2
    assert series("throughput", "AR, 2 GPUs", "all GPUs")["y"].iloc[0] == rate(mode="ar", tp=2)


def test_equal_gpus() -> None:
    """The tok/s and gains equal the table of `mpissd compare --show=claims` for the same rows."""
    rows = five_seeds().rows.query("lm_head == False and batch_size == 1")
    told = {c.setting["acceptance"]: c for c in claims(list(rows[plain(rows)]["row"]))}
    title = "8B/1B on 2 GPUs, without LM head"
    lines = {name: series("equal_gpus", name, title) for name in ("AR", "SD", "SSD")}
    assert list(lines["SSD"]["x"]) == [0.6, 0.8] and lines["AR"]["y"].nunique() == 1
    assert lines["AR"]["y"].iloc[0] == pytest.approx(1.02**2 * rate(mode="ar", tp=2))
    for line in lines.values():  # Student's t over five seeds, 2% apart
        spread = np.log(line["high"] / line["low"]) / 2
        assert np.allclose(spread, 2.776445 * np.log(1.02) * np.sqrt(2.5 / 5))
    gains = series("equal_gpus", "_SSD over the strongest measured use of its visit").set_index("x")
    for alpha, drawn_gain in gains.iterrows():
        known = told[f"alpha:{alpha}"]
        assert known.gain and drawn_gain["y"] == pytest.approx(known.gain.speedup)
        assert drawn_gain["rival"] == str(known.other) and drawn_gain["text"] == known.text
        assert "no verdict: " in known.text and "SD inline T=2 not measured" in known.text
    assert "SD inline T=2 (expected, not measured)" in legend(poster("equal_gpus"))


def test_cache_hits() -> None:
    over = series("cache_hits", "over SD")
    assert list(over["x"]) == [0, 0.25, 0.5, 0.75, 0.9, 1]
    at = {"acceptance": "alpha:0.8", "lookahead": 4, "batch_size": 1, "lm_head": False}
    sd = rate(mode="sd", num_drafts=1, draft="llama-3.2-1b", **at)
    inline = rate(mode="sd", num_drafts=0, **at)
    ssd = rate(mode="ssd", hit_law="p_hit:1.0", **at)
    assert over["y"].iloc[-1] == pytest.approx(ssd / sd)
    raw_gain = series("cache_hits", "over SD inline")["y"].iloc[-1]
    assert raw_gain == pytest.approx(ssd / inline)
    assert "Hits imposed cost no branches" in poster("cache_hits").caption
    formula = series("cache_hits", "closed formula, over SD")
    assert len(formula) == 51 and formula["y"].is_monotonic_increasing
    times = Times(1, 1.0, 0.6, 0.7, False, 1.1, 0.2, miss_step=0.2, grow=0.1, host=0.05, most_k=8)
    assert times.ssd(0.8, 4, 0.0) == pytest.approx(times.sd(0.8, 4))  # every miss is a round of SD
    (ax,) = poster("cache_hits").axes
    assert ax.get_xlabel().endswith("p_hit") and ax.get_ylabel().endswith("×")


def test_roofline() -> None:
    with themed():
        figure = roofline(replace(data(), notes=Notes()))
    numbers = figure.table()
    profile = data().profiles[0]
    table = profile["tables"]["forwards"][0]
    ends = numbers[numbers["series"] == "70B forward, T=2"]
    assert len(ends) == len(table["seconds"])
    assert ends["y"].iloc[0] == pytest.approx(2 * table["params"] / table["seconds"]["1"] / 1e12)
    roof = numbers[numbers["series"].str.startswith("measured ceiling")]
    assert roof["y"].max() * 1e12 == profile["numbers"]["peak_flops_per_s"]["value"]
    assert (ends["y"] < ends["x"] * profile["numbers"]["read_bytes_per_s"]["value"] / 1e12).all()
    assert (
        sum(len(t["seconds"]) for t in profile["tables"]["products"])
        == (numbers["series"] == "one cuBLAS product").sum()
    )
    labels = {ax.get_xlabel() for ax in figure.axes}
    assert labels == {"flop per byte moved", "message, KB"}
    assert "NVIDIA H200 (measured by mpissd probe" in figure.caption


def test_pareto() -> None:
    ssd = series("pareto", "SSD, hits imposed, T+1 GPUs")
    at = {"mode": "ssd", "batch_size": 32, "hit_law": "p_hit:0.75"}
    assert ssd["x"].iloc[-1] == pytest.approx(rate(**at) / 32)
    assert ssd["y"].iloc[-1] == pytest.approx(rate(**at) / 2)
    assert "Hits imposed cost no branches" in poster("pareto").caption
    front = series("pareto", "frontier").sort_values("x")
    assert not set(front["x"]) & set(ssd["x"])
    assert front["y"].is_monotonic_decreasing
    dots = poster("pareto").table()
    dots = dots[(dots["series"] != "frontier") & ~dots["series"].str.contains("imposed")]
    for _, dot in dots.iterrows():  # nothing beats a point of the frontier
        assert not ((front["x"] < dot["x"]) & (front["y"] < dot["y"])).any()


def test_kinds() -> None:
    """A model, heads, a lookup without a forward and a draft over a lookup, against AR."""
    text = {
        **{"mode": "sd", "workload": "text", "num_drafts": 0, "inline_draft": True},
        **{"lookahead": 4, "prompts_sha256": "p", "token_limit": 64, "temperature": 0.0},
        **{"backup": "jit", "backup_lookahead": 4, "fan_out": None, "world_size": 1, "tp": 1},
    }
    told: list[dict[str, object]] = [
        {"draft": "smollm2-draft", "T_SD": 0.9, "acceptance_length": 2.6, "tok_per_s": 1400.0},
        {"draft": "medusa", "T_SD": 0.1, "acceptance_length": 2.0, "tok_per_s": 1800.0},
        {"draft": "lookup", "lookup": "suffix", "T_SD": None, "acceptance_length": 1.5},
        {"draft": "smollm2-draft", "draft_lookup": "suffix", "T_SD": 0.7, "acceptance_length": 2.6},
        {"draft": "other", "T_SD": 0.2, "acceptance_length": 9.0, "prompts_sha256": "q"},
        {"mode": "ar", "draft": None, "lookahead": 0, "T_SD": None, "tok_per_s": 1000.0},
    ]
    rows = [{**raw()[0], **text, "run_id": f"k{n}", **row} for n, row in enumerate(told)]
    frame = made(rows).rows
    with themed():
        figure = FIGURES["kinds"].draw(Data(frame))
    numbers = figure.table().set_index("series")
    names = {"medusa", "smollm2-draft", "smollm2-draft over suffix", "lookup: suffix", "AR"}
    assert set(numbers.index) == names and numbers["x"][:-1].is_monotonic_increasing
    assert np.allclose(numbers["x"][["medusa", "smollm2-draft", "AR"]], [2.0 / 1.8, 2.6 / 1.4, 1])
    assert np.allclose(numbers["over_ar"][["medusa", "smollm2-draft"]], [1.8, 1.4])
    (ax,) = figure.axes
    beside = [text.get_text() for text in ax.texts]
    assert "K=4: 1.80×" in beside and "K=4: 1.40×" in beside
    dotted = [line.get_xydata() for line in ax.lines if line.get_linestyle() == ":"]
    assert 1.0 in {round(y / x, 6) for _, (x, y) in dotted}  # AR's own point is on 1×
    assert "equal speedup" in figure.caption
    with pytest.raises(NothingLeft, match="by two drafts"):
        FIGURES["kinds"].draw(Data(frame[frame["draft"] != "medusa"].head(1)))


def test_drafts_of_the_committed_rows() -> None:
    rows = load([FIXTURE.parents[2] / "results" / "drafts" / "h200.jsonl"])
    numbers = drawn(rows, "drafts").table()
    steps = numbers[(numbers["panel"] == "one draft step, µs") & (numbers["series"] == "K=4")]
    assert list(steps["x"]) == [1, 2, 3, 4, 6] and steps["y"].is_monotonic_increasing


def test_break_even() -> None:
    numbers = poster("break_even").table()
    raw_gain, per_gpu = (
        numbers[(numbers["series"] == "formula") & numbers["panel"].str.contains(word)]
        for word in ("raw", "per GPU")
    )
    assert raw_gain["gain"].max() > 1 > per_gpu["gain"].max()
    dots = numbers[
        (numbers["series"] == "measured, hits imposed") & numbers["panel"].str.contains("raw")
    ]
    ssd = rate(acceptance="alpha:0.8", hit_law="p_hit:1.0", mode="ssd")
    best = dots[(dots["x"] == 0.8) & (dots["y"] == 1.0)]["gain"].iloc[0]
    assert best < ssd / rate(mode="ar", tp=2)  # SD inline over both is expected ahead
    assert "MODELLED" in poster("break_even").caption


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_is_drawn_of_rows_of_ar_alone(name: str) -> None:
    ar = data().rows[data().rows["mode"] == "ar"]
    (item,) = draw(Data(ar.head(3)), name)
    assert item.poster is None and item.why


def test_a_case_has_the_rows_of_one_folder() -> None:
    rows = data().rows
    twice = pd.concat([rows, rows.head(30).assign(folder="other")], ignore_index=True)
    notes = Notes()
    found = cases(Data(twice, (), notes), plain(twice), ["alpha", "lookahead"])
    assert found[0].label == "8B/1B, T=1"
    assert set(found[0].rows["folder"]) | set(found[0].ar["folder"]) == {str(FIXTURE)}
    assert any("another set than" in line for line in notes.lines)
