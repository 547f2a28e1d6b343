"""Which GPU each rank takes, for all ways in which launchers show GPUs; what ranks may share."""

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import Binding, DeviceInfo
from mpissd.engine.session.session import distinct_gpus, memory_shares, refuse_sharing
from tests.scripts import ROOT

Bind = Callable[[str, Sequence[Mapping[str, str]]], list[Binding]]


def gpu(digits: str) -> str:
    return f"GPU-11000000-0000-0000-0000-{digits:>012}"


def mig(digits: str, number: int) -> str:
    return f"MIG-11000000-0000-0000-0000-{digits + f'{number + 1:02x}':>012}"


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bind]:
    """The bindings of ranks of one host with these GPUs and environments."""
    names = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "mpissd.engine.backend.cupy_device")
    held = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    monkeypatch.syspath_prepend(ROOT / "tests/fakes")
    module = importlib.import_module(names[-1])

    def bound(gpus: str, ranks: Sequence[Mapping[str, str]]) -> list[Binding]:
        found = []
        for rank, env in enumerate(ranks):
            with pytest.MonkeyPatch.context() as patch:
                patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
                for name, value in {"FAKE_GPUS": gpus, **env}.items():
                    patch.setenv(name, value)
                found.append(module.bind(rank))
        return found

    yield bound
    for name in names:
        sys.modules.pop(name, None)
    sys.modules |= held


def masks(*each: str) -> list[dict[str, str]]:
    return [{"CUDA_VISIBLE_DEVICES": mask} for mask in each]


def cgroups(*each: str) -> list[dict[str, str]]:
    return [{"FAKE_CGROUP": left, "CUDA_VISIBLE_DEVICES": "0"} for left in each]


NO_GPU = r"backend 'cupy': no usable GPU \(cudaErrorNoDevice.*; CUDA_VISIBLE_DEVICES="
WAYS = {
    "unbound": ("a b c d", [{}] * 3, "a b c"),
    "fewer GPUs than ranks": ("a b", [{}] * 3, r"ranks 0 \(device 0 of 2\) and 2 \(device 0 of 2"),
    "one mask by number": ("a b c d", masks("2,3", "2,3"), "c d"),
    "one mask by UUID": ("a b c d", masks(*[f"{gpu('d')},{gpu('b')}"] * 2), "d b"),
    "a number a task": ("a b c d", masks("0", "1", "3"), "a b d"),
    "a UUID a task": ("a b", masks(gpu("b"), gpu("a")), "b a"),
    "two GPUs a task": ("a b c d", masks("0,1", "2,3"), "a d"),
    "a cgroup a task": ("a b c d", cgroups("3", "1", "0"), "d b a"),
    "one number for all": ("a b", masks("0", "0"),
                           rf"and 1 \(device 0 of 1, CUDA_VISIBLE_DEVICES=0\) share {gpu('a')};"),
    "one cgroup for all": ("a b", cgroups("1", "1"), rf"share {gpu('b')}; allowed: a GPU a rank"),
    "another order": ("a b", masks("1", "0,1"), f"share {gpu('b')}"),
    "an instance a task": ("a/2 b/2", masks(mig("a", 1), mig("a", 0), mig("b", 0)),
                           [mig("a", 1), mig("a", 0), mig("b", 0)]),
    "a list of instances": ("a/2", masks(*[f"{mig('a', 0)},{mig('a', 1)}"] * 2),
                            f"share {mig('a', 0)}"),
    "instances without a mask": ("a/2", [{}] * 2, r"ranks 0 \(device 0 of 1\) and 1"),
    "an empty mask": ("a b", masks("", ""), NO_GPU),
    "a mask of no GPU": ("a b", masks("2"), NO_GPU),
    "a UUID cut off": ("a. b.", masks("0", "1"), [None, None]),
    "a UUID cut off, shared": ("a. b.", masks("1", "1"), "share GPU 0000:02:00.0 of n1"),
}  # fmt: skip


@pytest.mark.parametrize(("gpus", "ranks", "told"), WAYS.values(), ids=WAYS)
def test_each_rank_takes_its_gpu_or_one_line_says_why_not(
    bind: Bind, gpus: str, ranks: Sequence[Mapping[str, str]], told: str | list[str | None]
) -> None:
    if isinstance(told, str) and len(told.split()[0]) > 1:
        with pytest.raises(ConfigError, match=told):
            refuse_sharing(bind(gpus, ranks), ["n1"] * len(ranks))
        return
    bound = bind(gpus, ranks)
    refuse_sharing(bound, ["n1"] * len(ranks))
    assert [b.uuid for b in bound] == ([*map(gpu, told.split())] if isinstance(told, str) else told)


def test_hosts_may_have_equal_gpus_and_ranks_that_share_one_divide_its_memory(bind: Bind) -> None:
    bound = bind("a. b.", masks("0", "0", "1"))
    refuse_sharing([bound[0], None, bound[1]], ["n1", "n1", "n2"])
    infos = [DeviceInfo("GPU", "gpu", memory_bytes=90, binding=of) for of in bound]
    assert memory_shares(infos, ["n1"] * 3) == [45, 45, 90]
    infos[1] = replace(infos[1], kind="cpu", binding=None)
    assert memory_shares(infos, ["n1"] * 3) == [90, 30, 90]
    assert len({*distinct_gpus(infos, ["n1"] * 3)}) == 3
