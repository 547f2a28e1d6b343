"""Samples launches within a time budget: their median and spread, and checks of their data.

A rank that finds wrong data continues, so that the others are not left waiting in a collective; all
ranks stop together at the end of the stage (Checks.error).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import GateError
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import DeviceInfo

Entry = dict[str, Any]  # An entry of one of a profile's tables, as JSON.


@dataclass(frozen=True)
class Pace:
    """The pace of launches: seconds of warm-up, and a time budget with bounds on their number."""

    warm_s: float
    budget_s: float
    at_least: int = 5
    at_most: int = 25

    @classmethod
    def of(cls, info: DeviceInfo) -> Pace:
        """Returns the pace for one device.

        GPUs are warmed up (an H200 reads slowly for some ms after an allocation), CPU launches take
        longer, and modelled durations never vary, so one launch is enough.
        """
        if info.kind == "emulated":
            return cls(warm_s=0, budget_s=0, at_least=1, at_most=1)
        return cls(warm_s=0.03, budget_s=0.05) if info.kind == "gpu" else cls(0, 0.06)

    def counts(self, once_s: float) -> tuple[int, int]:
        """Returns (warm-up launches, timed launches) for something that takes once_s."""
        once_s = max(once_s, 1e-6)
        warm = int(min(self.warm_s / once_s, 200))
        return warm, int(min(max(self.budget_s / once_s, self.at_least), self.at_most))


@dataclass(frozen=True)
class Sample:
    """Median seconds of some launches, and their interquartile range over the median (None if it is
    0)."""

    seconds: float
    spread: float | None
    num: int
    least: float  # The shortest of them.

    @classmethod
    def of(cls, seconds: Iterable[float], per: int = 1) -> Sample:
        """Makes a sample of launches that each did `per` operations."""
        times = np.array(list(seconds)) / per
        low, median, high = (float(q) for q in np.percentile(times, [25, 50, 75]))
        spread = (high - low) / median if median else None
        return cls(median, spread, len(times), float(times.min()))


def sample(
    once: Callable[[], float], pace: Pace, *, per: int = 1, together: MPI.Comm | None = None
) -> Sample:
    """Returns the sample of one launchable operation; see `samples`."""
    return samples({1: once}, pace, per=per, together=together)[1]


def samples(
    onces: Mapping[int, Callable[[], float]],
    pace: Pace,
    *,
    per: int = 1,
    together: MPI.Comm | None = None,
) -> dict[int, Sample]:
    """Returns the sample of each; once() launches, waits and returns the seconds.

    They take turns, so that a disturbance hits all of them and no median. together: the ranks that
    take part in a collective launch. They launch equally often, and each launch counts with the
    time of the rank that began last, because the others' times include waiting for it.
    """
    counts = {}
    for at, once in onces.items():
        once()  # The first launch also loads libraries, so its time is dropped.
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
    by_point = {}
    for at, seconds in times.items():
        least = np.array(seconds)
        if together is not None:
            together.Allreduce(MPI.IN_PLACE, least, op=MPI.MIN)
        by_point[at] = Sample.of(least, per)
    return by_point


def launched(launch: Callable[[], None], program: Any, waiter: Waiter) -> Callable[[], float]:
    """Returns a function that launches, waits and returns device seconds."""

    def once() -> float:
        launch()
        program.wait(waiter)
        return float(program.elapsed_s())

    return once


def entry(identity: Mapping[str, Any], source: str, samples: Mapping[int, Sample]) -> Entry:
    """Makes one entry of a profile's table, with seconds by rows or bytes."""
    return {
        **identity,
        "from": source,
        "seconds": {str(at): s.seconds for at, s in samples.items()},
        "spread": {str(at): s.spread for at, s in samples.items()},
        "num_launches": {str(at): s.num for at, s in samples.items()},
    }


class Checks:
    """Collects the errors in this rank's data."""

    def __init__(self) -> None:
        self.findings: list[str] = []

    def expect(self, sound: bool, finding: str) -> None:
        """Records the error text unless `sound` is true."""
        if not sound:
            self.findings.append(finding)

    def close(self, computed: Any, wanted: Any, tolerance: float, what: str) -> None:
        """Records a finding if an element is off by more than `tolerance`, or NaN, or the shapes
        differ."""
        if np.shape(computed) != np.shape(wanted):
            self.expect(False, f"{what}: shape {np.shape(computed)}, expected {np.shape(wanted)}")
            return
        error = np.abs(np.asarray(computed, np.float64) - wanted)
        wrong = ~(error <= tolerance)  # NaN counts as wrong.
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            self.expect(
                False,
                f"{what}: {int(wrong.sum())} of {wrong.size} values are wrong, at {list(at)} "
                f"{float(np.asarray(computed)[at]):g}, expected {float(np.asarray(wanted)[at]):g} "
                f"± {tolerance:.1g}",
            )

    def error(self) -> GateError | None:
        """Returns an error with the first finding and the number of others; None without
        findings."""
        if not self.findings:
            return None
        others = len(self.findings) - 1
        return GateError(f"probe: {self.findings[0]}" + (f" (and {others} more)" if others else ""))
