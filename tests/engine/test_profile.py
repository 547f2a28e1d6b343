"""Device profiles: forwards by rates and by measured tables, and profiles that are refused.
Backends: their names, their clocks, and which one ranks of a host take on too few GPUs."""

import copy
import importlib.util
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Binding, Cost
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import EmulatedBackend, Profile, known_profiles, load_profile
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.session import session as module

SHARD, OPTIONS = Shard(resolve_model("8b"), 2), ForwardOptions(fuse=True)
SECONDS = {"1": 1e-3, "8": 1.1e-3, "64": 1.5e-3}


def forward(shard: Shard = SHARD, options: ForwardOptions = OPTIONS, **changes: Any) -> Any:
    identity = vars(shard.key(1, options)) | {"params": shard.num_params(options)}
    return {**identity, "from": "measured: here", "seconds": SECONDS, **changes}


NUMBERS = {"read_bytes_per_s": 1e12, "peak_flops_per_s": 1e14, "product_overhead_s": 5e-6}
NUMBERS |= {"launch_s": 1e-6, "memory_bytes": None}  # type: ignore[dict-item]
GOOD: dict[str, Any] = {
    "schema": 1,
    "kind": "device",
    "name": "box",
    "device_name": "A box",
    "numbers": {name: {"value": value, "from": "measured"} for name, value in NUMBERS.items()},
    "all_reduce": {"from": "not known", "latency_s": None, "bytes_per_s": None},
    "tables": {
        "bandwidths": [{"rank": 0, "bytes": 8, "from": "m", "read_bytes_per_s": 1e12}],
        "forwards": [forward()],
        "read_outs": [
            {"columns": 500, "forward": "gemm", "candidates": k, "from": "m", "seconds": seconds}
            for k, seconds in (
                (1, {"1": 4e-6, "5": 8e-6}),
                (4, {"1": 7e-6, "5": 1.1e-5}),
                (8, {"1": 9e-6, "5": 2.1e-5}),
            )
        ],
    },
}


DELETED = object()


@pytest.fixture
def box(tmp_path: Path) -> Any:
    """Loads GOOD with values replaced: box({"tables/forwards/0/params": 3})."""

    def load(changes: dict[str, Any] | None = None) -> Profile:
        data = copy.deepcopy(GOOD)
        for path, value in (changes or {}).items():
            at, keys = data, [int(k) if k.isdigit() else k for k in path.split("/")]
            for key in keys[:-1]:
                at = at[key]  # type: ignore[index]
            if value is DELETED:
                del at[keys[-1]]  # type: ignore[arg-type]
            else:
                at[keys[-1]] = value  # type: ignore[index]
        file = tmp_path / "box.json"
        file.write_text(json.dumps(data))
        return load_profile(str(file))

    return load


def test_the_profiles_that_come_along() -> None:
    assert set(known_profiles()) == {"h100", "h200", "a100-80", "v100-32", "null"}
    for name in known_profiles():
        profile = load_profile(name)
        assert profile.name == name
        origins = ("measured", "datasheet", "assumed", "defined")
        assert all(source.startswith(origins) for source in profile.sources.values())


def test_a_forward_is_its_roofline_products_all_reduces_and_launch(box: Any) -> None:
    sizes = {"rows": 8, "weight_bytes": 900, "kv_bytes": 100, "flops": 16_000, "tp": 2}
    cost = Cost(**sizes, num_products=7, num_all_reduces=4, all_reduce_bytes=64)
    numbers = {"read_bytes_per_s": 10.0, "peak_flops_per_s": 100.0, "product_overhead_s": 2.0}
    changes: dict[str, Any] = {f"numbers/{n}/value": v for n, v in numbers.items()}
    changes |= {"numbers/launch_s/value": 3.0, "all_reduce/latency_s": {"2": 5.0}}
    changes["all_reduce/bytes_per_s"] = {"2": 32.0}
    assert box(changes).floor_s(cost) == 16_000 / 100  # the products bound it
    assert box(changes).forward_s(cost) == 160 + 7 * 2 + 4 * (5 + 64 / 32) + 3
    changes["numbers/read_bytes_per_s/value"] = 4.0
    assert box(changes).floor_s(cost) == 1000 / 4  # the bytes do, those of the KV cache too


def test_what_no_table_covers_is_modelled(box: Any) -> None:
    alone = Shard(SHARD.shape)
    profile = box({"tables/forwards": [forward(alone)]})
    rates = replace(profile, forwards={}, read_outs={})
    assert profile.forward_s(alone.cost(8, 1, 2, OPTIONS)) == SECONDS["8"]
    for shard, options in (
        (alone, ForwardOptions()),
        (alone, replace(OPTIONS, lm_head=True)),
        (alone, replace(OPTIONS, context=8)),
        (Shard(SHARD.shape.scaled(31)), OPTIONS),
        (Shard(resolve_model("3b")), OPTIONS),
    ):
        cost = shard.cost(8, 1, 2, options)
        assert profile.forward_s(cost) == rates.forward_s(cost) != SECONDS["8"]


@pytest.mark.parametrize(
    ("rows", "candidates", "more"),
    [(1, 1, 0), (1, 4, 3e-6), (1, 6, 4e-6), (5, 8, 13e-6), (3, 8, 9e-6), (5, 12, 23e-6)],
)
def test_more_candidates_take_more_time(box: Any, rows: int, candidates: int, more: float) -> None:
    """In straight lines over both, beyond the last with its slope, on top of the forward."""
    profile, cost = box(), SHARD.cost(rows, 1, 2, OPTIONS)
    single = profile.forward_s(cost)
    listed = replace(cost, candidates=candidates, columns=500)
    assert profile.forward_s(listed) == pytest.approx(single + more, abs=1e-12)
    assert profile.forward_s(replace(listed, columns=499)) == single  # of another head: not known
    key = replace(cost.key, sequences=1)  # a transformer's logits are wider
    unknown = profile.lists_s(replace(listed, key=key))
    assert unknown == 0 and sorted(profile.candidates(listed)) == [1, 4, 8]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("kind", "job", r"kind 'job'; allowed: a device's"),
        ("schema", 2, "schema 2, this version reads 1"),
        ("numbers", [1], "malformed"),
        ("numbers/launch_s/from", DELETED, "'from'"),
        ("numbers/launch_s/value", "soon", "malformed"),
        ("numbers/read_bytes_per_s/value", 0, "must be positive"),
        ("all_reduce", {"from": "m", "latency_s": {"2": 1}, "bytes_per_s": {}},
         r"latency_s of \[2\], bytes_per_s of \[\]"),
        ("tables/forwards", [{}], "missing 'tp'"),
        ("tables/forwards/0/seconds", {}, "0 points"),
        ("tables/forwards/0/seconds", {"0": 1}, "rising whole numbers from 1"),
        ("host", [{}], "missing 'tp'"),
    ],
)  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(box: Any, path: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        box({path: value})
    assert "box.json" in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("{", "Expecting property"), ("[]", "schema None")])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "box.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_profile(str(file))


WAITER = Waiter(60.0, spin=False)
FORWARD_S = 0.03
NUMPY = NumpyBackend()


def test_reads_that_others_disturb_do_not_lower_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy while its rate was measured gave a floor above its forwards."""
    seconds = iter(range(1, 10**6))
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1e-3 if next(seconds) % 5 == 1 else 4e-3
        return clock[0]

    monkeypatch.setattr("mpissd.engine.backend.numpy_backend.time.perf_counter", tick)
    assert NUMPY.read_bandwidth(10**6) == pytest.approx(1e6 / 1e-3)


def cost(num_products: int) -> Cost:
    return Cost(1, 0, 0, 0, num_products, 0, 0, 1)


@pytest.fixture
def backend() -> EmulatedBackend:
    """Every product takes 30 ms."""
    return EmulatedBackend(
        Profile("slow", "A slow box", 1e12, 1e12, FORWARD_S, 0.0, None, {}, {}, {})
    )


def never() -> None:
    raise AssertionError("a body ran")


def test_launches_queue_as_on_a_stream(backend: EmulatedBackend) -> None:
    one, two = backend.program(never, cost(1)), backend.program(never, cost(2))
    start = time.perf_counter()
    one.launch()
    two.launch()  # queued after the first
    one.wait(WAITER)
    assert time.perf_counter() - start >= FORWARD_S
    two.wait(WAITER)
    assert time.perf_counter() - start >= 3 * FORWARD_S
    assert (one.elapsed_s(), two.elapsed_s()) == (FORWARD_S, 2 * FORWARD_S)


def test_cupy_without_cupy_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "mpissd.engine.backend.registry.importlib.util.find_spec",
        lambda name: None if name == "cupy" else find(name),
    )
    with pytest.raises(ConfigError, match="CuPy is not installed; pip install"):
        open_backend("cupy", device="h100", local_rank=0)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown backend 'numpi': did you mean 'numpy'"):
        choose("numpi")
    with pytest.raises(ConfigError, match="unknown backend 'jax'"):
        open_backend("jax", device="h100", local_rank=0)
    with pytest.raises(ConfigError, match="unknown device"):
        open_backend("emulated", device="h1000000", local_rank=0)


SMALL = "gen:layers=2,hidden=64,ffn=96,heads=4,kv_heads=2,vocab=64"
TEXT = {"target": SMALL, "draft": SMALL, "prompt_ids": "1,2", "workload": "text"}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"auto": "cupy"}
    monkeypatch.setattr(module, "choose", lambda name: found.get(name, name))


def taken(ranks: int, rank: int = 0, hosts: str = "aaaa", gpus: str = "0000", **flags: Any) -> str:
    """The backend that a rank takes; each letter of `hosts` is a rank's host, of `gpus` its GPU, a
    space that it has none."""
    world = SimpleNamespace(rank=rank, size=ranks)
    topology: Any = SimpleNamespace(
        world=world, hosts=tuple(hosts[:ranks]), is_lead=rank == 0, first_draft=ranks - 1
    )
    config = RunConfig(forward="transformer", **{"mode": "ssd", **TEXT, **flags})
    seen = [bus_id.strip() for bus_id in gpus[:ranks]]
    bindings = [Binding(0, 1, bus_id, None, None) if bus_id else None for bus_id in seen]
    return module.backend_name(config, topology, bindings)


@pytest.mark.parametrize("rank", [0, 1])
def test_small_text_takes_cpu(rank: int, one_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert taken(2, rank) == taken(2, rank, gpus="0 ") == "numpy"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == (rank == 0)
    assert not told or "2 ranks, 1 visible GPU(s): backend numpy" in told[0]


@pytest.mark.parametrize(
    "flags",
    [
        {"backend": "cupy"},
        {"share_gpu": True},
        {"gpus": "01"},
        {"gpus": "0 ", "draft_backend": "numpy"},
        {"target": "70b", "draft": "1b"},
        {"workload": "gemm", "prompt_ids": None},
    ],
    ids=["said", "shared", "a GPU each", "a core for the draft", "large", "imposed laws"],
)
def test_everything_else_stays_on_the_gpu_and_is_refused_there(
    flags: dict[str, Any], one_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(2, **flags) == "cupy" and not capsys.readouterr().err
