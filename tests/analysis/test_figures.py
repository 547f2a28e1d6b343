"""Every figure, as an object: axes, legends, points, caption; its numbers by hand; its rivals."""

import json
import os
import re
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text

from analysis.__main__ import draw, main
from analysis.figures import FIGURES
from analysis.figures.roofline import roofline, window
from analysis.figures.study import (
    COLUMNS,
    PLACES,
    Place,
    gain_of,
    measured_gains,
    over_all_prompts,
    pays,
    whole_pays,
)
from analysis.rows import Data, NothingLeft, complete, load, tidy
from analysis.select import cases, on_machine, plain, where
from analysis.style import Poster, rendered, themed
from tests.scripts import ROOT, python

FIXTURE = Path(__file__).parent / "fixture"
STUDY = "measured where_it_pays hidden".split()
OF_ROWS = sorted({*FIGURES} - {"roofline", "window", "saguaro", "kinds", "drafts", *STUDY})
RESULTS = FIXTURE.parents[2] / "results"
Line = dict[str, Any]


@lru_cache(maxsize=1)
def data() -> Data:
    return load([FIXTURE])


def test_figures_depend_on_no_setting_of_a_user(tmp_path: Path) -> None:
    """Nor on their environment: the files of a hostile one have the same bytes."""
    settings = "text.usetex: True\nfont.size: 30\nsavefig.bbox: tight\nsvg.fonttype: none\n"
    (tmp_path / "matplotlibrc").write_text(settings + "axes.formatter.use_locale: True\n")
    hostile = {
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
        "HOME": "/proc/none",
        "LC_ALL": "tr_TR.UTF-8",
        "SOURCE_DATE_EPOCH": "0",
        "PYTHONIOENCODING": "ascii",
        "COLUMNS": "20",
    }
    files = []
    for name, folder, variables in (("plain", ROOT, {}), ("hostile", tmp_path, hostile)):
        out = tmp_path / name
        words = ["-m", "analysis", "latency", f"--results={FIXTURE}", f"--out={out}"]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
        done = python(*words, cwd=folder, env=environ)
        assert done.returncode == 0, done.stderr
        files.append({path.name: path.read_bytes() for path in out.rglob("latency.*")})
    assert len(files[0]) == 3 and files[0] == files[1]
    assert b"/Type /Font /Subtype /Type3" not in files[0]["latency.pdf"]


def raw() -> list[Line]:
    return [json.loads(line) for line in (FIXTURE / "runs.jsonl").read_text().splitlines()]


def made(lines: list[Line]) -> Data:
    return Data(tidy(complete(line, FIXTURE) for line in lines))


def drawn(source: Data, name: str) -> Poster:
    (item,) = draw(source, name)
    assert item.poster is not None, item.why
    return item.poster


@lru_cache(maxsize=20)
def poster(name: str) -> Poster:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = drawn(data(), name)
        rendered(figure, "png")  # a layout that collapses only warns
    return figure


def rate(**values: object) -> float:
    """tok/s of the one raw row that has these values."""
    (row,) = [r for r in raw() if all(r.get(k) == v for k, v in values.items())]
    return float(row["tok_per_s"])


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
    conditions = "NVIDIA H100 80GB SXM (EMULATED", "GEMM-only", "float16", "01234567", "LM head"
    for what in (figure.heading, "1 seed", *conditions):
        assert what in texts, what
    texts_on_the_sheet(figure)


def texts_on_the_sheet(figure: Poster) -> None:
    figure.draw_without_rendering()  # labels make room for their ticks
    renderer, sheet = figure.canvas.get_renderer(), figure.bbox
    caption = figure.texts[1].get_window_extent(renderer)
    assert figure.texts[1].get_text().count("\n") < 3 and caption.x1 <= sheet.x1
    for text in (child for at in (figure, *figure.axes) for child in at.get_children()):
        if isinstance(text, Text) and text.get_text().strip() and text.get_visible():
            box = text.get_window_extent(renderer)
            assert sheet.x0 - 1 <= box.x0 and box.x1 <= sheet.x1 + 1, text
            assert sheet.y0 - 1 <= box.y0 and box.y1 <= sheet.y1 + 1, text
    for ax in figure.axes:
        assert ax.has_data()
        for text in (ax.xaxis.label, *ax.get_yticklabels()):
            assert text.get_window_extent(renderer).x0 >= sheet.x0 - 1, text
        for text in (ax.title, ax.xaxis.label, ax.yaxis.label):
            if text.get_text() and text.get_visible():
                box = text.get_window_extent(renderer)
                assert box.x0 >= sheet.x0 - 1 and box.x1 <= sheet.x1 + 1, text
                assert box.y0 >= caption.y1 - 1, text
    for of in figure.legends:
        box = of.get_window_extent(renderer)
        assert box.x1 <= sheet.x1 + 1
        assert all(box.y0 >= ax.get_window_extent(renderer).y1 - 1 for ax in figure.axes)


def test_throughput() -> None:
    figure = poster("throughput")
    assert "Hits assumed" in figure.caption
    titles = [ax.get_title() for ax in figure.axes[:3]]
    assert titles == ["α = 0.6", "α = 0.8", "each at its best K"]
    labels = {ax.get_ylabel() for ax in figure.axes}
    assert {"tok/s, all GPUs", "tok/s, per GPU"} <= labels
    legend = {text.get_text() for of in figure.legends for text in of.get_texts()}
    assert legend == {"AR, 1 GPU", "AR, 2 GPUs", "SD", "SD inline", "SSD"}
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


def test_cache_hits() -> None:
    over = series("cache_hits", "SSD, hits imposed, over SD")
    assert list(over["x"]) == [0, 0.25, 0.5, 0.75, 0.9, 1]
    at = {"acceptance": "alpha:0.8", "lookahead": 4, "batch_size": 1, "lm_head": False}
    sd = rate(mode="sd", num_drafts=1, draft="llama-3.2-1b", **at)
    inline = rate(mode="sd", num_drafts=0, **at)
    ssd = rate(mode="ssd", hit_law="p_hit:1.0", **at)
    assert over["y"].iloc[-1] == pytest.approx(ssd / sd)
    over = series("cache_hits", "SSD, hits imposed, over SD inline on one GPU less")
    assert over["y"].iloc[-1] == pytest.approx(ssd / inline)
    formula = series("cache_hits", "closed formula")
    assert formula["y"].iloc[0] == pytest.approx(1, abs=0.05)  # every miss is a round of SD
    assert formula["y"].is_monotonic_increasing
    assert "Hits imposed cost no branches" in poster("cache_hits").caption


def test_batch() -> None:
    """A batch hits with p^b if its sequences are independent, so less often the larger it is."""
    drawn_hits = series("batch", "SSD, hits imposed, over SD")
    assert len(drawn_hits) >= 3 and drawn_hits["x"].iloc[0] == 1
    assert series("batch", "closed formula, hits independent")["y"].is_monotonic_decreasing


def test_window() -> None:
    """y is a verification's time over a draft forward's of one row; K forwards are a line."""
    target, draft = (table["seconds"] for table in data().profiles[0]["tables"]["forwards"])
    with themed():
        numbers = window(replace(data(), notes=[])).table().set_index("series")
    at = numbers.loc["70B on 2 GPUs"].set_index("x")["y"]
    assert at[8] == pytest.approx(target["8"] / draft["1"]) and list(at.index) == [2, 4, 8, 16]
    ends = numbers.loc["K draft forwards"]
    assert list(ends["y"]) == list(ends["x"] - 1)


def test_roofline() -> None:
    with themed():
        figure = roofline(replace(data(), notes=[]))
    numbers = figure.table()
    profile = data().profiles[0]
    table = profile["tables"]["forwards"][0]
    ends = numbers[numbers["series"] == "70B forward, T=2"]
    assert len(ends) == len(table["seconds"])
    read_s = 2 * table["params"] / profile["numbers"]["read_bytes_per_s"]["value"]
    assert ends["y"].iloc[0] == pytest.approx(read_s / table["seconds"]["1"])
    roof = numbers[numbers["series"].str.startswith("measured ceiling")]
    peak = profile["numbers"]["peak_flops_per_s"]["value"] / 1e12
    assert set(roof["y"]) == {1.0} and roof["series"].iloc[0].endswith(f"{peak:.0f} Tflop/s")
    assert (ends["y"] < 1).all()
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


def test_no_frontier_is_drawn_over_uses_that_were_not_measured() -> None:
    """SD inline at one batch size leaves none."""
    rows = data().rows
    few = rows[(rows["method"] != "SD inline") | (rows["batch_size"] == 1)]
    figure = drawn(Data(few), "pareto")
    assert "frontier" not in set(figure.table()["series"])
    assert "no frontier" in " ".join(text.get_text() for text in figure.axes[0].texts)


def test_the_first_sweep_of_the_pages_is_drawn_and_what_is_missing_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AR, SD and SSD at two K, on cores, which are not called GPUs."""
    at = {"batch_size": 1, "lm_head": False, "acceptance": "alpha:0.8", "lookahead": [2, 4]}
    rows = [
        {**row, "backend": "numpy", "device_name": "CPU"}
        for row in raw()
        if row["tp"] == 1 and row["batch_size"] == 1
        if row["mode"] == "ar"
        or all(row.get(k) in (v if isinstance(v, list) else [v]) for k, v in at.items())
    ]
    rows = [row for row in rows if not str(row.get("hit_law")).startswith("p_hit")]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [f"--results={tmp_path}", f"--out={tmp_path}", "--formats=png", "--workers=1"]
    assert main(["all", *words]) == 0
    out, err = capsys.readouterr()
    for name in ("throughput", "latency", "pareto"):
        assert f"cpu/{name}" in out
        (item,) = draw(load([tmp_path]), name)
        assert item.poster is not None
        texts = [text.get_text() for text in item.poster.findobj(Text)]
        assert any("core" in text for text in texts) and not any("GPU" in text for text in texts)
        texts_on_the_sheet(item.poster)
    for name in ("cache_hits", "window", "measured"):
        assert name in err.partition("not drawn, ")[2]


@pytest.mark.parametrize("name", FIGURES)
def test_the_help_of_a_figure_says_which_rows_it_needs(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    assert re.search(r"It needs \w.*\.\n", capsys.readouterr().out)


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
    rows = load([RESULTS / "drafts" / "h200.jsonl"])
    numbers = drawn(rows, "drafts").table()
    steps = numbers[(numbers["panel"] == "one draft step, µs") & (numbers["series"] == "K=4")]
    assert list(steps["x"]) == [1, 2, 3, 4, 6] and steps["y"].is_monotonic_increasing


@lru_cache(maxsize=1)
def study() -> Data:
    return load([RESULTS / name for name in ("h200-pairs", "extra-gpu", "h200-parallel")])


@pytest.mark.parametrize("name", STUDY)
def test_a_figure_of_the_study_keeps_its_texts_on_the_sheet(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (item,) = draw(study(), name, "NVIDIA H200")
        assert item.poster is not None, item.why
        rendered(item.poster, "png")
    texts_on_the_sheet(item.poster)
    assert "NVIDIA H200" in item.poster.caption and item.poster.heading.endswith("?")


def test_a_bar_is_the_median_of_a_use_s_runs() -> None:
    """The strongest is first; its title has SSD over the strongest other use."""
    figure = drawn(on_machine(study(), "NVIDIA H200"), "measured")
    for ax in figure.axes:
        bars = figure.table()
        bars = bars[bars["panel"] == ax.get_title(loc="left")]
        assert bars["y"].is_monotonic_decreasing and (bars["n"] >= 2).all()
        assert ((bars["low"] <= bars["y"]) & (bars["y"] <= bars["high"])).all()
        is_ssd = bars["series"].str.startswith("SSD")
        gain = bars[is_ssd]["y"].max() / bars[~is_ssd]["y"].max()
        assert float(re.search(r"SSD (\d\.\d\d)×", bars["panel"].iloc[0])[1]) == pytest.approx(  # type: ignore[index]
            gain, abs=0.02
        )


def test_rates_over_all_prompts_are_those_measured_over_all() -> None:
    """Tokens and hits of a replay without a GPU, in a measured row's time."""
    rows = where(study().rows, token_limit=128)
    replays = study().replays
    found = over_all_prompts(rows, replays)
    assert len(rows) == 6 and np.allclose(found["rate"], rows["tok_per_s"], rtol=1e-3)
    some = where(study().rows, mode="ssd", parallel_drafting=True, lookahead=8)
    hits = some["hit_rate"] - 0.01  # .01 more misses are as many draft forwards
    fewer = over_all_prompts(some.assign(hit_rate=hits), replays)["rate"]
    seconds = 1 / over_all_prompts(some, replays)["rate"] - 1 / fewer
    per_token = some["t_draft_s"] / over_all_prompts(some, replays)["tokens"]
    assert np.allclose(seconds, 0.01 * per_token)


def test_the_parts_of_a_bar_are_its_round() -> None:
    """Also of chained rounds, in which the lead waits for nobody."""
    bars = drawn(on_machine(study(), "NVIDIA H200"), "latency").table()
    leads = bars[bars["series"].str.endswith("lead")].groupby(["panel", "series"])["ms"].sum()
    for (_, series), ms in leads.items():
        row = study().rows.loc[(1e3 * study().rows["round_s"] - ms).abs().idxmin()]
        assert ms == pytest.approx(1e3 * row["round_s"], rel=1e-3), series


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_a_cell_of_the_map_is_the_fastest_predicted_use(place: Place) -> None:
    """Of those on as many GPUs, at the T allowed and under the cell's conditions."""
    usual = {"profile": "h200", "batch_size": 1, "host": 1.0, "draft": 1.0, "link": "shm"}
    cells = where(study().cells, pair=place.pair, **usual | dict(place.also))
    cells = where(cells, gpus=place.gpus) if "link" in place.also else cells
    cells = cells[(cells["tp"] + cells["num_drafts"]).le(place.gpus)]
    cells = cells[cells["tp"].isin(place.degrees)]
    for law, one_forward in COLUMNS.values():
        found = place.uses(study().cells, law, one_forward)
        alike = where(cells, law=law, one_forward=one_forward)
        best = alike.groupby("mode")["tok_per_s"].max()
        best = best if law.endswith("temp. 0") else best.drop("lookup", errors="ignore")
        assert found["tok_per_s"].tolist() == sorted(best, reverse=True)


def test_the_map_errs_in_the_sign_of_one_measured_cell_alone() -> None:
    """Which loses 3%, as predicted for the kernels that were measured: docs/map.md says so."""
    data = on_machine(study(), "NVIDIA H200")
    cells = pd.read_json(RESULTS / "extra-gpu/cells_before.jsonl", lines=True)
    wrong = {}
    for (name, column), seen in measured_gains(data).items():
        place = next(of for of in PLACES if of.name == name)
        told, _ = gain_of(place.uses(cells, *COLUMNS[column]))
        assert abs(told / seen - 1) < 0.16
        if (told > 1) != (seen > 1):
            wrong[name, column] = 1 - seen
    assert [*wrong] == [("8B, 2 GPUs", "code, temp. 0.7")] and max(wrong.values()) < 0.05


def test_the_closed_form_is_near_the_gains_it_was_fitted_to() -> None:
    products, whole = [*pays(study().rows)], [*whole_pays(study().rows)]
    assert len(products) > 9 and len(whole) > 3
    assert max(abs(one.predicted / one.measured - 1) for one in products) < 0.06
    for one in whole:  # at equal K the sign of this difference decides
        if one.name.startswith("8B chat, 2"):
            hides = not one.name.endswith("in one forward")
            assert (
                (one.hidden_s > one.saved_s) == (one.predicted > 1) == (one.measured > 1) == hides
            )


@pytest.mark.parametrize("name", FIGURES)
def test_no_figure_is_drawn_of_rows_of_ar_alone(name: str) -> None:
    ar = data().rows[data().rows["mode"] == "ar"]
    (item,) = draw(Data(ar.head(3)), name)
    assert item.poster is None and item.why


def test_a_case_has_the_rows_of_one_folder() -> None:
    rows = data().rows
    twice = pd.concat([rows, rows.head(30).assign(folder="other")], ignore_index=True)
    notes: list[str] = []
    found = cases(Data(twice, (), notes), plain(twice), ["alpha", "lookahead"])
    assert found[0].label == "8B/1B, T=1"
    assert set(found[0].rows["folder"]) | set(found[0].ar["folder"]) == {str(FIXTURE)}
    assert any("another set than" in line for line in notes)
