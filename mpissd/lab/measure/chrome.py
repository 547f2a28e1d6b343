"""Writes the rounds of all ranks as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

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
from typing import Any

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Json = dict[str, Any]


@dataclass(frozen=True)
class ClockReading:
    """One comparison of a rank's clock with rank 0's.

    When the rank's clock showed at_ns, it was offset_ns ahead of rank 0's, give or take error_ns.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class Clock:
    """A rank's clock relative to rank 0's: one reading, or several with a linear drift between."""

    readings: tuple[ClockReading, ...]

    @property
    def error_ns(self) -> int:
        """Returns the largest error_ns of the readings."""
        return max(reading.error_ns for reading in self.readings)

    def on_lead(self, times_ns: Int64s) -> Int64s:
        """Returns times of this clock [n] as times of rank 0's clock."""
        first = self.readings[0]
        at = [reading.at_ns - first.at_ns for reading in self.readings]  # small: exact as floats
        ahead = [reading.offset_ns - first.offset_ns for reading in self.readings]
        drift = np.interp(times_ns - first.at_ns, at, ahead)
        return times_ns - first.offset_ns - np.rint(drift).astype(np.int64)


@dataclass(frozen=True)
class Track:
    """One thread row of the trace.

    slices: int64 [n, 4] = round, index into labels, start_ns, end_ns on the rank's own clock.
    """

    name: str
    labels: Sequence[str]
    slices: Int64s


@dataclass(frozen=True)
class RankTrace:
    """One process of the trace: a rank with its tracks."""

    rank: int
    role: str
    host: str
    device: str
    clock: Clock
    tracks: Sequence[Track]

    @property
    def name(self) -> str:
        """Returns the name that the trace shows for this rank."""
        return f"rank {self.rank} {self.role} · {self.host} · {self.device}"


@dataclass(frozen=True)
class Arrow:
    """An arrow that is drawn in every round, from one slice to another.

    start, end: (rank, index of its track, label) of a slice.
    """

    name: str
    start: tuple[int, int, int]
    end: tuple[int, int, int]


def document(
    ranks: Sequence[RankTrace], arrows: Sequence[Arrow] = (), about: Mapping[str, Any] | None = None
) -> Json:
    """Returns the trace as one JSON object, with times in µs since the earliest slice.

    about: more entries for "otherData". Raises ValueError for a slice that ends before it starts,
    or that starts before the previous one on its row has ended.
    """
    tables = {
        (rank.rank, n): _on_lead(rank, track)
        for rank in ranks
        for n, track in enumerate(rank.tracks)
    }
    origin = min((int(t[:, 2].min()) for t in tables.values() if len(t)), default=0)
    events: list[Json] = []
    for rank in ranks:
        events += _names(rank)
        for n, track in enumerate(rank.tracks):
            events += _slices(rank.rank, n, track, tables[rank.rank, n], origin)
    for arrow in arrows:
        events += _arrow(arrow, tables, origin, first_id=len(events))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {**(about or {}), "clock": _clock_notes(ranks)},
    }


def _on_lead(rank: RankTrace, track: Track) -> Int64s:
    """Returns the track's slices [n, 4] by their start, with times on rank 0's clock."""
    table: Int64s = track.slices[np.argsort(track.slices[:, 2], kind="stable")]  # a copy
    backwards = np.flatnonzero(table[:, 3] < table[:, 2])
    overlaps = np.flatnonzero(table[1:, 2] < table[:-1, 3])
    for wrong, what in ((backwards, "ends before it starts"), (overlaps, "overlaps the next one")):
        if len(wrong):
            raise ValueError(
                f"rank {rank.rank}, {track.name}: slice {table[wrong[0]].tolist()} {what}"
            )
    table[:, 2] = rank.clock.on_lead(table[:, 2])
    table[:, 3] = rank.clock.on_lead(table[:, 3])
    return table


def _names(rank: RankTrace) -> Iterator[Json]:
    def meta(what: str, tid: int, **args: Any) -> Json:
        return {"ph": "M", "name": what, "pid": rank.rank, "tid": tid, "args": args}

    yield meta("process_name", 0, name=rank.name)
    yield meta("process_sort_index", 0, sort_index=rank.rank)
    for n, track in enumerate(rank.tracks):
        yield meta("thread_name", n, name=track.name)
        yield meta("thread_sort_index", n, sort_index=n)


def _slices(rank: int, tid: int, track: Track, table: Int64s, origin: int) -> Iterator[Json]:
    for round_, label, start, end in table.tolist():
        yield {
            "ph": "X",
            "name": track.labels[label],
            "pid": rank,
            "tid": tid,
            "ts": (start - origin) / 1e3,
            "dur": (end - start) / 1e3,
            "args": {"round": round_},
        }


def _arrow(
    arrow: Arrow, tables: Mapping[tuple[int, int], Int64s], origin: int, first_id: int
) -> Iterator[Json]:
    starts, ends = (_by_round(tables, place) for place in (arrow.start, arrow.end))
    for n, round_ in enumerate(sorted(starts.keys() & ends.keys())):
        common = {"name": arrow.name, "cat": "message", "id": first_id + n}
        for phase, place, at in (("s", arrow.start, starts), ("f", arrow.end, ends)):
            ts = (at[round_] - origin) / 1e3
            event = {"ph": phase, **common, "pid": place[0], "tid": place[1], "ts": ts}
            yield event if phase == "s" else {**event, "bp": "e"}


def _by_round(
    tables: Mapping[tuple[int, int], Int64s], place: tuple[int, int, int]
) -> dict[int, int]:
    """Returns {round: start of its slice at `place`}; the last where a label occurs twice."""
    table = tables[place[0], place[1]]
    return {r: start for r, label, start, _ in table.tolist() if label == place[2]}


def _clock_notes(ranks: Sequence[RankTrace]) -> Json:
    return {
        "unit": "times are rank 0's perf_counter; offset_ns: how far a rank's clock is ahead of it",
        "method": "ping-pong, the exchange with the least round trip; error_ns: half of that",
        "ranks": [
            {
                "rank": rank.rank,
                "offset_ns": [reading.offset_ns for reading in rank.clock.readings],
                "error_ns": rank.clock.error_ns,
            }
            for rank in ranks
        ],
    }


def write(path: Path, trace: Json) -> None:
    """Writes the trace to `path`, with one event a line so that grep finds an event.

    A name that ends in .gz is gzipped. The file appears complete or not at all. Raises OSError.
    """
    lines = ",\n".join(json.dumps(event, allow_nan=False) for event in trace["traceEvents"])
    rest = {key: value for key, value in trace.items() if key != "traceEvents"}
    text = f'{{"traceEvents": [\n{lines}\n],\n{json.dumps(rest, allow_nan=False)[1:]}\n'
    half = path.with_name(f"{path.name}.part")
    data = text.encode()
    half.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    half.replace(path)
