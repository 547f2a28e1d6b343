"""A device profile: what a forward costs on a machine, each number with where it comes from.

A profile is a JSON file {"schema": 1, "name", "device_name", "numbers": {key: {"value", "from"}},
"all_reduce": {"from", "latency_s": {ranks: s}, "bytes_per_s": {ranks: B/s}}}; "from" is
"measured: …", "datasheet: …" or "assumed: …". The emulated backend lives on one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from mpissd.backend.base import Cost
from mpissd.errors import ConfigError, unknown

SCHEMA = 1
_NUMBERS = (
    "read_bytes_per_s",
    "peak_flops_per_s",
    "product_overhead_s",
    "launch_s",
    "memory_bytes",
)


@dataclass(frozen=True)
class Profile:
    """Rates of one device and of the links inside its node."""

    name: str
    device_name: str
    read_bytes_per_s: float | None
    peak_flops_per_s: float | None
    product_overhead_s: float  # what a product loses beyond its bytes
    launch_s: float  # of one forward
    memory_bytes: int | None
    all_reduce_latency_s: Mapping[int, float]  # by number of ranks
    all_reduce_bytes_per_s: Mapping[int, float]
    sources: Mapping[str, str]

    def forward_s(self, cost: Cost) -> float:
        """Modelled duration of one forward, all-reduces included, in seconds.

        The roofline of THEORY's floor plus what every product and all-reduce loses beyond it.
        """
        floor = self.floor_s(cost) or 0.0
        products = cost.num_products * self.product_overhead_s
        reduces = cost.num_all_reduces * self.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        return floor + products + reduces + self.launch_s

    def floor_s(self, cost: Cost) -> float | None:
        """max(bytes / read bandwidth, flops / peak); None where a rate is unknown."""
        if self.read_bytes_per_s is None or self.peak_flops_per_s is None:
            return None
        moved = (cost.weight_bytes + cost.kv_bytes) / self.read_bytes_per_s
        return max(moved, cost.flops / self.peak_flops_per_s)

    def all_reduce_s(self, ranks: int, num_bytes: int) -> float:
        """One all-reduce over `ranks` ranks (the rates of the next larger known number)."""
        if ranks == 1 or not self.all_reduce_latency_s:
            return 0.0
        known = sorted(self.all_reduce_latency_s)
        nearest = next((n for n in known if n >= ranks), known[-1])
        rate = self.all_reduce_bytes_per_s[nearest]
        return self.all_reduce_latency_s[nearest] + num_bytes / rate


def known_profiles() -> dict[str, Path]:
    """The profiles that come with mpissd, by name."""
    folder = Path(str(resources.files("mpissd.backend") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def load_profile(text: str) -> Profile:
    """A profile by name or by path.

    Raises ConfigError: unknown name, unreadable file, another schema, a missing number.
    """
    builtin = known_profiles()
    if text in builtin:
        return _read(builtin[text])
    if not (text.endswith(".json") or "/" in text):
        raise unknown("device", text, builtin)
    return _read(Path(text))


def _read(path: Path) -> Profile:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {str(path)!r}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise ConfigError(f"profile {str(path)!r}: schema {found!r}, this version reads {SCHEMA}")
    try:
        return _profile(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"profile {str(path)!r}: missing or malformed {error}") from error


def _profile(data: dict[str, Any]) -> Profile:
    numbers = {key: data["numbers"][key] for key in _NUMBERS}
    values = {key: entry["value"] for key, entry in numbers.items()}
    sources = {key: str(entry["from"]) for key, entry in numbers.items()}
    reduce = data.get("all_reduce") or {"from": "none", "latency_s": {}, "bytes_per_s": {}}
    sources["all_reduce"] = str(reduce["from"])
    latencies = {int(n): float(s) for n, s in reduce["latency_s"].items()}
    rates = {int(n): _positive(s) for n, s in reduce["bytes_per_s"].items()}
    if latencies.keys() != rates.keys():
        raise ValueError(f"all_reduce: latency_s of {[*latencies]}, bytes_per_s of {[*rates]}")
    memory = values["memory_bytes"]
    return Profile(
        name=str(data["name"]),
        device_name=str(data["device_name"]),
        read_bytes_per_s=_rate(values["read_bytes_per_s"]),
        peak_flops_per_s=_rate(values["peak_flops_per_s"]),
        product_overhead_s=float(values["product_overhead_s"]),
        launch_s=float(values["launch_s"]),
        memory_bytes=None if memory is None else int(memory),
        all_reduce_latency_s=latencies,
        all_reduce_bytes_per_s=rates,
        sources=sources,
    )


def _rate(value: Any) -> float | None:
    return None if value is None else _positive(value)


def _positive(value: Any) -> float:
    if not float(value) > 0:
        raise ValueError(f"rate {value!r}, must be positive")
    return float(value)
