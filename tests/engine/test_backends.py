"""Backends: their names, their clocks, and which one ranks of a host take on too few GPUs."""

import importlib.util
import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Cost, DeviceInfo
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import EmulatedBackend, Profile
from mpissd.engine.backend.registry import choose, open_backend
from mpissd.engine.session import session as module

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
    monkeypatch.setattr(module, "visible_gpus", lambda: 1)


def taken(ranks: int, rank: int = 0, hosts: str = "aaaa", **flags: Any) -> str:
    """The backend that a rank takes; each letter of `hosts` is a rank's host."""
    world = SimpleNamespace(rank=rank, size=ranks)
    topology: Any = SimpleNamespace(world=world, hosts=tuple(hosts[:ranks]), is_lead=rank == 0)
    config = RunConfig(forward="transformer", **{"mode": "ssd", **TEXT, **flags})
    return module.backend_name(config, topology)


@pytest.mark.parametrize("rank", [0, 1])
def test_small_text_takes_cpu(rank: int, one_gpu: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert taken(2, rank) == "numpy"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == (rank == 0)
    assert not told or "2 ranks, 1 visible GPU(s): backend numpy" in told[0]


@pytest.mark.parametrize(
    "flags",
    [
        {"backend": "cupy"},
        {"target": "70b", "draft": "1b"},
        {"workload": "gemm", "prompt_ids": None},
    ],
    ids=["said", "large", "imposed laws"],
)
def test_everything_else_stays_on_the_gpu_and_is_refused_there(
    flags: dict[str, Any], one_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert taken(2, **flags) == "cupy" and not capsys.readouterr().err


def test_ranks_of_a_host_share_its_memory_and_a_gpu_is_its_rank_s_own() -> None:
    def cpu(size: int | None) -> DeviceInfo:
        return DeviceInfo("CPU", "cpu", memory_bytes=size)

    infos = [cpu(900), cpu(900), cpu(400)]
    assert module.memory_shares(infos, ["a", "a", "b"]) == [450, 450, 400]
    infos = [DeviceInfo("GPU", "gpu", memory_bytes=80), cpu(None), cpu(90)]
    assert module.memory_shares(infos, ["a", "a", "a"]) == [80, None, 30]
