"""The probe of one device: what it measures, and that wrong data are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import GateError
from mpissd.common.presets import resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend, DeviceInfo
from mpissd.engine.backend.emulated_backend import EmulatedBackend
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.lab.probe.device import ROWS, DeviceProbe, product_shapes
from mpissd.lab.probe.sample import Checks, Pace, Sample, entry, sample, samples
from tests.gpu.agreement import HostDevice

WAITER = Waiter(30.0, spin=False)


def probe(backend: Backend) -> tuple[DeviceProbe, Checks]:
    checks = Checks()
    return DeviceProbe(backend, WAITER, checks, "measured: here"), checks


class Small(NumpyBackend):
    """A CPU with so little cache that chains stay short."""

    def __init__(self) -> None:
        super().__init__()
        self.info = replace(self.info, cache_bytes=1 << 10)


class Forgetful(Small):
    """The last column of a product is never written."""

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        out[:, :-1] = x @ weight[:, :-1]


class Sloppy(Small):
    """A product of other weights than asked for."""

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        out[...] = x @ weight[::-1]


class Gpu(HostDevice):
    """Host memory that calls itself a GPU."""

    def __init__(self) -> None:
        super().__init__("0000:00:00.0")
        self.info = replace(self.info, kind="gpu", cache_bytes=1 << 10)


class Garbling(Gpu):
    """A copy to the device loses a byte."""

    def copy_in(self, host: Any, array: Any) -> None:
        super().copy_in(host, array)
        array.view(np.uint8)[0, 5] ^= 1


def test_products_have_a_time_and_a_share_of_the_read_rate() -> None:
    device, checks = probe(Small())
    found = device.products([(64, 96), (32, 16)], 1e10)
    assert [(e["k"], e["n"]) for e in found] == [(64, 96), (32, 16)]
    for told in found:
        assert list(told["seconds"]) == [str(rows) for rows in ROWS]
        assert all(s > 0 for s in told["seconds"].values())
        assert all(n >= 5 for n in told["num_launches"].values())
        assert told["num_weights"] >= 2 and told["beyond_cache"] and not told["graph"]
        size = told["k"] * told["n"] * 4
        share = size / 1e10 / told["seconds"]["1"]
        assert told["read_share"]["1"] == pytest.approx(share)
    assert checks.error() is None


@pytest.mark.parametrize(("kind", "said"), [(Forgetful, "not finite"), (Sloppy, "are wrong")])
def test_a_product_that_is_wrong_is_found(kind: Callable[[], Backend], said: str) -> None:
    device, checks = probe(kind())
    device.products([(64, 96)], None)
    error = checks.error()
    assert isinstance(error, GateError) and said in str(error) and "64x96" in str(error)


def test_float16_products_are_sound() -> None:
    device, checks = probe(Gpu())
    device.products([(512, 64)], None)
    assert checks.findings == []


def test_copies_are_timed_on_a_device_alone() -> None:
    device, checks = probe(Gpu())
    into, out = device.copies()
    assert (into["direction"], out["direction"]) == ("in", "out")
    assert list(out["seconds"]) == ["64", "4096", "65536", "1048576"]
    assert checks.error() is None
    assert probe(Small())[0].copies() == []


def test_a_copy_that_changes_bytes_is_found() -> None:
    device, checks = probe(Garbling())
    device.copies()
    assert "64 B copied to the device and back have changed" in str(checks.error())


def test_bandwidths_launch_and_the_largest_product() -> None:
    device, checks = probe(Small())
    found = device.bandwidths(1 << 20)
    assert found["read_bytes_per_s"] > 1e8
    empty = device.launch()
    assert empty["host_s"] > 0 and empty["device_s"] >= 0
    what, rate = device.square()
    assert what == "1024-cubed product" and rate is not None and rate > 1e8
    assert checks.error() is None


def test_an_emulated_device_gives_what_its_profile_says() -> None:
    profile = load_profile("h200")
    device, checks = probe(EmulatedBackend(profile))
    (told,) = device.products([(4096, 4096)], profile.read_bytes_per_s)
    size = 4096 * 4096 * 2
    assert profile.read_bytes_per_s is not None
    wanted = size / profile.read_bytes_per_s + profile.product_overhead_s
    assert told["seconds"]["1"] == pytest.approx(wanted, rel=0.03)  # a launch in 64 products
    assert device.launch()["device_s"] == profile.launch_s
    assert device.copies() == []
    assert device.square()[1] == pytest.approx(profile.peak_flops_per_s, rel=0.03)
    nothing, _ = probe(EmulatedBackend(load_profile("null")))
    assert nothing.square()[1] is None
    assert set(nothing.products([(8, 8)], None)[0]["read_share"].values()) == {None}
    assert checks.findings == []


@pytest.mark.parametrize("fuse", [True, False])
def test_shapes_are_those_of_both_ways_to_issue_a_layer(fuse: bool) -> None:
    shard = Shard(resolve_model("8b"), 2)
    found = product_shapes(shard, ForwardOptions(fuse=fuse))
    fused = [(4096, 3072), (2048, 4096), (4096, 14336), (7168, 4096)]
    alone = [(4096, 2048), (4096, 512), (2048, 4096), (4096, 7168), (7168, 4096)]
    first = fused if fuse else alone
    assert found[: len(first)] == first
    assert sorted(found) == sorted({*fused, *alone})
    head = product_shapes(shard, ForwardOptions(lm_head=True))
    assert set(head) - set(found) == {(4096, 64128)}


def test_launches_are_bounded_by_time() -> None:
    pace = Pace(warm_s=0.01, budget_s=0.1, at_least=5, at_most=25)
    assert pace.counts(1e-3) == (10, 25)
    assert pace.counts(1e-2) == (1, 10)
    assert pace.counts(1.0) == (0, 5)
    assert pace.counts(0.0) == (200, 25)
    kinds = {kind: Pace.of(DeviceInfo("x", kind)) for kind in ("cpu", "gpu", "emulated")}
    assert kinds["gpu"].warm_s > 0 and kinds["emulated"].at_most == 1


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
    assert sample(lambda: 0.0, pace) == Sample(0.0, None, 4, 0.0)
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
