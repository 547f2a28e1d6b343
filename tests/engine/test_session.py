"""How a host's memory is shared between its ranks."""

from __future__ import annotations

from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.session import session


def cpu(size: int | None) -> DeviceInfo:
    return DeviceInfo("CPU", "cpu", memory_bytes=size)


def test_ranks_of_a_host_share_its_memory_and_no_others() -> None:
    infos = [cpu(900), cpu(900), cpu(400)]
    assert session.memory_shares(infos, ["a", "a", "b"]) == [450, 450, 400]
    assert session.memory_shares(infos[:1], ["a"]) == [900]


def test_a_gpu_is_its_rank_s_own() -> None:
    infos = [DeviceInfo("GPU", "gpu", memory_bytes=80), cpu(None), cpu(90)]
    assert session.memory_shares(infos, ["a", "a", "a"]) == [80, None, 30]


def test_the_least_counts_and_unknown_is_unknown() -> None:
    assert session._least([450, 450, 400]) == 400
    assert session._least([450, None]) is None
    assert session._least([]) is None
