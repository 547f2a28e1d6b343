"""The list of all checks, in the order of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mpissd.ops.doctor.check_gpu import (
    check_cuda,
    check_gpu_health,
    check_gpu_links,
    check_nccl,
    check_ranks_gpus,
)
from mpissd.ops.doctor.check_host import (
    check_clock,
    check_cores,
    check_host_memory,
    check_limits,
    check_shared_memory,
    check_threads,
    check_watch,
)
from mpissd.ops.doctor.check_job import check_choice, check_output, check_request, check_slurm
from mpissd.ops.doctor.check_launch import (
    check_launcher,
    check_library,
    check_mpirun,
    check_python,
    check_started,
    check_versions,
)
from mpissd.ops.doctor.facts import Facts
from mpissd.ops.doctor.finding import Finding

CHECKS: tuple[Callable[[Facts], Iterable[Finding]], ...] = (
    check_python,
    check_versions,
    check_mpirun,
    check_library,
    check_launcher,
    check_slurm,
    check_request,
    check_output,
    check_started,
    check_ranks_gpus,
    check_cores,
    check_threads,
    check_shared_memory,
    check_limits,
    check_watch,
    check_clock,
    check_cuda,
    check_nccl,
    check_gpu_links,
    check_gpu_health,
    check_host_memory,
    check_choice,
)


def judge(facts: Facts) -> list[Finding]:
    """Returns the findings of all checks, in the order of the table."""
    return [finding for check in CHECKS for finding in check(facts)]
