"""What probes measured, of several profiles of one machine: the newest counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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
    """Weights of a rank; seconds by rows, and the relative interquartile range of those."""

    params: int
    seconds: dict[int, float]
    spread: dict[int, float]


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


def seconds(data: Data, case: Case, model: str, tp: int) -> dict[int, float] | None:
    """Return {rows: seconds} of a model's forward, issued as the case's are; None: not probed."""
    first = case.rows.iloc[0]
    issued = bool(first["fuse"]), bool(first["lm_head"]), int(first["context"])
    found = forwards(data.profiles).get(Key(model, tp, *issued))
    return None if found is None else found.seconds


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
    one = found.setdefault(key, Forward(int(entry["params"]), {}, {}))
    most = entry.get("most_rows") or math.inf
    for rows, seconds in entry["seconds"].items():
        if int(rows) <= most:
            one.seconds[int(rows)] = float(seconds)
            one.spread[int(rows)] = float((entry.get("spread") or {}).get(rows, 0.0))
