"""Find the class of a workload by its name."""

from __future__ import annotations

from importlib import import_module

from mpissd.common.workloads import known
from mpissd.engine.workload.base import Workload


def workload_kind(name: str) -> type[Workload]:
    """Imports and returns the workload class `name`; raises ConfigError if it is not registered."""
    module, _, kind = known(name).where.partition(":")
    workload: type[Workload] = getattr(import_module(module), kind)
    return workload
