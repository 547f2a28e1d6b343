"""Prints a probe's results: a card, one table for each kind of measurement, and the host costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from mpissd.engine.session.session import Session
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.probe.sample import Entry

_SHOWN_ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
_UNSTEADY = 0.1  # An interquartile range above this share of the median is marked.


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


def print_tables(tables: Mapping[str, Sequence[Entry]], notes: Sequence[str]) -> None:
    """Prints all measurements in µs; shares are of the read rate, and ~ marks an unsteady
    median."""
    for lines in (
        _bandwidths(tables["bandwidths"]),
        _products(tables["products"]),
        _forwards(tables["forwards"]),
        _lists(tables["read_outs"]),
        _sized("all-reduce", tables["all_reduces"], _all_reduce_name),
        _sized("round trip", tables["links"], _link_name),
        _sized("copy", tables["copies"], lambda e: f"{e['direction']} + wait"),
        _launches(tables["launches"]),
        ((("" if n else "not known"), note) for n, note in enumerate(notes)),
    ):
        _print(lines)


def print_host(entries: Sequence[Entry]) -> None:
    """Prints the lead's part of a round, one way of the link, and the calibrated target forward."""
    lines = []
    for number, entry in enumerate(entries):
        costs = HostCosts.from_dict(entry["seconds"])
        rows, seconds = max(entry["job_forwards"]["verify"].items(), key=lambda each: int(each[0]))
        way = f"{entry['mode']} T={entry['tp']} D={entry['num_drafts']} b={entry['batch_size']}"
        costs_text = f"lead {_us(costs.lead_s + costs.ask_s)} µs, link {_us(costs.link)} µs"
        lines.append(("" if number else "host", f"{way}: {costs_text}; M={rows} {_us(seconds)} µs"))
    _print(lines)


def print_seats(seats: Sequence[Mapping[str, Any]]) -> None:
    """Prints each rank's host and device."""
    for seat in seats:
        where = f"{seat['host']}  {seat['device']}"
        where += f"  {seat['bus_id']}" if seat["bus_id"] else f"  {seat['cores']} cores"
        _print([(f"rank {seat['rank']}", f"{seat['role']:6} {where}")])


def _bandwidths(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        size = f"{entry['bytes'] / 1e6:.1f} MB"
        rates = f"read {_rate(entry['read_bytes_per_s'])}   copy {_rate(entry['copy_bytes_per_s'])}"
        yield f"rank {entry['rank']}", f"{rates}   over {size}"


def _products(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    if entries:
        heads = "".join(f"{f'M={rows}':>9}" for rows in entries[0]["seconds"])
        yield "product", f"{'K x N':>13}  read share{heads}"
    for entry in entries:
        share = next(iter(entry["read_share"].values()))
        share_text = f"{share:9.0%}" if share is not None else f"{'?':>9}"
        yield "", f"{entry['k']:>6}x{entry['n']:<6}  {share_text} {_times(entry, entry['seconds'])}"


def _forwards(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    for entry in entries:
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


def _lists(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    for number, entry in enumerate(entries):
        if not number:
            what = f"of {entry['columns']} logits, {entry['forward']}"
            yield "read-out", f"{what:24}" + "".join(f"{n:>9}" for n in entry["seconds"])
        name = f"{entry['candidates']} a row"
        yield "", f"{name:24}{_times(entry, entry['seconds'])}"


def _sized(
    what: str, entries: Sequence[Entry], name: Callable[[Entry], str]
) -> Iterator[tuple[str, str]]:
    for number, entry in enumerate(entries):
        if number == 0 or list(entry["seconds"]) != list(entries[number - 1]["seconds"]):
            yield what, f"{'':24}" + "".join(f"{_size(int(b)):>9}" for b in entry["seconds"])
        yield "", f"{name(entry):24}{_times(entry, entry['seconds'])}"


def _all_reduce_name(entry: Entry) -> str:
    return f"{entry['name']}, {entry['ranks']} ranks, {'graph' if entry['graph'] else 'eager'}"


def _link_name(entry: Entry) -> str:
    idle = f" after {entry['idle_s'] * 1e3:.0f} ms" if entry["idle_s"] else ""
    return f"{entry['name']}{idle}"


def _launches(entries: Sequence[Entry]) -> Iterator[tuple[str, str]]:
    for entry in entries:
        times = f"host {_us(entry['host_s'])} µs, device {_us(entry['device_s'])} µs"
        yield "launch", f"{entry['what']}: {times}"


def _print(lines: Any) -> None:
    text = "\n".join(f"{name:>10}  {text_of}" for name, text_of in lines)
    if text:
        print(text, flush=True)


def _times(entry: Entry, points: Iterable[str]) -> str:
    marks = {n: "~" if (entry["spread"][n] or 0) > _UNSTEADY else "" for n in points}
    return "".join(f"{mark + _us(entry['seconds'][n]):>9}" for n, mark in marks.items())


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1e4 else f"{us:.0f}"


def _rate(value: float | None) -> str:
    return "unknown" if value is None else f"{value / 1e9:.1f} GB/s"


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MB"), (1 << 10, "KB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:g} {name}"
    return f"{num_bytes} B"
