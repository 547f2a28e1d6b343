"""Prints a probe's results: a card, and one table of all measurements in µs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpissd.engine.session.session import Session
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.probe.sample import Entry

_SHOWN_ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
_UNSTEADY = 0.1  # An interquartile range above this share of the median is marked by ~.
Lines = Iterator[tuple[str, str]]


def print_probe_card(session: Session) -> None:
    """Prints the probe's plan (stdout)."""
    job, backend = session.job, session.backend
    draft = f" + {job.draft.name}" if job.draft else ""
    lines = [
        ("probe", f"{job.target.name}, T={job.tp}{draft}, D={job.config.drafts}"),
        ("backend", f"{backend.name} ({backend.dtype_name})"),
    ]
    if backend.info.kind == "emulated":
        lines.append(("", "EMULATED: forwards are modelled; only the link over MPI is measured"))
    _print(lines)


def print_table(
    tables: Mapping[str, Sequence[Entry]],
    notes: Sequence[str],
    host: Sequence[Entry],
    places: Sequence[Mapping[str, Any]],
) -> None:
    """Prints all measurements; `places`: of the ranks, from Topology.place."""
    _print(_lines(tables))
    _print(("" if n else "not known", note) for n, note in enumerate(notes))
    _print(_hosts(host))
    for place in places:
        where = f"{place['host']}  {place['device']}"
        where += f"  {place['bus_id']}" if place["bus_id"] else f"  {place['cores']} cores"
        _print([(f"rank {place['rank']}", f"{place['role']:6} {where}")])


def _lines(tables: Mapping[str, Sequence[Entry]]) -> Lines:
    for entry in tables["bandwidths"]:
        rate = entry["read_bytes_per_s"]
        text = "unknown" if rate is None else f"{rate / 1e9:.1f} GB/s"
        yield f"rank {entry['rank']}", f"read {text}   over {entry['bytes'] / 1e6:.1f} MB"
    for entry in tables["forwards"]:
        seconds = entry["seconds"]
        rows = [str(n) for n in _SHOWN_ROWS if str(n) in seconds]
        limit = "" if entry["most_rows"] is None else f", jobs of at most {entry['most_rows']} rows"
        if batch := entry["sequences"]:
            limit = f", context={entry['kv_tokens'] // batch} b={batch}"
        yield "forward", f"{entry['model']} T={entry['tp']} by {entry['kernel']}{limit}"
        yield "M", "".join(f"{n:>9}" for n in rows)
        yield "µs", _times(entry, rows)
        if one := seconds[rows[0]]:
            yield "r(M)", "".join(f"{seconds[n] / one:>9.3f}" for n in rows)
    names = {
        "read_outs": "of {columns} logits, {candidates} a row",
        "all_reduces": "{name}, {ranks} ranks, graph {graph}",
        "links": "{name} after {idle_s:g} s",
    }
    for table, name in names.items():
        heads: list[str] = []
        for entry in tables[table]:
            if heads != (heads := list(entry["seconds"])):
                points = heads if table == "read_outs" else [_size(int(n)) for n in heads]
                yield table[:-1].replace("_", "-"), f"{'':30}" + "".join(f"{p:>9}" for p in points)
            yield "", f"{name.format(**entry):30}{_times(entry, heads)}"
    for entry in tables["launches"]:
        times = f"host {_us(entry['host_s'])} µs, device {_us(entry['device_s'])} µs"
        yield "launch", f"{entry['what']}: {times}"


def _hosts(entries: Sequence[Entry]) -> Lines:
    """Yields the lead's part of a round, one way of the link, and the target's full forward."""
    for number, entry in enumerate(entries):
        costs = HostCosts.from_dict(entry["seconds"])
        rows, seconds = max(entry["job_forwards"]["verify"].items(), key=lambda each: int(each[0]))
        way = f"{entry['mode']} T={entry['tp']} D={entry['num_drafts']} b={entry['batch_size']}"
        costs_text = f"lead {_us(costs.lead_s + costs.ask_s)} µs, link {_us(costs.link)} µs"
        yield "" if number else "host", f"{way}: {costs_text}; M={rows} {_us(seconds)} µs"


def _print(lines: Iterable[tuple[str, str]]) -> None:
    text = "\n".join(f"{name:>10}  {text_of}" for name, text_of in lines)
    if text:
        print(text, flush=True)


def _times(entry: Entry, points: Iterable[str]) -> str:
    marks = {n: "~" if (entry["spread"][n] or 0) > _UNSTEADY else "" for n in points}
    return "".join(f"{mark + _us(entry['seconds'][n]):>9}" for n, mark in marks.items())


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1e4 else f"{us:.0f}"


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"
