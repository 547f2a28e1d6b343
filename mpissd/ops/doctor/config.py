"""The configuration of `doctor`: a run's, and how to examine it."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.flags import flag, integer, number, switch


@dataclass(frozen=True)
class DoctorConfig(RunConfig):
    """Of `doctor`: the flags of the run that is examined."""

    tp: int | None = flag(None, integer(1), "target ranks to start (default 1; not under mpirun)")
    deadline_s: float = flag(60.0, number(0.1), "longest examination, in seconds")
    json: bool = flag(False, switch, "under mpirun: what the ranks see, as one line of JSON")
