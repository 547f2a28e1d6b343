"""What probes measured, of several profiles of one machine: the newest counts."""

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
    """Which forward: a model on one of T ranks, and how it is issued."""

    model: str
    tp: int
    fuse: bool
    lm_head: bool
    kv_tokens: int


@dataclass(frozen=True)
class Forward:
    """Weights of a rank; seconds by rows, and the relative interquartile range of those.

    kernels: (the most rows of a job that runs it, its seconds by rows), the fewest first.
    """

    params: int
    seconds: dict[int, float]
    spread: dict[int, float]
    kernels: list[tuple[float, dict[int, float]]]

    def at(self, rows: int) -> float:
        """Return the seconds of so many rows: straight lines between points of one kernel, flat
        beyond its last."""
        points = next(of for most, of in self.kernels if rows <= most)
        return float(np.interp(rows, *zip(*sorted(points.items()), strict=True)))


def forwards(profiles: Iterable[Profile]) -> dict[Key, Forward]:
    """Return every probed forward, at each row count by the kernel that a job of so many rows runs.

    Kernels are those of one probe: an entry with `most_rows` counts up to there, before others.
    """
    found: dict[Key, Forward] = {}
    for profile in newest(profiles):
        here: dict[Key, Forward] = {}
        entries = profile["tables"].get("forwards", ())
        for entry in sorted(entries, key=lambda e: -(e.get("most_rows") or math.inf)):
            _add(here, entry)
        found = {**here, **found}
    return found


def forward(data: Data, case: Case, model: str, tp: int) -> Forward | None:
    """Return a model's forward, issued as the case's are; None: not probed."""
    first = case.rows.iloc[0]
    issued = bool(first["fuse"]), bool(first["lm_head"]), int(first["context"])
    return forwards(data.profiles).get(Key(model, tp, *issued))


def tables(profiles: Iterable[Profile], name: str, *identity: str) -> Iterator[dict[str, Any]]:
    """Yield the entries of a table, of equal identities the newest alone."""
    seen = set()
    for profile in newest(profiles):
        for entry in profile["tables"].get(name, ()):
            if (key := tuple(entry[i] for i in identity)) not in seen:
                seen.add(key)
                yield entry


def newest(profiles: Iterable[Profile]) -> list[Profile]:
    """Return the profiles by when they were probed, those that do not say last."""
    return sorted(profiles, key=_started, reverse=True)


def _started(profile: Profile) -> str:
    return str((profile.get("provenance") or {}).get("started_at") or "")


def _add(found: dict[Key, Forward], entry: dict[str, Any]) -> None:
    key = Key(*(entry.get(name) for name in Key._fields))
    one = found.setdefault(key, Forward(int(entry["params"]), {}, {}, []))
    most = entry.get("most_rows") or math.inf
    points = {int(rows): float(s) for rows, s in entry["seconds"].items() if int(rows) <= most}
    one.kernels.insert(0, (most, points))
    one.seconds.update(points)
    one.spread.update({m: float((entry.get("spread") or {}).get(str(m), 0.0)) for m in points})
