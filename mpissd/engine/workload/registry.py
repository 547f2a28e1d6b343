"""From the name of a workload to the workload of a job."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from mpissd.common.workloads import known

if TYPE_CHECKING:
    from mpissd.engine.job.job import Job
    from mpissd.engine.workload.base import Workload


def workload_kind(name: str) -> type[Workload]:
    """Imports and returns the class of this name; raises ConfigError for a name that is none."""
    module, _, kind = known(name).where.partition(":")
    found: type[Workload] = getattr(import_module(module), kind)
    return found


def workload_of(job: Job) -> Workload:
    """Returns the workload that this job decodes."""
    return workload_kind(job.config.workload)(job)
