"""Makes a device profile from the probe's measurements: rates fitted to its tables, saved
atomically.

read_bytes_per_s    the lead's read-only bandwidth at its own weights' bytes
peak_flops_per_s    of a large square product
launch_s            the device time of an empty program
product_overhead_s  (forward of 1 row − floor − all-reduces − launch) / products, of the target
all_reduce          a straight line through the smallest and the 1 MB all-reduce of the job's
                    own implementation; null with one target rank: unknown, not 0
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.backend.profile import SCHEMA, load_profile
from mpissd.engine.job import Job
from mpissd.lab.probe.sample import Entry

TABLES = (
    *("bandwidths", "forwards", "shards", "read_outs"),
    *("all_reduces", "links", "launches"),
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,119}")
_LONGEST_PART = 40
Tables = Mapping[str, Sequence[Entry]]


def profile_name(job: Job, info: DeviceInfo) -> str:
    """Returns DEVICE-TARGET-DRAFT-T#D#[-fuse][-head][-ctx#x#], which distinguishes profiles."""
    config = job.config
    parts = [info.name, job.target.name, *([job.draft.name] if job.draft else [])]
    parts.append(f"T{job.tp}D{config.drafts}")
    parts += ["transformer"] * config.is_transformer
    parts += ["fuse"] * config.fuse + ["head"] * config.lm_head
    if config.context:
        parts.append(f"ctx{config.context}x{config.batch_size}")
    return "-".join(_slug(part) for part in parts)


def check_name(name: str) -> None:
    """Raises ConfigError if a profile's name is not a plain file name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"name={name!r}: allowed: letters, digits and ._@+- (at most 120), a letter or digit "
            "first"
        )


def fit(
    job: Job,
    itemsize: int,
    tables: Tables,
    peak: float | None,
    memory: Sequence[int | None],
    source: str,
) -> dict[str, Any]:
    """Fits the "numbers" and the "all_reduce" of a profile to its tables.

    peak: flop/s of a large product.
    """
    read = tables["bandwidths"][0]["read_bytes_per_s"]
    empty = next(e["device_s"] for e in tables["launches"] if e["what"] == "empty")
    reduce = _all_reduce(tables["all_reduces"], job.tp, source)
    overhead = _overhead(job, itemsize, tables["forwards"][0], read, peak, empty, reduce)
    known = [size for size in memory if size is not None]
    return {
        "numbers": {
            "read_bytes_per_s": {"value": read, "from": f"{source}: read-only stream"},
            "peak_flops_per_s": {"value": peak, "from": f"{source}: a large product"},
            "product_overhead_s": {
                "value": overhead,
                "from": f"{source}: (forward of 1 row - floor - all-reduces - launch) / products, "
                f"{job.target.name} T={job.tp}",
            },
            "launch_s": {"value": empty, "from": f"{source}: device time of an empty program"},
            "memory_bytes": {
                "value": min(known) if len(known) == len(memory) else None,
                "from": f"{source}: free at start-up, the smallest rank's",
            },
        },
        "all_reduce": reduce,
    }


def _overhead(
    job: Job,
    itemsize: int,
    forward: Entry,
    read: float | None,
    flops: float | None,
    empty: float,
    reduce: Mapping[str, Any],
) -> float:
    """Returns the overhead of a product beyond memory traffic, fitted to the measured target
    forward."""
    rows = min(int(n) for n in forward["seconds"])
    options = replace(job.options, context=forward["kv_tokens"] // job.config.batch_size)
    cost = job.target_shard.cost(rows, job.config.batch_size, itemsize, options)
    floor = 0.0
    if read and flops:
        floor = max((cost.weight_bytes + cost.kv_bytes) / read, cost.flops / flops)
    lost = float(forward["seconds"][str(rows)]) - floor - empty
    if reduce["latency_s"]:
        latency, rate = (float(reduce[n][str(job.tp)]) for n in ("latency_s", "bytes_per_s"))
        lost -= cost.num_all_reduces * (latency + cost.all_reduce_bytes / rate)
    return max(0.0, lost / cost.num_products)


def _all_reduce(entries: Sequence[Entry], ranks: int, source: str) -> dict[str, Any]:
    if not entries:
        said = f"{source}: not known, there was one target rank"
        return {"from": said, "latency_s": None, "bytes_per_s": None}
    own = entries[0]
    seconds_at = {int(size): seconds for size, seconds in own["seconds"].items()}
    least, most = min(seconds_at), max(seconds_at)
    how = "in a graph" if own["graph"] else "eagerly"
    said = f"{source}: {own['name']} {how}, {least} B and {most} B"
    if not seconds_at[most]:
        return {"from": said, "latency_s": {}, "bytes_per_s": {}}
    # Noise may make a small all-reduce slower than a large one; then the large one sets the rate.
    slope = (seconds_at[most] - seconds_at[least]) / (most - least)
    rate = 1 / slope if slope > 0 else most / seconds_at[most]
    latency = max(0.0, seconds_at[least] - least / rate)
    return {"from": said, "latency_s": {str(ranks): latency}, "bytes_per_s": {str(ranks): rate}}


def save_profile(out: str, name: str, data: Mapping[str, Any]) -> Path:
    """Writes OUT/profiles/NAME.json atomically, replacing an older one of that name.

    Raises ConfigError if the folder cannot be written, or the profile could not be read back.
    """
    path = Path(out) / "profiles" / f"{name}.json"
    half = path.with_name(f".{name}.{os.getpid()}.part")
    try:
        half.write_text(json.dumps({"schema": SCHEMA, "kind": "device", **data}, indent=1) + "\n")
        load_profile(str(half))
        os.replace(half, path)
    except OSError as error:
        raise ConfigError(f"out={out!r}: {str(path)!r} cannot be written: {error}") from error
    finally:
        half.unlink(missing_ok=True)
    return path


def _slug(part: str) -> str:
    plain = re.sub(r"[^A-Za-z0-9._@+]+", "-", part.removesuffix(" (emulated)")).strip("-.")
    if len(plain) <= _LONGEST_PART:
        return plain
    return f"{plain[:31]}-{hashlib.sha256(part.encode()).hexdigest()[:8]}"
