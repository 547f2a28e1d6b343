"""Which GPU each rank takes, for all ways in which launchers show GPUs; what ranks may share."""

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from uuid import UUID

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import Binding, DeviceInfo
from mpissd.engine.session.session import distinct_gpus, memory_shares, refuse_sharing
from tests.scripts import ROOT

Bind = Callable[..., list[Binding]]


def gpu(digits: str, kind: str = "GPU") -> str:
    return f"{kind}-{UUID(digits.zfill(32))}"


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bind]:
    """The bindings of ranks of one host with these GPUs and masks, or GPU@MASK of a cgroup."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "mpissd.engine.backend.cupy_device")
    held = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(ROOT / "tests/fakes")
    module = importlib.import_module(names[-1])

    def bound(gpus: str, *ranks: str | None) -> list[Binding]:
        found = []
        for rank, shown in enumerate(ranks):
            left, _, mask = (shown or "").rpartition("@")
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("FAKE_GPUS", left or gpus)
                patch.setenv("CUDA_VISIBLE_DEVICES", mask)
                if shown is None:
                    patch.delenv("CUDA_VISIBLE_DEVICES")
                found.append(module.bind(rank))
        return found

    yield bound
    for name in names:
        sys.modules.pop(name, None)
    sys.modules |= held


NO_GPU = r"backend 'cupy': no usable GPU \(cudaErrorNoDevice.*; CUDA_VISIBLE_DEVICES="
WAYS = {  # GPUs; what each rank is shown; what they take, or the refusal
    "unbound": ("a b c d", [None] * 3, "a b c"),
    "too few": ("a b", [None] * 3, r"ranks 0 \(device 0 of 2\) and 2 \(device 0 of 2\) share"),
    "numbers": ("a b c d", ["2,3"] * 2, "c d"),
    "UUIDs": ("a b c d", [f"{gpu('d')},{gpu('b')}"] * 2, "d b"),
    "a number a task": ("a b c d", ["0", "1", "3"], "a b d"),
    "a UUID a task": ("a b", [gpu("b"), gpu("a")], "b a"),
    "two a task": ("a b c d", ["0,1", "2,3"], "a d"),
    "a cgroup a task": ("a b c d", ["d@0", "b@0", "a@0"], "d b a"),
    "one number": ("a b", ["0"] * 2, rf"1 \(device 0 of 1, CUDA_\w+=0\) share {gpu('a')};"),
    "one cgroup": ("a b", ["b@0"] * 2, f"share {gpu('b')}; allowed: a GPU a rank"),
    "another order": ("a b", ["1", "0,1"], f"share {gpu('b')}"),
    "an instance a task": ("a/2 b/2", [gpu(n, "MIG") for n in ("a1", "a0", "b0")], "a1 a0 b0"),
    "instances": ("a/2", [f"{gpu('a0', 'MIG')},{gpu('a1', 'MIG')}"] * 2, "share MIG-"),
    "unbound instances": ("a/2", [None] * 2, r"ranks 0 \(device 0 of 1\) and 1"),
    "none": ("a b", ["", ""], NO_GPU),
    "no such number": ("a b", ["2"], NO_GPU),
    "UUIDs cut off": ("a. b.", ["0", "1"], ""),
    "one UUID cut off": ("a. b.", ["1"] * 2, "share GPU 0000:b.:00.0 of n1"),
}


@pytest.mark.parametrize(("gpus", "ranks", "told"), WAYS.values(), ids=WAYS)
def test_each_rank_takes_its_gpu_or_one_line_says_why_not(
    bind: Bind, gpus: str, ranks: list[str | None], told: str
) -> None:
    hosts = ["n1"] * len(ranks)
    if "share" in told or "GPU" in told or "ranks" in told:
        with pytest.raises(ConfigError, match=told):
            refuse_sharing(bind(gpus, *ranks), hosts)
        return
    bound = bind(gpus, *ranks)
    refuse_sharing(bound, hosts)
    kind = "MIG" if "/" in gpus else "GPU"
    assert [of.uuid for of in bound if of.uuid] == [gpu(word, kind) for word in told.split()]


def test_ranks_that_share_a_gpu_or_a_host_divide_its_memory(bind: Bind) -> None:
    """Hosts may have equal GPUs."""
    bound = bind("a. b.", "0", "0", "1")
    refuse_sharing([bound[0], None, bound[1]], ["n1", "n1", "n2"])
    infos = [DeviceInfo("GPU", "gpu", memory_bytes=90, binding=of) for of in bound]
    assert memory_shares(infos, ["n1"] * 3) == [45, 45, 90]
    infos[1] = replace(infos[1], kind="cpu", binding=None)
    assert memory_shares(infos, ["n1"] * 3) == [90, 30, 90]
    assert len({*distinct_gpus(infos, ["n1"] * 3)}) == 3
    infos[2] = replace(infos[2], memory_bytes=None)
    assert memory_shares(infos, ["n1", "n1", "n2"]) == [90, 45, None]
