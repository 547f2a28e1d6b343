"""Writes one self-contained HTML page: every figure with its finding, conditions and numbers.

The page fetches nothing and contains no date: the same rows give the same page.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.build import Drawn, Skipped, draw_all, jobs_of, slug
from analysis.figures import FIGURES
from analysis.load import Data
from analysis.notes import NothingLeft
from analysis.page import PAGE
from analysis.style import rendered, write
from analysis.summary import best_of_each, sources
from mpissd.common.compare import HEADLINE_ROUNDS, HEADLINE_SEEDS

_ROWS_SHOWN = 400


def write_report(data: Data, out: Path, tell: Callable[[str], None]) -> Path:
    """Writes OUT/report.html and returns its path.

    tell: called with a line for each figure that is drawn or skipped. Raises NothingLeft if no
    figure could be drawn, ConfigError if OUT cannot be written.
    """
    path = out / "report.html"
    write(path, render(data, tell).encode())
    return path


def render(data: Data, tell: Callable[[str], None]) -> str:
    """Returns the page as HTML; `tell` as in write_report."""
    items = []
    for item in draw_all(data):
        end = "drawn" if isinstance(item, Drawn) else f"skipped: {item.why}"
        tell(f"{slug(item.machine)}/{item.name}: {end}")
        items.append(item)
    names = [
        m
        for m in dict.fromkeys(machine for machine, _ in jobs_of(data))
        if any(isinstance(i, Drawn) and i.machine == m for i in items)
    ]
    if not names:
        raise NothingLeft("no figure can be drawn from these rows: `all` says what each needs")
    sections = "\n".join(
        _section(name, [i for i in items if i.machine == name], data) for name in names
    )
    links = " ".join(f'<a href="#{slug(name)}">{escape(name)}</a>' for name in names)
    rows, loads = len(data.rows), len(data.loads)
    also = f" and {loads} loads" if loads else ""
    intro = (
        f"{rows} rows{also} from {len(names)} machines. Every figure says on itself which hardware "
        "it shows, whether that was measured or emulated, and how its forwards were made; its "
        "numbers can be downloaded below it."
    )
    return PAGE.substitute(
        intro=escape(intro),
        links=links,
        sections=sections,
        sources=_table(sources(data)),
        dropped=_list("Left out while reading", data.notes.lines),
    )


def _section(machine: str, items: list[Drawn | Skipped], data: Data) -> str:
    drawn = [item for item in items if isinstance(item, Drawn)]
    skipped = [f"{item.name}: {item.why}" for item in items if isinstance(item, Skipped)]
    figures = "\n".join(_figure(item) for item in drawn)
    tag = '<span class="tag">emulated</span>' if "emulated" in machine else ""
    table = best_of_each(data, machine)
    return (
        f'<section id="{slug(machine)}"><h2>{escape(machine)} {tag}</h2>'
        f"{_best(table)}{figures}{_list('No rows for', skipped)}</section>"
    )


def _best(table: pd.DataFrame) -> str:
    if table.empty:
        return ""
    return (
        f"<h3>Best of each method</h3>{_table(table)}"
        "<p class='small'>Each at its own best K (by the predicted mean), one sequence; gains "
        f"over AR on the target GPUs with their 95% intervals; a speedup is claimed from "
        f"{HEADLINE_SEEDS} seeds of {HEADLINE_ROUNDS} rounds on.</p>"
    )


def _figure(item: Drawn) -> str:
    poster = item.poster
    name = item.name
    about = FIGURES[name.split("-")[0]].about
    image = base64.b64encode(rendered(poster, "svg")).decode()
    anchor = f"{slug(item.machine)}-{slug(name)}"
    numbers = poster.table()
    csv = base64.b64encode(numbers.to_csv(index=False, float_format="%.6g").encode()).decode()
    download = f"{slug(item.machine)}-{slug(name)}.csv"
    alt = escape(f"{poster.heading}: {about}. {item.finding}")
    return (
        f'<figure id="{anchor}"><h3>{escape(poster.heading)}</h3>'
        f'<div class="pan" tabindex="0"><img alt="{alt}" '
        f'src="data:image/svg+xml;base64,{image}"></div>'
        f"<p class='finding'>{escape(item.finding)}</p>"
        f"<figcaption>{escape(poster.caption)}</figcaption>"
        f'<p class="links"><a download="{download}" href="data:text/csv;base64,{csv}">'
        f"numbers (CSV, {len(numbers)} points)</a></p>"
        f"<details><summary>Numbers</summary>{_table(numbers.head(_ROWS_SHOWN))}"
        f"{_more(len(numbers))}</details>{_list('Left out', item.notes)}</figure>"
    )


def _more(count: int) -> str:
    return (
        f"<p class='small'>The first {_ROWS_SHOWN}; all are in the CSV.</p>"
        if count > _ROWS_SHOWN
        else ""
    )


def _list(title: str, lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return (
        f"<details class='notes'><summary>{title}</summary><ul>{items}</ul></details>"
        if items
        else ""
    )


def _table(frame: pd.DataFrame) -> str:
    if frame.empty:
        return "<p class='small'>No rows.</p>"
    head = "".join(f"<th scope='col'>{escape(str(c))}</th>" for c in frame.columns)
    body = "".join(
        "<tr>" + "".join(_cell(value) for value in row) + "</tr>"
        for row in frame.itertuples(index=False)
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class='pan' tabindex='0'>{table}</div>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        text = "" if pd.isna(value) else f"{value:.4g}"
        return f"<td class='n'>{text}</td>"
    return f"<td>{escape('' if value is None else str(value))}</td>"
