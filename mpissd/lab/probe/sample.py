"""How the probe measures: launches bounded by time, their median and spread, findings kept.

A rank that finds wrong data goes on, so that no other is left in a collective; all ranks stop
together at the end of the stage (Checks.error).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import GateError
from mpissd.engine.backend.base import DeviceInfo

Entry = dict[str, Any]  # one of a profile's tables, as JSON


@dataclass(frozen=True)
class Pace:
    """How often something is launched: warm-up seconds, then at least so often, and in a time."""

    warm_s: float
    budget_s: float
    at_least: int = 5
    at_most: int = 25

    @classmethod
    def of(cls, info: DeviceInfo) -> Pace:
        """GPUs clock up first (an H200 reads slowly for some ms after an allocation); CPUs take
        longer a launch; what is modelled is the same every time."""
        if info.kind == "emulated":
            return cls(warm_s=0, budget_s=0, at_least=1, at_most=1)
        return cls(warm_s=0.03, budget_s=0.05) if info.kind == "gpu" else cls(0, 0.06)

    def counts(self, once_s: float) -> tuple[int, int]:
        """(warm-up launches, launches) of something that takes once_s."""
        once_s = max(once_s, 1e-6)
        warm = int(min(self.warm_s / once_s, 200))
        return warm, int(min(max(self.budget_s / once_s, self.at_least), self.at_most))


@dataclass(frozen=True)
class Sample:
    """Median seconds of some launches, and their interquartile range over it (None: median 0)."""

    seconds: float
    spread: float | None
    num: int
    least: float  # of all of them

    @classmethod
    def of(cls, seconds: Iterable[float], per: int = 1) -> Sample:
        """Of launches that each did `per` things."""
        times = np.array(list(seconds)) / per
        low, median, high = (float(q) for q in np.percentile(times, [25, 50, 75]))
        spread = (high - low) / median if median else None
        return cls(median, spread, len(times), float(times.min()))


def sample(
    once: Callable[[], float], pace: Pace, *, per: int = 1, together: MPI.Comm | None = None
) -> Sample:
    """The median of launches of one thing; see samples."""
    return samples({1: once}, pace, per=per, together=together)[1]


def samples(
    onces: Mapping[int, Callable[[], float]],
    pace: Pace,
    *,
    per: int = 1,
    together: MPI.Comm | None = None,
) -> dict[int, Sample]:
    """The median of launches of each; once() launches, waits and gives the seconds.

    They take turns, so that a disturbance hits all of them and the median of none. together: the
    ranks that launch with this one, a collective's. They launch equally often, and each launch
    counts as long as it took the rank that began last: the others' include a wait for it.
    """
    counts = {}
    for at, once in onces.items():
        once()  # the first of its kind pays for what is loaded lazily
        first = once()
        if together is not None:
            first = together.allreduce(first, op=MPI.MAX)
        warm, counts[at] = pace.counts(first)
        for _ in range(warm):
            once()
    times: dict[int, list[float]] = {at: [] for at in onces}
    for turn in range(max(counts.values())):
        for at in (at for at, count in counts.items() if turn < count):
            times[at].append(onces[at]())
    found = {}
    for at, seconds in times.items():
        least = np.array(seconds)
        if together is not None:
            together.Allreduce(MPI.IN_PLACE, least, op=MPI.MIN)
        found[at] = Sample.of(least, per)
    return found


def entry(identity: Mapping[str, Any], source: str, samples: Mapping[int, Sample]) -> Entry:
    """One entry of a profile's table: seconds by rows or bytes."""
    return {
        **identity,
        "from": source,
        "seconds": {str(at): s.seconds for at, s in samples.items()},
        "spread": {str(at): s.spread for at, s in samples.items()},
        "num_launches": {str(at): s.num for at, s in samples.items()},
    }


class Checks:
    """What this rank found wrong in the data so far."""

    def __init__(self) -> None:
        self.findings: list[str] = []

    def expect(self, sound: bool, finding: str) -> None:
        """Keeps the finding unless all is sound."""
        if not sound:
            self.findings.append(finding)

    def close(self, found: Any, wanted: Any, tolerance: float, what: str) -> None:
        """Keeps a finding where an element is off by more than `tolerance`, NaN or missing."""
        if np.shape(found) != np.shape(wanted):
            self.expect(False, f"{what}: shape {np.shape(found)}, expected {np.shape(wanted)}")
            return
        error = np.abs(np.asarray(found, np.float64) - wanted)
        wrong = ~(error <= tolerance)  # NaN is wrong, too
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            self.expect(
                False,
                f"{what}: {int(wrong.sum())} of {wrong.size} values are wrong, at {list(at)} "
                f"{float(np.asarray(found)[at]):g}, expected {float(np.asarray(wanted)[at]):g} "
                f"± {tolerance:.1g}",
            )

    def error(self) -> GateError | None:
        """The first finding, and how many others there are."""
        if not self.findings:
            return None
        others = len(self.findings) - 1
        return GateError(f"probe: {self.findings[0]}" + (f" (and {others} more)" if others else ""))
