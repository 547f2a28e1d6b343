"""Which all-reduce a set of ranks gets, and when device pointers are kept from MPI. No GPU."""

import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.comm.mpi_group import GpuPlace, choose, claims_cuda

APART = [GpuPlace("n1", "0000:01:00.0", True), GpuPlace("n1", "0000:02:00.0", True)]
OTHER_NODE = [GpuPlace("n1", "0000:01:00.0", True), GpuPlace("n2", "0000:01:00.0", True)]
TOGETHER = [*APART, GpuPlace("n1", "0000:01:00.0", True)]
MANY = [GpuPlace("n1", f"0000:0{n}:00.0", True) for n in range(9)]
NO_NCCL = [APART[0], GpuPlace("n1", "0000:02:00.0", False)]


SHARED = "ranks 0 and 2 share GPU 0000:01:00.0 of n1; allowed: staged, auto"


@pytest.mark.parametrize(
    ("choice", "seats", "told"),  # the group, or why there is none
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
        ("ncl", APART, "did you mean 'nccl'"),
        ("oneshot", TOGETHER, SHARED),
        ("oneshot", OTHER_NODE, "ranks on 2 hosts; allowed: nccl"),
        ("oneshot", MANY, "9 ranks, at most 8; allowed: nccl"),
        ("nccl", TOGETHER, SHARED),
        ("nccl", NO_NCCL, "no NCCL on rank 1; allowed: oneshot, staged, auto"),
    ],
)
def test_a_choice_is_a_group_or_a_refusal(choice: str, seats: list[GpuPlace], told: str) -> None:
    if " " not in told:
        assert choose(choice, seats) == told
        return
    with pytest.raises(ConfigError, match=told):
        choose(choice, seats)


def test_auto_does_without_oneshot_where_it_failed() -> None:
    chosen = [choose("auto", seats, oneshot=False) for seats in (APART, NO_NCCL)]
    assert chosen == ["nccl", "staged"]


def test_cray_says_it_in_the_environment() -> None:
    assert claims_cuda({"MPICH_GPU_SUPPORT_ENABLED": "1"})
