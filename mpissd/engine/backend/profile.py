"""A device profile: the costs of a forward on one machine, each number with its source.

A profile is a JSON file {"schema": 1, "name", "device_name", "numbers": {key: {"value", "from"}},
"all_reduce": {"from", "latency_s": {ranks: s}, "bytes_per_s": {ranks: B/s}}, "tables": {…}}; "from"
is measured, modelled, datasheet, assumed or defined. The emulated backend takes its durations from
a profile, and `probe` makes profiles (docs/profile.md). Where a measured table covers a forward,
the table is used; otherwise the forward is modelled from the rates.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError, unknown
from mpissd.engine.backend.base import Cost, ForwardKey
from mpissd.engine.backend.profile_tables import HostEntry, Tables

SCHEMA = 1
_FAMILY = re.compile(r"(?:GH|GB|[ABHLPTV])\d+[A-Z]?(?=\b|_)")  # H100, GH200, A100, V100, L40S
_FORMS = {"NVL": "NVL", "PCI": "PCIe", "SXM": "SXM", "HBM": "SXM"}
_USUAL_FORM = {"H200": "SXM"}  # of devices whose names give a form only if it is another
_SIZES = ("A100", "V100")  # devices of one form that come with two sizes of memory
_NUMBERS = (
    "read_bytes_per_s",
    "peak_flops_per_s",
    "product_overhead_s",
    "launch_s",
    "memory_bytes",
)


@dataclass(frozen=True)
class Profile:
    """Rates of one device and of the links inside its node, and measured tables if there are any.

    all_reduce_*: by number of ranks; {} means free by definition, None means unknown (probed on one
    rank). hosts: the host's work, measured for some configurations; () if not measured.
    models_others: whether forwards without a table are modelled; if False, a profile with tables
    has no value for them.
    """

    name: str
    device_name: str
    read_bytes_per_s: float | None
    peak_flops_per_s: float | None
    product_overhead_s: float  # Seconds that a product takes beyond its memory traffic.
    launch_s: float  # Seconds to launch one forward.
    memory_bytes: int | None
    all_reduce_latency_s: Mapping[int, float] | None
    all_reduce_bytes_per_s: Mapping[int, float] | None
    sources: Mapping[str, str]
    tables: Tables = field(default_factory=Tables)
    hosts: tuple[HostEntry, ...] = ()
    models_others: bool = False
    # Commits whose kernels differ from those that this profile measured.
    other_kernels: frozenset[str] = frozenset()
    # Commits whose draft forwards all read as many candidates as a glue.
    other_lists: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        """The kind of device that the profile describes (device_kind)."""
        return device_kind(self.device_name)

    @property
    def few_rows(self) -> int:
        """The largest row count whose jobs run a kernel of their own; 0 if there is none."""
        return self.tables.few_rows

    def forward_s(self, cost: Cost) -> float:
        """Returns the duration of one forward in seconds, all-reduces included.

        If a table covers this forward, the value is measured. Otherwise it is modelled: the
        roofline (floor_s) plus the overheads of products, all-reduces and the launch. What more
        than one candidate a row takes is added (Tables.lists_s). Raises ConfigError if an
        all-reduce's time is not known.
        """
        measured, lists = self.tables.forward(cost), self.tables.lists_s(cost)
        if measured is not None:
            return measured(cost.rows) + lists
        floor = self.floor_s(cost) or 0.0
        products = cost.num_products * self.product_overhead_s
        reduces = cost.num_all_reduces * self.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        return floor + products + reduces + self.launch_s + lists

    def floor_s(self, cost: Cost) -> float | None:
        """Returns max(bytes / read bandwidth, flops / peak); None if a rate is unknown."""
        if self.read_bytes_per_s is None or self.peak_flops_per_s is None:
            return None
        moved = (cost.weight_bytes + cost.kv_bytes) / self.read_bytes_per_s
        return max(moved, cost.flops / self.peak_flops_per_s)

    def all_reduce_s(self, ranks: int, num_bytes: int) -> float:
        """Returns the seconds of one all-reduce over `ranks` ranks.

        If that number was not measured, the rates of the next larger one are used. Raises
        ConfigError if all-reduces are not known.
        """
        latencies, rates = self.all_reduce_latency_s, self.all_reduce_bytes_per_s
        if ranks == 1:
            return 0.0
        if latencies is None or rates is None:
            raise ConfigError(
                f"profile {self.name!r} knows no all-reduce over {ranks} ranks: allowed: tp=1, or "
                f"a profile probed with T={ranks}"
            )
        if not latencies:
            return 0.0
        known = sorted(latencies)
        nearest = next((n for n in known if n >= ranks), known[-1])
        return latencies[nearest] + num_bytes / rates[nearest]

    def require(self, key: ForwardKey, params: int) -> None:
        """Raises ConfigError, which lists the measured forwards, unless this one is among them.

        params: its number of weights.
        """
        if self.tables.kernels(key, params):
            return
        if key in self.tables.forwards:
            gap = f"profile {self.name!r} doesn't cover this {key.model}"
            raise ConfigError(f"{gap}: it was probed with another number of weights")
        known = (str(key).partition(" context=")[0] for key in self.tables.forwards)
        covered = "; ".join(dict.fromkeys(known)) or "none"
        raise ConfigError(
            f"profile {self.name!r} doesn't cover {key}: it has measured forwards of: {covered}"
        )


def device_kind(name: str | None) -> str:
    """Returns the kind of a device: its model, its form, and its memory if the model has two sizes.

    Drivers name one kind in several ways: "NVIDIA H100 80GB HBM3" is an H100 SXM, "Tesla
    V100-SXM2-32GB" a V100 SXM 32GB. A name of no known pattern, or of a part of a GPU (MIG), is
    returned as it is, without the maker's name and without " (emulated)".
    """
    plain = (name or "").removesuffix(" (emulated)").removeprefix("NVIDIA ")
    plain = plain.removeprefix("Tesla ")
    family = _FAMILY.search(plain)
    if family is None or "MIG" in plain or "slowed" in plain:
        return plain
    model, parts = family.group(), [family.group()]
    form = next((form for mark, form in _FORMS.items() if mark in plain.upper()), None)
    parts += filter(None, [form or _USUAL_FORM.get(model)])
    size = re.search(r"\d+ ?GB", plain)
    if model in _SIZES and size is not None:
        parts.append(size.group().replace(" ", ""))
    return " ".join(parts)


def known_profiles() -> dict[str, Path]:
    """Returns the paths of the profiles that come with mpissd, by name."""
    folder = Path(str(resources.files("mpissd.engine.backend") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def load_profile(text: str) -> Profile:
    """Loads a profile by name or by path.

    Raises ConfigError for an unknown name, an unreadable file, another schema or a missing number.
    """
    builtin = known_profiles()
    if text in builtin:
        return _read(builtin[text])
    if not (text.endswith(".json") or "/" in text):
        raise unknown("device", text, builtin)
    return _read(Path(text))


def role_profiles(device: str, draft_device: str | None) -> tuple[Profile, Profile]:
    """Loads the targets' profile and the drafts' (None: the same). Raises as load_profile does."""
    profile = load_profile(device)
    return profile, profile if draft_device is None else load_profile(draft_device)


def _read(path: Path) -> Profile:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"profile {str(path)!r}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        schema = data.get("schema") if isinstance(data, dict) else None
        raise ConfigError(f"profile {str(path)!r}: schema {schema!r}, this version reads {SCHEMA}")
    if data.get("kind", "device") != "device":
        raise ConfigError(
            f"profile {str(path)!r}: kind {data['kind']!r}; allowed: a device's, as probe saves it"
        )
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
    latencies, rates = _all_reduce(reduce)
    memory = values["memory_bytes"]
    return Profile(
        name=str(data["name"]),
        device_name=str(data["device_name"]),
        read_bytes_per_s=_rate(values["read_bytes_per_s"]),
        peak_flops_per_s=_rate(values["peak_flops_per_s"]),
        product_overhead_s=_seconds(values["product_overhead_s"]),
        launch_s=_seconds(values["launch_s"]),
        memory_bytes=None if memory is None else int(memory),
        all_reduce_latency_s=latencies,
        all_reduce_bytes_per_s=rates,
        sources=sources,
        tables=Tables.parse(data.get("tables") or {}),
        models_others="others" in data,
        other_kernels=frozenset(map(str, data.get("other_kernels") or ())),
        other_lists=frozenset(map(str, data.get("other_lists") or ())),
        hosts=tuple(HostEntry.parse(entry) for entry in data.get("host") or ()),
    )


def _all_reduce(
    entry: Mapping[str, Any],
) -> tuple[Mapping[int, float] | None, Mapping[int, float] | None]:
    if entry["latency_s"] is None and entry["bytes_per_s"] is None:
        return None, None
    latencies = {int(n): _seconds(s) for n, s in entry["latency_s"].items()}
    rates = {int(n): _positive(s) for n, s in entry["bytes_per_s"].items()}
    if latencies.keys() != rates.keys():
        raise ValueError(f"all_reduce: latency_s of {[*latencies]}, bytes_per_s of {[*rates]}")
    return latencies, rates


def _rate(value: Any) -> float | None:
    return None if value is None else _positive(value)


def _seconds(value: Any) -> float:
    if not 0 <= float(value) < math.inf:
        raise ValueError(f"{value!r}: allowed: seconds, at least 0")
    return float(value)


def _positive(value: Any) -> float:
    if not 0 < float(value) < math.inf:
        raise ValueError(f"rate {value!r}, must be positive")
    return float(value)
