"""The launcher's variables for a process, worlds that are too small, and which all-reduce a set of
ranks gets. No MPI is started, and no GPU used."""

import pytest

from mpissd.common.errors import ConfigError
from mpissd.common.guard import local_size
from mpissd.engine.comm.mpi_group import GpuPlace, choose
from mpissd.engine.comm.topology import check_world, label_hosts, launcher_rank, launcher_size

MPICH = {"PMI_SIZE": "4", "PMI_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "size", "rank"),
    [
        ({}, None, 0),
        ({"OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_RANK": "2"}, 3, 2),
        ({"SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"}, 5, 4),
        # mpirun inside an allocation: mpirun's variables count.
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", **MPICH}, 4, 1),
        # A shell by srun --pty: nothing was launched yet.
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None, 0),
        ({"SLURM_NTASKS": "7"}, None, 0),  # of the allocation, in which nothing was launched yet
        ({"PMI_SIZE": "many", "PMI_RANK": "1"}, None, 0),
    ],
)
def test_what_launchers_say(environ: dict[str, str], size: int | None, rank: int) -> None:
    assert (launcher_size(environ), launcher_rank(environ)) == (size, rank)


def test_ranks_of_this_host() -> None:
    """A watchdog that expects no further rank ends with the last one, for which srun waits."""
    listed = {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1"}
    told = [local_size({**listed, "SLURM_NODEID": host}) for host in ("0", "1", "2", "3")]
    assert told == [3, 3, 1, None]
    assert local_size({**listed, "SLURM_NODEID": "2", "MPI_LOCALNRANKS": "4"}) == 4


def test_a_world_is_t_and_d_and_groups_divide_its_targets() -> None:
    assert [check_world(size, 1) for size in (2, 3, 9)] == [1, 2, 8]
    with pytest.raises(ConfigError, match=r"of 1 rank .* T=0 beside D=1: .* at least 2"):
        check_world(1, 1)
    assert [check_world(size, 1, 2) for size in (3, 5, 17)] == [1, 2, 8]
    assert check_world(10, 2, 4) == 2
    with pytest.raises(ConfigError, match=r"groups=2 and num_drafts=1, .* T=0 .* at least 3"):
        check_world(2, 1, 2)
    with pytest.raises(ConfigError, match="3 target ranks do not divide into 2 groups"):
        check_world(4, 1, 2)


@pytest.mark.parametrize(
    ("told", "labels"),
    [
        ([("a", 0), ("a", 0), ("b", 2)], ("a", "a", "b")),
        ([("a", 0), ("a", 1), ("a", 0), ("b", 3)], ("a#0", "a#1", "a#0", "b")),
    ],
)
def test_equal_names_are_told_apart(told: list[tuple[str, int]], labels: tuple[str, ...]) -> None:
    assert label_hosts(told) == labels


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
