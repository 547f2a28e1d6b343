"""Takes a device profile's all-reduces from measurements of nccl-tests.

It reads nccl-tests' JSON (`-J FILE.json`), its printed table of 13 columns, and CSV with a header
(size, time and optionally type, redop, gpus, as rccl-tests writes it). Its times are microseconds
of one operation. It writes a profile like `probe`'s, in which all-reduces over that many ranks are
nccl-tests'; the emulated backend, `predict` and `plan` then use them.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mpissd.common.errors import ConfigError

_LARGE_BYTES = 1 << 20  # The second point of the fitted line, as in `probe`.
_TOO_MUCH = (OverflowError, RecursionError, csv.Error)


@dataclass(frozen=True)
class AllReduces:
    """All-reduce seconds by bytes from one file; ranks and graph are None if the file lacks
    them."""

    seconds: Mapping[int, float]
    ranks: int | None
    graph: bool | None


def read(path: Path) -> AllReduces:
    """Reads the in-place all-reduce times of a file if it has any, else the out-of-place times.

    Repeated sizes count by their median. Raises ConfigError naming the file if it is unreadable, of
    another collective, has wrong results (its #wrong) or no sizes.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    try:
        curves = _parse(text)
    except (LookupError, TypeError, ValueError, AttributeError, *_TOO_MUCH) as error:
        raise ConfigError(f"{str(path)!r}: no result of nccl-tests: {error}") from error
    if not curves.seconds:
        raise ConfigError(f"{str(path)!r}: no result of nccl-tests: no line with a size and a time")
    return curves


def _parse(text: str) -> AllReduces:
    start = text.lstrip()[:1]
    if start == "{" and '"results"' in text:
        return _of_json(json.loads(text))
    if start in ("{", "["):
        return _of_records(_json_records(text))
    if re.search(r"^#", text, re.MULTILINE):
        return _of_table(text)
    return _of_records(csv.DictReader(text.splitlines()))


def _of_json(data: Mapping[str, Any]) -> AllReduces:
    """Reads version 3 of -J: results of {size, redop, out_of_place, in_place: {time, nwrong}}."""
    times = []
    for entry in data["results"]:
        body = entry.get("in_place") or entry.get("out_of_place") or {}
        if "time" in body:
            name = str(entry.get("experiment_name", ""))
            _check(name, str(entry.get("redop", "sum")), body.get("nwrong"))
            times.append((entry["size"], body["time"]))
    config = data.get("config", {})
    devices = data.get("devices") or []
    each = config.get("ngpus", 1) * config.get("nthreads", 1)
    ranks = None if not devices else len(devices) * each
    graph = config.get("graph")
    return AllReduces(_seconds(times), ranks, None if graph is None else graph > 0)


def _of_table(text: str) -> AllReduces:
    """Reads the printed table: size, count, type, redop, root, then time, algbw, busbw and #wrong
    twice."""
    named = re.search(r"Collective test starting: (\S+)", text)
    times = []
    for line in text.splitlines():
        cells = line.split()
        if len(cells) >= 8 and cells[0].isdecimal() and cells[1].isdecimal():
            has_root = re.fullmatch(r"-?\d+", cells[4]) is not None
            bodies = cells[4 + has_root :]
            wrong = bodies[7] if len(bodies) > 7 else bodies[3]
            _check(named.group(1) if named else "", cells[3], wrong)
            times.append((cells[0], bodies[4] if len(bodies) > 7 else bodies[0]))
    ranks = len(set(re.findall(r"^#\s+Rank\s+(\d+)", text, re.MULTILINE)))
    graph = re.search(r"\bgraph: (\d+)", text)
    return AllReduces(_seconds(times), ranks or None, None if graph is None else graph[1] != "0")


def _of_records(records: Iterable[Mapping[str, Any]]) -> AllReduces:
    """Reads rows of {size, time[, gpus, name, redop, #wrong]}, names in any case."""
    times, ranks = [], set()
    for record in records:
        row = {str(key).strip().lower(): value for key, value in record.items()}
        wrong = row.get("#wrong", row.get("wrong"))
        _check(str(row.get("name", "")), str(row.get("redop", "sum")).strip(), wrong)
        size = row["size"] if "size" in row else row["bytes"]
        times.append((size, row["time"] if "time" in row else row["time_us"]))
        if row.get("gpus"):
            ranks.add(int(row["gpus"]))
    if len(ranks) > 1:
        raise ValueError(f"runs of {sorted(ranks)} GPUs in one file")
    return AllReduces(_seconds(times), next(iter(ranks), None), None)


def _json_records(text: str) -> list[Mapping[str, Any]]:
    if text.lstrip().startswith("["):
        return list(json.loads(text))
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _check(name: str, redop: str, wrong: Any) -> None:
    plain = re.sub(r"[^a-z]", "", name.lower())
    if plain and "allreduce" not in plain:
        raise ValueError(f"measured {name!r}, not an all-reduce")
    if redop != "sum":
        raise ValueError(f"reduces by {redop!r}, not by sum")
    if wrong not in (None, "", "N/A") and float(wrong) > 0:
        raise ValueError(f"{wrong} wrong elements")


def _seconds(times: Iterable[tuple[Any, Any]]) -> dict[int, float]:
    by_size: dict[int, list[float]] = {}
    for size, us in times:
        by_size.setdefault(int(size), []).append(float(us) * 1e-6)
    if bad := [s for values in by_size.values() for s in values if not 0 < s < 3600]:
        raise ValueError(f"a time of {bad[0]} s")
    return {size: median(by_size[size]) for size in sorted(by_size) if size > 0}


def with_all_reduces(
    profile: Mapping[str, Any], measured: AllReduces, ranks: int, source: str
) -> dict[str, Any]:
    """Returns a profile's JSON in which all-reduces over `ranks` ranks are those of nccl-tests.

    The straight line goes through the smallest size and the largest up to 1 MB, as `probe` fits it;
    all sizes go into an entry "nccl-tests" of the table all_reduces. Entries for other numbers of
    ranks stay. Raises ConfigError with fewer than two sizes up to 1 MB.
    """
    points = [size for size in measured.seconds if size <= _LARGE_BYTES]
    if len(points) < 2:
        raise ConfigError(f"{source}: {len(points)} sizes up to 1 MB: allowed: two or more")
    small, large = points[0], points[-1]
    low, high = measured.seconds[small], measured.seconds[large]
    rate = (large - small) / max(high - low, 1e-12)
    origin = f"measured: nccl-tests, {source}, {small} B and {large} B"
    before = profile.get("all_reduce") or {}
    table = [
        entry
        for entry in (profile.get("tables") or {}).get("all_reduces", ())
        if (entry["name"], entry["ranks"]) != ("nccl-tests", ranks)
    ]
    table.append(
        {
            "name": "nccl-tests",
            "ranks": ranks,
            "graph": bool(measured.graph),
            "from": f"measured: nccl-tests, {source}",
            "seconds": {str(size): s for size, s in measured.seconds.items()},
        }
    )
    return {
        **profile,
        "all_reduce": {
            "from": origin,
            "latency_s": {
                **(before.get("latency_s") or {}),
                str(ranks): max(0.0, low - small / rate),
            },
            "bytes_per_s": {**(before.get("bytes_per_s") or {}), str(ranks): rate},
        },
        "tables": {**(profile.get("tables") or {}), "all_reduces": table},
    }
