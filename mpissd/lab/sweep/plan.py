"""A sweep's plan: every configuration of a grid once, then their order, repeat by repeat.

Combinations that a method does not see are folded: AR has no alpha, SD no hit rate, so that each is
measured once however many values those have. A repeat measures every configuration once, in an
order of its own, so that a drift of the machine favours none.
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
from mpissd.common.schedules import with_schedule
from mpissd.lab.sweep.grid import NONE, ONE_A_JOB, Block

_SWEEPS_OWN = ("dry_run", "world_size", "trace", "ledger_ab", "progress")
_MOST_COMBINATIONS = 100_000


@dataclass(frozen=True)
class Point:
    """One configuration: the flags that the grid says, and what they make with the others."""

    flags: tuple[tuple[str, str], ...]
    config: RunConfig | None
    error: str | None = None  # why there is none

    @cached_property
    def digest(self) -> str:
        """The configuration's, or of flags that make none."""
        if self.config is not None:
            return self.config.digest
        return hashlib.sha256(json.dumps(self.flags).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.flags) or "defaults"


@dataclass(frozen=True)
class Task:
    """One measurement: a configuration, and which repeat of it."""

    point: Point
    repeat: int  # from 0

    def digest(self, tp: int, backend: str, device_name: str) -> str:
        """Names what is measured, where: equal for what need not be measured again."""
        told = [self.point.digest, self.repeat, tp, backend, device_name]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """Points in the grid's order; a shard has every num_shards-th of them."""

    points: tuple[Point, ...]
    repeats: int
    seed: int
    num_drafts: int  # D of the job: the most that a configuration has

    def tasks(self) -> Iterator[Task]:
        """In the order of measuring: repeat by repeat, shuffled in each."""
        for repeat in range(self.repeats):
            for index in np.random.default_rng((self.seed, repeat)).permutation(len(self.points)):
                yield Task(self.points[index], repeat)

    @property
    def drafts(self) -> list[int]:
        """The numbers of draft ranks that occur, rising."""
        return sorted({point.config.drafts for point in self.points if point.config is not None})


def make_plan(
    blocks: Sequence[Block], base: RunConfig, repeats: int, shard: tuple[int, int]
) -> Plan:
    """The plan of a grid over the flags of `base`, which hold where a block does not say otherwise.

    `base`'s num_drafts is D of the job. shard: (I, N), I from 1. Raises ConfigError: more draft
    ranks in the grid than in the job, a shard without a configuration, more combinations than a
    sweep could ever measure.
    """
    count = sum(math.prod(len(values) for _, values in block.axes) for block in blocks)
    if count > _MOST_COMBINATIONS:
        raise ConfigError(f"grid: {count} combinations: allowed: at most {_MOST_COMBINATIONS}")
    given = said(base)
    job = {n: text for n, text in given.items() if n in ONE_A_JOB and n not in _SWEEPS_OWN}
    job["progress"] = "off"  # the sweep has one
    most = given.pop("num_drafts", None)
    shared = {name: text for name, text in given.items() if name not in ONE_A_JOB}
    found: dict[str, Point] = {}
    for combination in _combinations(blocks):
        flags = shared | combination
        if most is not None and int(most) != 1 and "schedule" not in flags:
            flags = {"num_drafts": most, **flags}
        point = _point(flags, job)
        found.setdefault(point.digest, point)
    used = max((p.config.drafts for p in found.values() if p.config is not None), default=0)
    if most is not None and used > int(most):
        raise ConfigError(f"num_drafts={used} in the grid: allowed: at most {most}, as said")
    points = tuple(found.values())[shard[0] - 1 :: shard[1]]
    if not points:
        raise ConfigError(f"shard={shard[0]}/{shard[1]}: {len(found)} configurations leave it none")
    return Plan(points, repeats, base.seed, used if most is None else int(most))


def _combinations(blocks: Sequence[Block]) -> Iterator[dict[str, str]]:
    for block in blocks:
        names = [name for name, _ in block.axes]
        for values in itertools.product(*(values for _, values in block.axes)):
            yield {n: v for n, v in zip(names, values, strict=True) if v != NONE}


def _point(flags: Mapping[str, str], job: Mapping[str, str]) -> Point:
    """A combination without what its method does not see."""
    try:
        told = with_schedule(flags)
        unseen = _unseen(told)
        kept = {name: text for name, text in flags.items() if name not in unseen}
        held = {name: text for name, text in job.items() if name not in unseen}
        return Point(tuple(kept.items()), parse_into(RunConfig, {**held, **kept}))
    except ConfigError as error:
        return Point(tuple(flags.items()), None, str(error))


def _unseen(flags: Mapping[str, str]) -> set[str]:
    """Flags that change nothing in this configuration."""
    mode = flags.get("mode", RunConfig.mode)
    known = flags_of(RunConfig) if mode in MODES else {}
    unseen = {name for name, field in known.items() if mode not in field.metadata["modes"]}
    if flags.get("num_drafts", "1").strip("0") == "":  # as parsed: 0, 00
        unseen.add("draft_device")
    if flags.get("backup", "jit") == "jit":
        unseen.add("acceptance_fast")
    return unseen
