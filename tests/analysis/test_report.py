"""The page: one file that fetches nothing, with every figure, its numbers and their sources."""

from __future__ import annotations

import base64
import io
import re
from functools import lru_cache
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from analysis.build import Drawn, draw
from analysis.figures import FIGURES
from analysis.load import load
from analysis.report import render, write_report
from analysis.summary import best_of_each, sources

pytestmark = pytest.mark.slow  # draws every figure
FIXTURE = Path(__file__).parent / "fixture"
H100 = "NVIDIA H100 80GB SXM (emulated)"
VOID = {"meta", "img", "link", "br"}


@lru_cache(maxsize=1)
def page() -> str:
    return render(load([FIXTURE]), print)


class Tags(HTMLParser):
    """Every tag with its attributes; fails where one is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags() -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page())
    assert not parser.open
    return parser.found


def test_it_is_one_file_that_fetches_nothing() -> None:
    for _, attributes in tags():
        for name in ("src", "href"):
            link = attributes.get(name)
            assert link is None or link.startswith(("data:", "#")), link
    assert "<script" not in page() and "@import" not in page() and "url(" not in page()
    assert 'name="viewport"' in page() and "@media print" in page()
    assert "prefers-color-scheme: dark" in page()


def test_every_figure_is_there_with_words_and_numbers() -> None:
    images = [a for tag, a in tags() if tag == "img"]
    downloads = [a for tag, a in tags() if tag == "a" and "download" in a]
    assert len(images) == len(downloads) == 12
    for image in images:
        svg = base64.b64decode(str(image["src"]).split(",", 1)[1])
        assert svg.startswith(b"<?xml") and len(str(image["alt"])) > 40
    names = [str(a["download"]) for a in downloads]
    assert "nvidia-h100-80gb-sxm-emulated-cache-hits.csv" in names
    anchors = [a["id"] for _, a in tags() if "id" in a]
    assert len(anchors) == len(set(anchors))


def test_a_download_is_what_was_drawn() -> None:
    (a,) = [a for _, a in tags() if str(a.get("download")).endswith("cache-hits.csv")]
    text = base64.b64decode(str(a["href"]).split(",", 1)[1]).decode()
    found = pd.read_csv(io.StringIO(text))
    (item,) = draw(load([FIXTURE]), "cache_hits")
    assert isinstance(item, Drawn)
    wanted = item.poster.table()
    assert list(found.columns) == list(wanted.columns) and len(found) == len(wanted)
    assert (found["y"] - wanted["y"]).abs().max() < 1e-4


def test_the_table_of_the_best() -> None:
    table = best_of_each(load([FIXTURE]), H100)
    assert {"AR", "SD", "SD inline", "SSD, p_hit:1.0"} <= set(table["method"])
    first = table.iloc[0]
    assert first["method"] == "AR" and first["GPUs"] == 1 and first["gain"] == ""
    ssd = table[table["method"] == "SSD, p_hit:1.0"].iloc[0]
    assert ssd["per GPU"] == ssd["tok/s"] / 2
    for column, rate in (("gain", "tok/s"), ("gain per GPU", "per GPU")):
        told = re.fullmatch(r"([\d.]+)–([\d.]+) \(few seeds\)", ssd[column])  # one seed: no speedup
        assert told, ssd[column]
        assert float(told[1]) < ssd[rate] / first["tok/s"] < float(told[2])


def test_where_the_rows_came_from() -> None:
    (line,) = sources(load([FIXTURE])).to_dict("records")
    assert line["device"] == H100 and line["rows"] == len(load([FIXTURE]).rows)
    assert line["commits"] == "0123456789ab" and line["Python"] == "3.11.2"
    assert "0123456789ab" in page() and "emulated</span>" in page()


@pytest.fixture
def two_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: FIGURES[name] for name in ("latency", "cache_hits")}
    monkeypatch.setattr("analysis.build.FIGURES", few)


@pytest.mark.usefixtures("two_figures")
def test_what_a_file_says_cannot_become_markup(tmp_path: Path) -> None:
    text = (FIXTURE / "runs.jsonl").read_text().replace("0123456789ab", "<b>bold</b>")
    (tmp_path / "runs.jsonl").write_text(text)
    text = render(load([tmp_path]), print)
    assert "<b>bold" not in text and "&lt;b&gt;bold" in text


@pytest.mark.usefixtures("two_figures")
def test_the_same_rows_give_the_same_page(tmp_path: Path) -> None:
    told: list[str] = []
    path = write_report(load([FIXTURE]), tmp_path / "new", told.append)
    machine = "nvidia-h100-80gb-sxm-emulated"
    assert told == [f"{machine}/latency: drawn", f"{machine}/cache_hits: drawn"]
    text = path.read_text(encoding="utf-8")
    assert path.name == "report.html" and text == render(load([FIXTURE]), print)
    assert text.count("<figure") == 2 and not re.search(r"20\d\d-\d\d-\d\d \d\d:", text)
