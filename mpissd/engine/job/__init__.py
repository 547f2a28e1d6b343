"""A run, resolved: shapes, laws, fan-out and bytes for a given T. Pure; needs no MPI and no GPU."""

from mpissd.engine.job.job import Job, buckets
from mpissd.engine.job.resolving import PRIOR_ALPHA, resolve, resolve_unopened

__all__ = ["PRIOR_ALPHA", "Job", "buckets", "resolve", "resolve_unopened"]
