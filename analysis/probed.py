"""Reads probed measurements from several profiles of one machine; the newest one counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from analysis.load import Data
from analysis.select import Case

Profile = dict[str, Any]


class Key(NamedTuple):
    """Identifies a forward: a model on one of T ranks, and how it is issued."""

    model: str
    tp: int
    fuse: bool
    lm_head: bool
    kv_tokens: int


@dataclass(frozen=True)
class Forward:
    """A probed forward: a rank's weights, seconds by rows, and their relative interquartile range.

    kernels: (the most rows of a job that runs the kernel, its seconds by rows), fewest rows first.
    """

    params: int
    seconds: dict[int, float]
    spread: dict[int, float]
    kernels: list[tuple[float, dict[int, float]]]

    def at(self, rows: int) -> float:
        """Returns the seconds of so many rows, interpolated within one kernel, constant beyond its
        last."""
        points = next(of for most, of in self.kernels if rows <= most)
        return float(np.interp(rows, *zip(*sorted(points.items()), strict=True)))


def forwards(profiles: Iterable[Profile]) -> dict[Key, Forward]:
    """Returns every probed forward; each row count uses the kernel of a job of so many rows.

    All kernels of a forward are from one probe: an entry with `most_rows` counts up to that number.
    """
    merged: dict[Key, Forward] = {}
    for profile in newest(profiles):
        here: dict[Key, Forward] = {}
        entries = profile["tables"].get("forwards", ())
        for entry in sorted(entries, key=lambda e: -(e.get("most_rows") or math.inf)):
            _add(here, entry)
        merged = {**here, **merged}
    return merged


def forward(data: Data, case: Case, model: str, tp: int) -> Forward | None:
    """Returns a model's forward, issued as in the case; None if it was not probed."""
    first = case.rows.iloc[0]
    issued = bool(first["fuse"]), bool(first["lm_head"]), int(first["context"])
    return forwards(data.profiles).get(Key(model, tp, *issued))


def tables(profiles: Iterable[Profile], name: str, *identity: str) -> Iterator[dict[str, Any]]:
    """Yields the entries of a table; of entries with equal identities only the newest."""
    seen = set()
    for profile in newest(profiles):
        for entry in profile["tables"].get(name, ()):
            if (key := tuple(entry[i] for i in identity)) not in seen:
                seen.add(key)
                yield entry


def newest(profiles: Iterable[Profile]) -> list[Profile]:
    """Returns the profiles by the time of their probe, newest first; those without a time come
    last."""
    return sorted(profiles, key=_started, reverse=True)


def _started(profile: Profile) -> str:
    return str((profile.get("provenance") or {}).get("started_at") or "")


def _add(known: dict[Key, Forward], entry: dict[str, Any]) -> None:
    key = Key(*(entry.get(name) for name in Key._fields))
    one = known.setdefault(key, Forward(int(entry["params"]), {}, {}, []))
    most = entry.get("most_rows") or math.inf
    points = {int(rows): float(s) for rows, s in entry["seconds"].items() if int(rows) <= most}
    one.kernels.insert(0, (most, points))
    one.seconds.update(points)
    one.spread.update({m: float((entry.get("spread") or {}).get(str(m), 0.0)) for m in points})
