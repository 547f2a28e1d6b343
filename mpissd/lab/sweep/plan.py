"""Plans a sweep: every configuration of a grid once, and the order of all measurements.

Combinations that differ only in flags that the method ignores are merged: AR has no alpha and SD no
hit rate, so each is measured once, however many values those flags have. Each repeat measures every
configuration once, in a random order of its own, so that a drift of the machine favours none.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import MODES, flags_of, parse_into, said
from mpissd.lab.sweep.grid import NONE, ONE_A_JOB, Block

_SWEEPS_OWN = ("dry_run", "trace", "progress")
_MOST_COMBINATIONS = 100_000


@dataclass(frozen=True)
class Point:
    """One configuration of a grid: the flags that the grid gives, and the whole configuration."""

    flags: tuple[tuple[str, str], ...]
    config: RunConfig | None
    error: str | None = None  # why config is None

    @cached_property
    def digest(self) -> str:
        """A digest of the configuration, or of the flags if they make no valid configuration."""
        if self.config is not None:
            return self.config.digest
        return hashlib.sha256(json.dumps(self.flags).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.flags) or "defaults"


@dataclass(frozen=True)
class Task:
    """One measurement: a configuration and the number of its repeat."""

    point: Point
    repeat: int  # counted from 0

    def digest(self, tp: int, backend: str, device_name: str) -> str:
        """Returns a digest of the configuration, repeat and machine; the task's name in files.

        Two tasks with equal digests need only one measurement.
        """
        named = [self.point.digest, self.repeat, tp, backend, device_name]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The configurations of a sweep, or of one shard of it, in the grid's order.

    A shard has every num_shards-th configuration.
    """

    points: tuple[Point, ...]
    repeats: int
    seed: int
    num_drafts: int  # D of the job: the largest D of any configuration

    def tasks(self) -> Iterator[Task]:
        """Yields the measurements in order: repeat by repeat, shuffled within each repeat."""
        for repeat in range(self.repeats):
            for index in np.random.default_rng((self.seed, repeat)).permutation(len(self.points)):
                yield Task(self.points[index], repeat)

    @property
    def drafts(self) -> list[int]:
        """The numbers of draft ranks that configurations have, in increasing order."""
        return sorted({point.config.drafts for point in self.points if point.config is not None})


def make_plan(
    blocks: Sequence[Block], base: RunConfig, repeats: int, shard: tuple[int, int]
) -> Plan:
    """Makes the plan of a grid; the flags of `base` hold if a block does not set them.

    num_drafts in `base` is D of the whole job. shard: (I, N), with I from 1. Raises ConfigError if
    the grid has more draft ranks than the job, the shard has no configuration, or the grid has more
    combinations than a sweep could ever measure.
    """
    count = sum(math.prod(len(values) for _, values in block.axes) for block in blocks)
    if count > _MOST_COMBINATIONS:
        raise ConfigError(f"grid: {count} combinations: allowed: at most {_MOST_COMBINATIONS}")
    given = said(base)
    job = {n: text for n, text in given.items() if n in ONE_A_JOB and n not in _SWEEPS_OWN}
    job["progress"] = "off"  # the sweep shows a bar of its own
    most = given.pop("num_drafts", None)
    shared = {name: text for name, text in given.items() if name not in ONE_A_JOB}
    by_digest: dict[str, Point] = {}
    for combination in _combinations(blocks):
        flags = shared | combination
        if most is not None and int(most) != 1:
            flags = {"num_drafts": most, **flags}
        point = _point(flags, job)
        by_digest.setdefault(point.digest, point)
    used = max((p.config.drafts for p in by_digest.values() if p.config is not None), default=0)
    if most is not None and used > int(most):
        raise ConfigError(f"num_drafts={used} in the grid: allowed: at most {most}, as said")
    points = tuple(by_digest.values())[shard[0] - 1 :: shard[1]]
    if not points:
        raise ConfigError(
            f"shard={shard[0]}/{shard[1]}: {len(by_digest)} configurations leave it none"
        )
    return Plan(points, repeats, base.seed, used if most is None else int(most))


def _combinations(blocks: Sequence[Block]) -> Iterator[dict[str, str]]:
    for block in blocks:
        names = [name for name, _ in block.axes]
        for values in itertools.product(*(values for _, values in block.axes)):
            yield {n: v for n, v in zip(names, values, strict=True) if v != NONE}


def _point(flags: Mapping[str, str], job: Mapping[str, str]) -> Point:
    """Makes a configuration from a combination of flags, without those that its method ignores."""
    try:
        unseen = _unseen(flags)
        kept = {name: text for name, text in flags.items() if name not in unseen}
        held = {name: text for name, text in job.items() if name not in unseen}
        return Point(tuple(kept.items()), parse_into(RunConfig, {**held, **kept}))
    except ConfigError as error:
        return Point(tuple(flags.items()), None, str(error))


def _unseen(flags: Mapping[str, str]) -> set[str]:
    """Returns the names of the flags that change nothing in this configuration."""
    mode = flags.get("mode", RunConfig.mode)
    known = flags_of(RunConfig) if mode in MODES else {}
    unseen = {name for name, field in known.items() if mode not in field.metadata["modes"]}
    if flags.get("num_drafts", "1").strip("0") == "":  # "0" and "00" both parse as zero
        unseen.add("draft_device")
    if flags.get("backup", "jit") == "jit":
        unseen.add("acceptance_fast")
    return unseen
