"""The rounds of all ranks as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

Each rank is a process with two thread rows, its host phases and its device's forwards. Arrows are
the messages between lead and drafts. All times are on rank 0's clock; the metadata ("otherData")
gives the possible error of each rank's times in nanoseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Json = dict[str, Any]


@dataclass(frozen=True)
class Track:
    """One thread row of the trace.

    slices: int64 [n, 4] = round, index into labels, start_ns, end_ns on the rank's own clock, in
    the order of time.
    """

    name: str
    labels: Sequence[str]
    slices: Int64s


@dataclass(frozen=True)
class RankTrace:
    """One process of the trace: a rank with its tracks.

    Its clock is offset_ns ahead of rank 0's, give or take error_ns.
    """

    rank: int
    name: str
    tracks: Sequence[Track]
    offset_ns: int = 0
    error_ns: int = 0


class Place(NamedTuple):
    """A slice that occurs in every round."""

    rank: int
    track: int
    label: int


@dataclass(frozen=True)
class Arrow:
    """An arrow that is drawn in every round, from one slice to another."""

    name: str
    start: Place
    end: Place


def document(ranks: Sequence[RankTrace], arrows: Sequence[Arrow], about: Mapping[str, Any]) -> Json:
    """Returns the trace as one JSON object, with times in µs since the earliest slice.

    about: more entries for "otherData".
    """
    tables: dict[tuple[int, int], Int64s] = {
        (rank.rank, n): track.slices - np.array([0, 0, rank.offset_ns, rank.offset_ns])
        for rank in ranks
        for n, track in enumerate(rank.tracks)
    }
    origin = min((int(t[:, 2].min()) for t in tables.values() if len(t)), default=0)
    events: list[Json] = []
    for rank in ranks:
        events += _names(rank)
        for n, track in enumerate(rank.tracks):
            for round_, label, start, end in tables[rank.rank, n].tolist():
                times = {"ts": (start - origin) / 1e3, "dur": (end - start) / 1e3}
                place = {"pid": rank.rank, "tid": n, "args": {"round": round_}}
                events.append({"ph": "X", "name": track.labels[label], **times, **place})
    for arrow in arrows:
        events += _arrow(arrow, tables, origin, first_id=len(events))
    clocks = {
        "unit": "times are rank 0's perf_counter; offset_ns: how far a rank's clock is ahead of it",
        "method": "ping-pong, the exchange with the least round trip; error_ns: half of that",
        "ranks": [
            {"rank": rank.rank, "offset_ns": rank.offset_ns, "error_ns": rank.error_ns}
            for rank in ranks
        ],
    }
    other = {**about, "clock": clocks}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _names(rank: RankTrace) -> Iterator[Json]:
    def meta(what: str, tid: int, **args: Any) -> Json:
        return {"ph": "M", "name": what, "pid": rank.rank, "tid": tid, "args": args}

    yield meta("process_name", 0, name=rank.name)
    yield meta("process_sort_index", 0, sort_index=rank.rank)
    for n, track in enumerate(rank.tracks):
        yield meta("thread_name", n, name=track.name)
        yield meta("thread_sort_index", n, sort_index=n)


def _arrow(
    arrow: Arrow, tables: Mapping[tuple[int, int], Int64s], origin: int, first_id: int
) -> Iterator[Json]:
    starts, ends = (
        {r: at for r, label, at, _ in tables[where[:2]].tolist() if label == where.label}
        for where in (arrow.start, arrow.end)
    )
    for n, round_ in enumerate(sorted(starts.keys() & ends.keys())):
        common = {"name": arrow.name, "cat": "message", "id": first_id + n}
        for phase, where, at in (("s", arrow.start, starts), ("f", arrow.end, ends)):
            place = {"pid": where.rank, "tid": where.track, "ts": (at[round_] - origin) / 1e3}
            event = {"ph": phase, **common, **place}
            yield event if phase == "s" else {**event, "bp": "e"}


def write(path: Path, trace: Json) -> None:
    """Writes the trace to `path`, with one event a line so that grep finds an event.

    A name that ends in .gz is gzipped. The file appears complete or not at all. Raises OSError.
    """
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in trace["traceEvents"])
    rest = {key: value for key, value in trace.items() if key != "traceEvents"}
    text = f'{{"traceEvents": [\n{lines}\n],\n{json.dumps(rest, allow_nan=False)[1:]}\n'.encode()
    half = path.with_name(f"{path.name}.part")
    half.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    half.replace(path)  # an earlier trace of that name is replaced
