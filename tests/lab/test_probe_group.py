"""Forwards and all-reduces of a probe, on one rank: data checks, and what emulated devices give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpissd.common.presets import ModelShape, resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.mpi_group import MpiGroup
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.probe.group import FORWARD_ROWS, LARGE_BYTES, GroupProbe, addend, open_groups
from mpissd.lab.probe.sample import Checks, Pace, Sample, entry, samples

WAITER = Waiter(30.0, spin=False)
TINY = ModelShape("tiny", 2, 64, 2, 2, 32, 96, True, 128)


def probe(backend: Any) -> tuple[GroupProbe, Checks]:
    checks = Checks()
    return GroupProbe(backend, MPI.COMM_SELF, WAITER, checks, "measured: here"), checks


class Doubling(SoloGroup):
    """An all-reduce that adds one rank too many."""

    def all_reduce(self, array: Any) -> None:
        array *= 2


class Lazy(SoloGroup):
    """An all-reduce that forgets the last element."""

    def all_reduce(self, array: Any) -> None:
        array[-1, -1] = 0


class Poisonous(NumpyBackend):
    """Products that end in NaN."""

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        out[...] = np.nan


class Constant(NumpyBackend):
    """Products that are all one."""

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        out[...] = 1


def test_forwards_by_rows_and_their_launch() -> None:
    group, checks = probe(NumpyBackend())
    options = ForwardOptions(fuse=True, context=8)
    told = group.forwards(SoloGroup(), Shard(TINY), options, [3, *FORWARD_ROWS], 2)
    assert list(told["seconds"]) == [str(n) for n in sorted([3, *FORWARD_ROWS])]
    identity = {"model": "tiny", "tp": 1, "fuse": True, "lm_head": False, "kv_tokens": 16}
    assert identity.items() <= told.items() and told["params"] == TINY.gemm_params
    assert all(s > 0 for s in told["seconds"].values())
    assert (told["kernel"], told["most_rows"]) == ("numpy", None)
    empty = group.empty()
    assert empty["host_s"] > 0 and empty["device_s"] >= 0
    assert checks.error() is None


@pytest.mark.parametrize(("backend", "said"), [(Poisonous, "not finite"), (Constant, "all equal")])
def test_a_forward_that_is_wrong_is_found(backend: type[NumpyBackend], said: str) -> None:
    group, checks = probe(backend())
    group.forwards(SoloGroup(), Shard(TINY), ForwardOptions(), [1], 1)
    assert said in str(checks.error())


def test_an_emulated_forward_lasts_what_its_profile_says() -> None:
    profile, shard = load_profile("h200"), Shard(resolve_model("8b"))
    group, checks = probe(EmulatedBackend(profile))
    told = group.forwards(SoloGroup(), shard, ForwardOptions(), FORWARD_ROWS, 1)
    for rows in FORWARD_ROWS:
        cost = shard.cost(rows, 1, 2, ForwardOptions(), max(FORWARD_ROWS))
        assert told["seconds"][str(rows)] == profile.forward_s(cost)
    assert checks.findings == []


def test_all_reduces_by_bytes() -> None:
    group, checks = probe(NumpyBackend())
    (told,) = group.all_reduces({"mpi": MpiGroup(MPI.COMM_SELF, WAITER)}, 64)
    assert {"name": "mpi", "ranks": 1, "graph": False}.items() <= told.items()
    sizes = [int(size) for size in told["seconds"]]
    assert sizes == sorted({rows * 64 * 4 for rows in (1, 2, 4, 8, 16, 32, 64)} | {LARGE_BYTES})
    assert checks.error() is None


@pytest.mark.parametrize("wrong", [Doubling, Lazy])
def test_a_wrong_sum_is_found(wrong: type[Group]) -> None:
    group, checks = probe(NumpyBackend())
    group.all_reduces({"wrong": wrong(1, 0)}, 64)
    assert "all-reduce solo of 256 B" in str(checks.error())


@pytest.mark.parametrize("ranks", [2, 8])
def test_addends_are_exact_in_any_order(ranks: int) -> None:
    parts = [addend(rank, 3, 64) for rank in range(ranks)]
    assert not np.array_equal(parts[0], parts[1]) and np.count_nonzero(parts[0]) > 180
    for order in (1, -1):
        total = np.zeros((3, 64), np.float16)
        for part in parts[::order]:
            total += part.astype(np.float16)
        assert np.array_equal(total, sum(parts))


def test_groups_that_can_be_opened() -> None:
    own = SoloGroup()
    null = EmulatedBackend(load_profile("null"))
    for backend, name in ((NumpyBackend(), "solo"), (null, "modelled")):
        found = open_groups(own, backend, MPI.COMM_SELF, WAITER, cuda_aware=True)
        assert found == ({name: own}, [])


def test_launches_are_bounded_by_time() -> None:
    pace = Pace(warm_s=0.01, budget_s=0.1, at_least=5, at_most=25)
    assert pace.counts(1e-3) == (10, 25)
    assert pace.counts(1.0) == (0, 5)
    assert pace.counts(0.0) == (200, 25)


def test_samples_take_turns_and_leave_the_first_launches_out() -> None:
    calls: list[int] = []

    def once(at: int) -> Callable[[], float]:
        def launch() -> float:
            calls.append(at)
            return at * (100.0 if calls.count(at) == 1 else 1.0 + 0.1 * (calls.count(at) % 2))

        return launch

    pace = Pace(warm_s=0, budget_s=0, at_least=4, at_most=9)
    found = samples({1: once(1), 2: once(2)}, pace, per=2)
    assert calls == [1, 1, 2, 2, *[1, 2] * 4]
    assert found[2].seconds == pytest.approx(2 * 1.05 / 2)
    assert found[1] == Sample(found[1].seconds, pytest.approx(0.1 / 1.05), 4, 0.5)
    told = entry({"k": 1}, "here", {8: found[1]})
    assert told["k"] == 1 and told["from"] == "here" and told["num_launches"] == {"8": 4}


def test_findings_are_told_once_with_place_and_numbers() -> None:
    checks = Checks()
    checks.close(np.zeros(3), np.zeros(3), 0.0, "zeros")
    assert checks.error() is None
    checks.close(np.array([[1.0, 2.5, np.nan]]), np.array([[1.0, 2.0, 3.0]]), 0.1, "sum")
    checks.close(np.zeros(2), np.zeros(3), 1.0, "shape")
    error = str(checks.error())
    assert "sum: 2 of 3 values are wrong, at [0, 1] 2.5, expected 2 ± 0.1 (and 1 more)" in error
    assert "shape (2,), expected (3,)" in checks.findings[1]
