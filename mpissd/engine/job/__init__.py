"""Resolve a configuration for a given T to shapes, fan-out and bytes, without MPI or GPU."""

from mpissd.engine.job.job import Job, buckets, fine_buckets
from mpissd.engine.job.resolving import resolve, resolve_unopened
from mpissd.engine.workload.resolved import Serving

__all__ = [
    "Job",
    "Serving",
    "buckets",
    "fine_buckets",
    "resolve",
    "resolve_unopened",
]
