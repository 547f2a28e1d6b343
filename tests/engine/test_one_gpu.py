"""Ranks of one host: how they share its memory, and which backend they take on too few GPUs."""

from types import SimpleNamespace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.session import session as module

SMALL = "gen:layers=2,hidden=64,ffn=96,heads=4,kv_heads=2,vocab=64"
TEXT = {"target": SMALL, "draft": SMALL, "prompt_ids": "1,2", "workload": "text"}


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"auto": "cupy"}
    monkeypatch.setattr(module, "choose", lambda name: found.get(name, name))
    monkeypatch.setattr(module, "visible_gpus", lambda: 1)


def backend(ranks: int, rank: int = 0, hosts: str = "aaaa", **flags: Any) -> str:
    """The backend that a rank takes; each letter of `hosts` is a rank's host."""
    world = SimpleNamespace(rank=rank, size=ranks)
    topology: Any = SimpleNamespace(world=world, hosts=tuple(hosts[:ranks]), is_lead=rank == 0)
    config = RunConfig(forward="transformer", **{"mode": "ssd", **TEXT, **flags})
    return module.backend_name(config, topology)


@pytest.mark.parametrize("rank", [0, 1])
def test_text_of_a_small_model_takes_the_cpu(
    rank: int, one_gpu: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert backend(2, rank) == "numpy"
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
    assert backend(2, **flags) == "cupy" and not capsys.readouterr().err


def test_ranks_of_a_host_share_its_memory_and_a_gpu_is_its_rank_s_own() -> None:
    def cpu(size: int | None) -> DeviceInfo:
        return DeviceInfo("CPU", "cpu", memory_bytes=size)

    infos = [cpu(900), cpu(900), cpu(400)]
    assert module.memory_shares(infos, ["a", "a", "b"]) == [450, 450, 400]
    infos = [DeviceInfo("GPU", "gpu", memory_bytes=80), cpu(None), cpu(90)]
    assert module.memory_shares(infos, ["a", "a", "a"]) == [80, None, 30]
