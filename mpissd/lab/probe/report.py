"""Reports the measurements of the command `probe`: a table on stdout, and a device profile.

A device profile is a JSON file with measured durations of forwards, all-reduces and host work, and
with rates and latencies fitted to these. docs/profile.md describes it.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.output import whole_file
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.backend.profile import SCHEMA, load_profile
from mpissd.engine.job import Job
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.probe.measure import Entry

TABLES = ("bandwidths", "forwards", "shards", "read_outs", "all_reduces", "launches")
_SHOWN_ROWS = (1, 2, 4, 8, 16, 24, 32, 64)
Tables = Mapping[str, Sequence[Entry]]


def profile_name(job: Job, info: DeviceInfo) -> str:
    """Returns a profile's default name: device, target and draft, numbers of their ranks (T#D#),
    then "-transformer", "-fuse", "-head" and "-ctxCONTEXTxBATCH" where they apply."""
    config = job.config
    parts = [info.name, job.target.name, *([job.draft.name] if job.draft else [])]
    parts.append(f"T{job.tp}D{config.drafts}")
    parts += ["transformer"] * config.is_transformer
    parts += ["fuse"] * config.fuse + ["head"] * config.lm_head
    if config.context:
        parts.append(f"ctx{config.context}x{config.batch_size}")
    plain = []
    for part in parts:
        word = re.sub(r"[^A-Za-z0-9._@+]+", "-", part.removesuffix(" (emulated)")).strip("-.")
        if len(word) > 40:
            word = f"{word[:31]}-{hashlib.sha256(part.encode()).hexdigest()[:8]}"
        plain.append(word)
    return "-".join(plain)


def fit(
    job: Job,
    itemsize: int,
    tables: Tables,
    peak: float | None,
    memory: Sequence[int | None],
    source: str,
) -> dict[str, Any]:
    """Returns the members "numbers" and "all_reduce" of a profile, computed from its tables of
    measurements. itemsize: bytes of one weight. peak: flop/s of a large matrix product. memory:
    free bytes of each rank's device. source: text that says how everything was measured."""
    read = tables["bandwidths"][0]["read_bytes_per_s"]
    empty = tables["launches"][0]["device_s"]
    reduce = _all_reduce(tables["all_reduces"], job.tp, source)

    forward = tables["forwards"][0]
    rows = min(int(n) for n in forward["seconds"])
    options = replace(job.options, context=forward["kv_tokens"] // job.config.batch_size)
    cost = job.target_shard.cost(rows, job.config.batch_size, itemsize, options)
    beyond_s = float(forward["seconds"][str(rows)]) - empty
    if read and peak:
        beyond_s -= max((cost.weight_bytes + cost.kv_bytes) / read, cost.flops / peak)
    if reduce["latency_s"]:
        latency, rate = (float(reduce[n][str(job.tp)]) for n in ("latency_s", "bytes_per_s"))
        beyond_s -= cost.num_all_reduces * (latency + cost.all_reduce_bytes / rate)

    sizes = [size for size in memory if size is not None]
    of_product = f"(forward of 1 row - floor - all-reduces - launch) / products, {job.target.name}"
    numbers = {
        "read_bytes_per_s": (read, "read-only stream"),
        "peak_flops_per_s": (peak, "a large product"),
        "product_overhead_s": (max(0.0, beyond_s / cost.num_products), f"{of_product} T={job.tp}"),
        "launch_s": (empty, "device time of an empty program"),
        "memory_bytes": (
            min(sizes) if len(sizes) == len(memory) else None,
            "free at start-up, the smallest rank's",
        ),
    }
    fitted = {n: {"value": v, "from": f"{source}: {how}"} for n, (v, how) in numbers.items()}
    return {"numbers": fitted, "all_reduce": reduce}


def _all_reduce(entries: Sequence[Entry], ranks: int, source: str) -> dict[str, Any]:
    """Fits seconds = latency + bytes / rate to the all-reduces measured over `ranks` target ranks,
    which the first of `entries` has; returns the profile's member "all_reduce"."""
    if not entries:
        unknown = f"{source}: not known, there was one target rank"
        return {"from": unknown, "latency_s": None, "bytes_per_s": None}
    entry = entries[0]
    seconds_at = {int(size): seconds for size, seconds in entry["seconds"].items()}
    small = min(seconds_at)
    large = max(seconds_at)
    how = "in a graph" if entry["graph"] else "eagerly"
    origin = f"{source}: {entry['name']} {how}, {small} B and {large} B"
    if not seconds_at[large]:
        return {"from": origin, "latency_s": {}, "bytes_per_s": {}}
    # If noise made the small all-reduce slower than the large one, only the large one gives a rate.
    slope = (seconds_at[large] - seconds_at[small]) / (large - small)
    rate = 1 / slope if slope > 0 else large / seconds_at[large]
    latency = max(0.0, seconds_at[small] - small / rate)
    return {"from": origin, "latency_s": {str(ranks): latency}, "bytes_per_s": {str(ranks): rate}}


def save_profile(out: str, name: str, data: Mapping[str, Any]) -> Path:
    """Writes a device profile to OUT/profiles/NAME.json, replacing a file of that name atomically;
    returns the path. Raises ConfigError if it cannot be written, or could not be read back."""
    path = Path(out) / "profiles" / f"{name}.json"
    try:
        path.parent.mkdir(exist_ok=True)
        with whole_file(path) as file:
            text = json.dumps({"schema": SCHEMA, "kind": "device", **data}, indent=1)
            file.write(f"{text}\n".encode())
            file.flush()
            load_profile(file.name)
    except OSError as error:
        raise ConfigError(f"out={out!r}: {str(path)!r} cannot be written: {error}") from error
    return path


def print_table(
    tables: Tables, notes: Sequence[str], host: Sequence[Entry], places: Sequence[Mapping[str, Any]]
) -> None:
    """Prints all measurements to stdout. notes: texts on what could not be measured. host: entries
    with the durations of host work and messages. places: rank, host and device of each rank."""
    lines = [*_lines(tables)]
    lines += [("not known", note) for note in notes]
    for entry in host:
        costs = HostCosts.from_dict(entry["seconds"])
        way = f"{entry['mode']} T={entry['tp']} D={entry['num_drafts']} b={entry['batch_size']}"
        lead = f"lead {_us(costs.lead_s + costs.ask_s)} µs, link {_us(costs.link)} µs"
        lines.append(("host", f"{way}: {lead}"))
    for place in places:
        where = place["bus_id"] or f"{place['cores']} cores"
        at = f"{place['role']:6} {place['host']}  {place['device']}  {where}"
        lines.append((f"rank {place['rank']}", at))
    print("\n".join(f"{name:>10}  {text}" for name, text in lines), flush=True)


def _lines(tables: Tables) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each line on memory bandwidth, forwards, all-reduces and launches."""
    for entry in tables["bandwidths"]:
        rate = entry["read_bytes_per_s"]
        text = "unknown" if rate is None else f"{rate / 1e9:.1f} GB/s"
        yield f"rank {entry['rank']}", f"read {text}   over {entry['bytes'] / 1e6:.1f} MB"
    for entry in tables["forwards"]:
        seconds = entry["seconds"]
        shown = {str(rows): seconds[str(rows)] for rows in _SHOWN_ROWS if str(rows) in seconds}
        limit = "" if entry["most_rows"] is None else f", jobs of at most {entry['most_rows']} rows"
        if batch := entry["sequences"]:
            limit = f", context={entry['kv_tokens'] // batch} b={batch}"
        yield "forward", f"{entry['model']} T={entry['tp']} by {entry['kernel']}{limit}"
        yield from _times("M", entry, shown)
        if first := next(iter(shown.values())):
            yield "r(M)", "".join(f"{time / first:>9.3f}" for time in shown.values())
    for entry in tables["all_reduces"]:
        yield "all-reduce", f"{entry['name']}, {entry['ranks']} ranks, graph {entry['graph']}"
        yield from _times("bytes", entry, entry["seconds"])
    for entry in tables["launches"]:
        yield "launch", f"{entry['what']}: device {_us(entry['device_s'])} µs"


def _times(name: str, entry: Entry, shown: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yields two lines for an entry: what was timed (row counts or bytes, after `name`), and the
    times in µs. A "~" marks a time whose interquartile range exceeds a tenth of the median."""
    yield name, "".join(f"{point:>9}" for point in shown)
    marks = ["~" * ((entry["spread"][point] or 0) > 0.1) for point in shown]
    times = zip(marks, shown.values(), strict=True)
    yield "µs", "".join(f"{mark + _us(seconds):>9}" for mark, seconds in times)


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 1e4 else f"{us:.0f}"
