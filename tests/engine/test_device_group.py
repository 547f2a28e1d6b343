"""Which all-reduce a set of ranks gets, and when device pointers are kept from MPI. No GPU."""

from __future__ import annotations

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.comm.device_group import GpuPlace, choose, claims_cuda

APART = [GpuPlace("n1", "0000:01:00.0", True), GpuPlace("n1", "0000:02:00.0", True)]
OTHER_NODE = [GpuPlace("n1", "0000:01:00.0", True), GpuPlace("n2", "0000:01:00.0", True)]
TOGETHER = [*APART, GpuPlace("n1", "0000:01:00.0", True)]
MANY = [GpuPlace("n1", f"0000:0{n}:00.0", True) for n in range(9)]
NO_NCCL = [APART[0], GpuPlace("n1", "0000:02:00.0", False)]


@pytest.mark.parametrize(
    "choice, seats, expected",
    [
        ("auto", APART, "oneshot"),
        ("auto", NO_NCCL, "oneshot"),
        ("auto", OTHER_NODE, "nccl"),
        ("auto", TOGETHER, "staged"),
        ("oneshot", APART, "oneshot"),
        ("nccl", APART, "nccl"),
        ("staged", TOGETHER, "staged"),
        ("mpi", APART, "device"),
        ("device", NO_NCCL, "device"),
    ],
)
def test_choices(choice: str, seats: list[GpuPlace], expected: str) -> None:
    assert choose(choice, seats) == expected


@pytest.mark.parametrize(
    "choice, seats, message",
    [
        ("ncl", APART, "did you mean 'nccl'"),
        ("oneshot", TOGETHER, "ranks 0 and 2 share GPU 0000:01:00.0 of n1; allowed: staged, auto"),
        ("oneshot", OTHER_NODE, "ranks on 2 hosts; allowed: nccl"),
        ("oneshot", MANY, "9 ranks, at most 8; allowed: nccl"),
        ("nccl", TOGETHER, "ranks 0 and 2 share GPU 0000:01:00.0 of n1; allowed: staged, auto"),
        ("nccl", NO_NCCL, "no NCCL on rank 1; allowed: oneshot, staged, auto"),
    ],
)
def test_refusals_take_one_line(choice: str, seats: list[GpuPlace], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose(choice, seats)


@pytest.mark.parametrize("seats, expected", [(APART, "nccl"), (NO_NCCL, "staged")])
def test_auto_does_without_oneshot_where_it_failed(seats: list[GpuPlace], expected: str) -> None:
    assert choose("auto", seats, oneshot=False) == expected


def test_cray_says_it_in_the_environment() -> None:
    assert claims_cuda({"MPICH_GPU_SUPPORT_ENABLED": "1"})
