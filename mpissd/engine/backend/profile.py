"""A device profile: what forwards cost on one kind of machine, each number with its source.

docs/profile.md describes the file. Its tables "forwards", "shards" and "read_outs" are used; its
other tables are for human readers. A forward that a measured table covers takes the measured time;
other forwards are modelled from the device's rates.

`EmulatedBackend` allocates nothing and computes nothing: a rank sleeps until its forward would end
by the profile, so that a machine with many GPUs can be rehearsed on two cores. Forwards of the
profile `null` take 0 s, which measures the framework itself.
"""

from __future__ import annotations

import bisect
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from importlib import resources
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.files import read_file
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, Cost, DeviceInfo, ForwardKey, Program

SCHEMA = 1
_FAMILY = re.compile(r"(?:GH|GB|[ABHLPTV])\d+[A-Z]?(?=\b|_)")  # GPU names, as H100, GH200, L40S
_FORMS = {"NVL": "NVL", "PCI": "PCIe", "SXM": "SXM", "HBM": "SXM"}
_USUAL_FORM = {"H200": "SXM"}  # the form factor if the device's name has none
_SIZES = ("A100", "V100")  # GPUs that were built with two sizes of memory


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of a whole number, given at measured points. Between points the
    function is linear, before the first it is constant, and after the last it continues with the
    slope of the last two points if that is positive. Raises ValueError if points do not rise from 1
    or more, or seconds are negative or infinite."""

    points: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str = ""

    def __post_init__(self) -> None:
        if not self.points or len(self.points) != len(self.seconds):
            raise ValueError(f"{len(self.points)} points, {len(self.seconds)} times")
        if self.points[0] < 1 or list(self.points) != sorted(set(self.points)):
            raise ValueError(f"points {self.points}: allowed: rising whole numbers from 1")
        if not all(0 <= s < math.inf for s in self.seconds):
            raise ValueError(f"seconds {self.seconds}: allowed: numbers, at least 0")

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> Curve:
        measured = {int(point): float(s) for point, s in entry["seconds"].items()}
        points = tuple(sorted(measured))
        return cls(points, tuple(measured[n] for n in points), str(entry["from"]))

    def __call__(self, at: int) -> float:
        """Returns the seconds at any whole number."""
        points = self.points
        seconds = self.seconds
        right = bisect.bisect_left(points, at)
        if right == 0 or (right < len(points) and points[right] == at):
            return seconds[right]
        if right == len(points):
            if right == 1:
                return seconds[0]
            run = points[-1] - points[-2]
            return seconds[-1] + max(0.0, seconds[-1] - seconds[-2]) / run * (at - points[-1])
        share = (at - points[right - 1]) / (points[right] - points[right - 1])
        return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])


@dataclass(frozen=True)
class Forward:
    """Measured times of a whole forward with all-reduces: seconds by number of rows, on a rank that
    holds `params` weights. kernel: the name of the kernel of its matrix products; "" in old
    profiles. most_rows: the most rows of a forward in jobs that use this kernel (None: any)."""

    params: int
    seconds: Curve
    kernel: str = ""
    most_rows: int | None = None


@dataclass(frozen=True)
class HostEntry:
    """Measured seconds of host work and link messages in one configuration; `seconds` is keyed by
    the kind of work, a field name of HostCosts (lab/predict)."""

    mode: str
    tp: int
    num_drafts: int  # the number of draft ranks; 0 in AR, and if the target's rank 0 drafts
    batch_size: int
    lookahead: int
    seconds: Mapping[str, float]
    source: str
    # branches drafted ahead for a sequence (0: unknown); seconds["keys"] is the time to choose them
    lanes: int = 0
    context: int = 0  # the context of transformer forwards, in tokens
    forward: str = "gemm"  # the kind of forward, a value of --forward

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> HostEntry:
        """Reads an entry of a profile's list "host"; raises KeyError, TypeError or ValueError."""
        names = ("tp", "num_drafts", "batch_size", "lookahead")
        counts = {name: int(entry[name]) for name in names}
        counts |= {name: int(entry.get(name, 0)) for name in ("lanes", "context")}
        # In older profiles, without the field "forward", only transformers have a context.
        forward = str(entry.get("forward") or ("transformer" if counts["context"] else "gemm"))
        seconds = {str(name): _number(s) for name, s in entry["seconds"].items()}
        source = str(entry["from"])
        return cls(str(entry["mode"]), **counts, seconds=seconds, source=source, forward=forward)


def between(measured: Mapping[ForwardKey, Forward], key: ForwardKey) -> Forward:
    """Interpolates a transformer's measured forwards at the context and the number of sequences b
    of `key`. measured: forwards of the same model at other contexts and b. Seconds are interpolated
    (Curve) over the context, then over min(rows, b), the sequences whose KV cache is read."""
    batches = sorted({other.sequences for other in measured})
    points = {n for forward in measured.values() for n in forward.seconds.points}
    rows = sorted(points | {min(key.sequences, max(points))})  # Rows beyond b read no more KV.

    def over_context(batch: int, number: int) -> float:
        curves = {k.context: f.seconds for k, f in measured.items() if k.sequences == batch}
        contexts = sorted(curves)
        seconds = tuple(curves[context](number) for context in contexts)
        return Curve(tuple(context + 1 for context in contexts), seconds)(key.context + 1)

    def over_sequences(number: int) -> float:
        seconds = {min(number, batch): over_context(batch, number) for batch in batches}
        return Curve(tuple(seconds), tuple(seconds.values()))(min(number, key.sequences))

    forward = next(iter(measured.values()))
    longest = max(other.context for other in measured)
    source = forward.seconds.source
    if key.context > longest or key.sequences > batches[-1]:
        source = f"derived: {key}, measured up to context={longest} b={batches[-1]}"
    return replace(forward, seconds=Curve(tuple(rows), tuple(map(over_sequences, rows)), source))


def forwards_of(entries: Iterable[Mapping[str, Any]]) -> dict[ForwardKey, tuple[Forward, ...]]:
    """Returns the forwards in a profile's table by key. A value has one forward for each kernel, by
    rising most_rows; of two entries with equal key and most_rows the last one counts."""
    by_key: dict[ForwardKey, dict[float, Forward]] = {}
    for entry in entries:
        tp, kv_tokens, params = (int(entry[name]) for name in ("tp", "kv_tokens", "params"))
        options = entry["fuse"], entry["lm_head"]
        sequences = int(entry.get("sequences", 0))
        key = ForwardKey(str(entry["model"]), tp, *options, kv_tokens, sequences)
        rows = entry.get("most_rows")
        forward = Forward(params, Curve.parse(entry), str(entry.get("kernel", "")), rows)
        by_key.setdefault(key, {})[rows or math.inf] = forward
    return {key: tuple(by_rows[n] for n in sorted(by_rows)) for key, by_rows in by_key.items()}


def _number(value: Any, *, is_rate: bool = False) -> float:
    """Returns seconds, or a rate above 0, as a float; raises ValueError for another value."""
    if not 0 <= float(value) < math.inf or (is_rate and not float(value)):
        allowed = "rates must be positive" if is_rate else "seconds, at least 0"
        raise ValueError(f"{value!r}: allowed: {allowed}")
    return float(value)


@dataclass(frozen=True)
class Profile:
    """What is known about one kind of device and its node's links: rates, and tables if measured.

    all_reduce_*: maps a number of ranks to a latency or rate ({}: all-reduces take no time; None:
    unknown). forwards: maps a key to its forwards, one a kernel, by rising most_rows; shards: the
    same for one rank's shard of a model, without all-reduces. read_outs: maps (logits of a row,
    kind of forward, candidates k) to the time of a top-k. hosts: the host's work in measured
    configurations. busy: maps what disturbed the machine during measurements to the share of the
    time that it took. models_others: whether forwards without a table are modelled. other_kernels:
    commits whose kernels differ from the measured ones. other_lists: commits whose draft forwards
    all returned top-k candidates, needed or not.
    """

    name: str
    device_name: str
    read_bytes_per_s: float | None
    peak_flops_per_s: float | None
    product_overhead_s: float  # the seconds that a product takes beyond its memory traffic
    launch_s: float  # the seconds to launch one forward
    memory_bytes: int | None
    all_reduce_latency_s: Mapping[int, float] | None
    all_reduce_bytes_per_s: Mapping[int, float] | None
    sources: Mapping[str, str]
    forwards: Mapping[ForwardKey, tuple[Forward, ...]] = field(default_factory=dict)
    shards: Mapping[ForwardKey, tuple[Forward, ...]] = field(default_factory=dict)
    read_outs: Mapping[tuple[int, str, int], Curve] = field(default_factory=dict)
    hosts: tuple[HostEntry, ...] = ()
    busy: Mapping[str, float] = field(default_factory=dict)
    models_others: bool = False
    other_kernels: frozenset[str] = frozenset()
    other_lists: frozenset[str] = frozenset()

    @property
    def kind(self) -> str:
        return device_kind(self.device_name)

    @property
    def few_rows(self) -> int:
        """The most rows (tokens) that a job's forwards may have to be run by a special kernel for
        few rows; 0 if the profile measured no such kernel."""
        kernels = (kernel for kernels in self.forwards.values() for kernel in kernels)
        return max((kernel.most_rows or 0 for kernel in kernels), default=0)

    def joined(self, other: Profile) -> Profile:
        """Returns this profile, to which `other` adds what only it has measured; raises ConfigError
        unless both are of the same kind of device."""
        if other.kind != self.kind:
            unlike = f"profile {other.name!r} is of {other.device_name}"
            raise ConfigError(f"{unlike}: allowed with {self.name!r}: {self.device_name}")
        reduces = other if self.all_reduce_latency_s is None else self
        return replace(
            self,
            name=f"{self.name}, {other.name}",
            all_reduce_latency_s=reduces.all_reduce_latency_s,
            all_reduce_bytes_per_s=reduces.all_reduce_bytes_per_s,
            sources={**self.sources, "all_reduce": reduces.sources["all_reduce"]},
            forwards={**other.forwards, **self.forwards},
            shards={**other.shards, **self.shards},
            read_outs={**other.read_outs, **self.read_outs},
            hosts=(*other.hosts, *self.hosts),
            busy={**other.busy, **self.busy},
        )

    def measured(self, cost: Cost) -> Curve | None:
        """Returns the measured times of this kind of forward, as seconds by number of rows, with
        the kernel that its job uses; None if it was not measured."""
        for kernel in () if cost.key is None else self.kernels(cost.key, cost.params):
            if kernel.most_rows is None or (cost.most_rows or cost.rows) <= kernel.most_rows:
                return kernel.seconds
        return None

    def lists_s(self, cost: Cost) -> float:
        """Returns by how many seconds a top-k of cost.candidates tokens takes longer than an
        argmax; 0 if unknown."""
        curves = self.candidates(cost)
        if cost.key is None or cost.candidates == 1 or not curves:
            return 0.0
        counts = sorted(curves)
        seconds = Curve(tuple(counts), tuple(curves[count](cost.rows) for count in counts))
        return max(0.0, seconds(cost.candidates) - seconds(1))

    def candidates(self, cost: Cost) -> dict[int, Curve]:
        """Returns {k: seconds by number of rows} of measured top-k operations on cost.columns
        logits a row, in this kind of forward."""
        like = cost.columns, "" if cost.key is None else cost.key.forward
        return {key[2]: curve for key, curve in self.read_outs.items() if key[:2] == like}

    def kernels(self, key: ForwardKey, params: int, *, alone: bool = False) -> tuple[Forward, ...]:
        """Returns the measured forwards of a key, one for each kernel, by rising most_rows. params:
        the number of weights, which distinguishes models of one name. alone: whether to return
        times of one rank's shard, without all-reduces. A transformer's forward is interpolated
        (between) if it was measured only at other contexts or batch sizes."""
        table = self.shards if alone else self.forwards
        if key.sequences and key not in table:
            alike = [k for k in table if k.sequences and (k.model, k.tp) == (key.model, key.tp)]
            measured = {k: kernel for k in alike for kernel in table[k] if kernel.params == params}
            return (between(measured, key),) if measured else ()
        return tuple(kernel for kernel in table.get(key, ()) if kernel.params == params)

    def forward_s(self, cost: Cost) -> float:
        """Returns the seconds of one forward, all-reduces included. A forward that was not measured
        is modelled: the roofline (floor_s) plus the overheads of products, all-reduces and the
        launch. Raises ConfigError if an all-reduce's time is needed and unknown."""
        measured = self.measured(cost)
        lists = self.lists_s(cost)
        if measured is not None:
            return measured(cost.rows) + lists
        floor = self.floor_s(cost) or 0.0
        products = cost.num_products * self.product_overhead_s
        reduces = cost.num_all_reduces * self.all_reduce_s(cost.tp, cost.all_reduce_bytes)
        return floor + products + reduces + self.launch_s + lists

    def floor_s(self, cost: Cost) -> float | None:
        """Returns the roofline max(bytes / read rate, flops / peak); None if a rate is unknown."""
        if self.read_bytes_per_s is None or self.peak_flops_per_s is None:
            return None
        moved = (cost.weight_bytes + cost.kv_bytes) / self.read_bytes_per_s
        return max(moved, cost.flops / self.peak_flops_per_s)

    def all_reduce_s(self, ranks: int, num_bytes: int) -> float:
        """Returns the seconds of one all-reduce over `ranks` ranks. A number of ranks that was not
        measured counts as the next larger one that was, or else as the largest. Raises ConfigError
        if no all-reduce was measured."""
        latencies = self.all_reduce_latency_s
        rates = self.all_reduce_bytes_per_s
        if ranks == 1:
            return 0.0
        if latencies is None or rates is None:
            raise ConfigError(
                f"profile {self.name!r} knows no all-reduce over {ranks} ranks: allowed: tp=1, or "
                f"a profile probed with T={ranks}"
            )
        if not latencies:
            return 0.0
        nearest = min((n for n in latencies if n >= ranks), default=max(latencies))
        return latencies[nearest] + num_bytes / rates[nearest]

    def require(self, key: ForwardKey, params: int) -> None:
        """Raises ConfigError, which lists the measured forwards, unless one of them has this key
        and this number of weights."""
        if self.kernels(key, params):
            return
        if key in self.forwards:
            gap = f"profile {self.name!r} doesn't cover this {key.model}"
            raise ConfigError(f"{gap}: it was probed with another number of weights")
        names = (str(key).partition(" context=")[0] for key in self.forwards)
        covered = "; ".join(dict.fromkeys(names)) or "none"
        raise ConfigError(
            f"profile {self.name!r} doesn't cover {key}: it has measured forwards of: {covered}"
        )


def device_kind(name: str | None) -> str:
    """Returns the kind of a device: its model, its form factor, and its memory if the model has two
    sizes. Drivers name one kind in several ways: "NVIDIA H100 80GB HBM3" is an H100 SXM, "Tesla
    V100-SXM2-32GB" a V100 SXM 32GB. A name of no known pattern, or of a part of a GPU (MIG), is
    returned unchanged except for the maker's name and " (emulated)"."""
    plain = (name or "").removesuffix(" (emulated)").removeprefix("NVIDIA ")
    plain = plain.removeprefix("Tesla ")
    family = _FAMILY.search(plain)
    if family is None or "MIG" in plain or "slowed" in plain:
        return plain
    model = family.group()
    parts = [family.group()]
    form = next((form for mark, form in _FORMS.items() if mark in plain.upper()), None)
    parts += filter(None, [form or _USUAL_FORM.get(model)])
    size = re.search(r"\d+ ?GB", plain)
    if model in _SIZES and size is not None:
        parts.append(size.group().replace(" ", ""))
    return " ".join(parts)


def known_profiles() -> dict[str, Path]:
    """Returns the paths of the profiles that come with mpissd, by profile name."""
    folder = Path(str(resources.files("mpissd.engine.backend") / "profiles"))
    return {path.stem: path for path in sorted(folder.glob("*.json"))}


def load_profile(text: str) -> Profile:
    """Loads a profile by name or path, or joins several of one kind of device, separated by commas.
    Raises ConfigError for an unknown name, a bad file, or different kinds of devices."""
    if "," in text:
        return reduce(Profile.joined, map(load_profile, text.split(",")))
    builtin = known_profiles()
    if text not in builtin and not (text.endswith(".json") or "/" in text):
        raise unknown("device", text, builtin)
    path = builtin.get(text, Path(text))
    try:
        data = json.loads(read_file(path))
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r}, this version reads {SCHEMA}")
        if data.get("kind", "device") != "device":
            raise ValueError(f"kind {data['kind']!r}; allowed: a device's, as probe saves it")
        return _profile(data)
    except KeyError as error:
        raise ConfigError(f"profile {str(path)!r}: missing {error}") from error
    except (OSError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"profile {str(path)!r}: malformed or unreadable: {error}") from error


def role_profiles(device: str, draft_device: str | None) -> tuple[Profile, Profile]:
    """Loads the profiles of the targets' and the drafts' devices (draft_device=None: the same).
    Raises ConfigError if a profile is unknown or cannot be read."""
    profile = load_profile(device)
    return profile, profile if draft_device is None else load_profile(draft_device)


def _profile(data: dict[str, Any]) -> Profile:
    """Returns the profile in a JSON object; raises KeyError, TypeError, ValueError or
    AttributeError for a malformed one."""
    numbers = data["numbers"]
    values = dict[str, Any]()
    tables = data.get("tables") or {}
    for name in ("product_overhead_s", "launch_s"):
        values[name] = _number(numbers[name]["value"])
    for name in ("read_bytes_per_s", "peak_flops_per_s", "memory_bytes"):
        value = numbers[name]["value"]
        values[name] = None if value is None else _number(value, is_rate=True)
    if values["memory_bytes"] is not None:
        values["memory_bytes"] = int(values["memory_bytes"])
    reduces = data.get("all_reduce") or {"from": "none", "latency_s": {}, "bytes_per_s": {}}
    latencies = reduces["latency_s"]
    rates = reduces["bytes_per_s"]
    if (latencies, rates) != (None, None):
        latencies = {int(n): _number(s) for n, s in latencies.items()}
        rates = {int(n): _number(rate, is_rate=True) for n, rate in rates.items()}
        if latencies.keys() != rates.keys():
            raise ValueError(f"all_reduce: latency_s of {[*latencies]}, bytes_per_s of {[*rates]}")
    return Profile(
        name=str(data["name"]),
        device_name=str(data["device_name"]),
        all_reduce_latency_s=latencies,
        all_reduce_bytes_per_s=rates,
        sources={n: str(numbers[n]["from"]) for n in values} | {"all_reduce": reduces["from"]},
        forwards=forwards_of(tables.get("forwards", ())),
        shards=forwards_of(tables.get("shards", ())),
        read_outs={
            (entry["columns"], entry["forward"], entry["candidates"]): Curve.parse(entry)
            for entry in tables.get("read_outs", ())
        },
        busy={text: _number(share) for text, share in (data.get("busy") or {}).items()},
        models_others="others" in data,
        other_kernels=frozenset(map(str, data.get("other_kernels") or ())),
        other_lists=frozenset(map(str, data.get("other_lists") or ())),
        hosts=tuple(HostEntry.parse(entry) for entry in data.get("host") or ()),
        **values,
    )


class ModelledProgram(Program):
    """A forward that computes nothing. It begins at its launch, or when the forward before it ends,
    and ends after its modelled duration."""

    def __init__(self, backend: EmulatedBackend, duration_s: float) -> None:
        self._backend = backend
        self._duration_s = duration_s
        self._end = 0.0

    def launch(self) -> None:
        start = max(time.perf_counter(), self._backend.busy_until)
        self._end = self._backend.busy_until = start + self._duration_s

    def done(self) -> bool:
        return time.perf_counter() >= self._end

    def wait(self, waiter: Waiter) -> None:
        waiter.sleep_until(self._end)

    def elapsed_s(self) -> float:
        return self._duration_s


class EmulatedBackend(Backend):
    """A device that computes nothing; its only state, `busy_until`, is the time at which its last
    forward ends (on the clock perf_counter)."""

    name = "emulated"
    itemsize = 2
    dtype_name = "float16"

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.few_rows = profile.few_rows
        self.busy_until = 0.0
        self.info = DeviceInfo(
            name=f"{profile.device_name} (emulated)",
            kind="emulated",
            memory_bytes=profile.memory_bytes,
        )

    def kernel(self, weight: Any) -> str:
        return "modelled"

    def program(
        self, body: Callable[[], None], cost: Cost, *, capturable: bool = True
    ) -> ModelledProgram:
        return ModelledProgram(self, self.profile.forward_s(cost))

    def read_bandwidth(self, num_bytes: int) -> float | None:
        return self.profile.read_bytes_per_s

    def peak_flops(self) -> float | None:
        return self.profile.peak_flops_per_s
