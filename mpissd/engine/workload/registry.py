"""Find the class of a workload by its name, and make the workload of a job."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mpissd.common.workloads import known

if TYPE_CHECKING:
    from mpissd.engine.job.job import Job
    from mpissd.engine.workload.base import Workload


def workload_kind(name: str) -> type[Workload]:
    """Imports and returns the workload class `name`; raises ConfigError if it is not registered."""
    module, _, kind = known(name).where.partition(":")
    workload: type[Workload] = getattr(import_module(module), kind)
    return workload


def workload_of(job: Job) -> Workload:
    """Returns the workload object of this job, which is made once."""
    return job.workload
