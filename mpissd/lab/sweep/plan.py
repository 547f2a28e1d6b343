"""Plans a sweep: reads a grid, makes each configuration once, and orders all measurements.

A grid (docs/sweep.md) lists values of flags; every combination of one value of each is a
configuration. It is one line, `mode=sd,ssd; lookahead=2..8`, or a file of blocks, each with its own
values. Combinations that differ only in flags that their mode ignores are measured once. Each
repeat measures all configurations in a new random order, so that a drift of the machine's speed
favours none of them.
"""

import configparser
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mpissd.common.config import MachineFlags, OutputFlags, RunConfig, with_text
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.files import read_file
from mpissd.common.flags import (
    MODES,
    Checked,
    contained,
    flag,
    flags_of,
    integer,
    parse_into,
    said,
    words,
)

_FLAGS = flags_of(RunConfig)
# All configurations of a job share these flags; so a grid may not list values of them.
_ONE_A_JOB = (*flags_of(MachineFlags), *flags_of(OutputFlags))
_SWEEPS_OWN = ("dry_run", "trace", "progress")
_MOST_VALUES = 10_000  # largest number of values in one range FIRST..LAST
_MOST_COMBINATIONS = 100_000
_QUOTED = r"(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)"  # a regex that matches positions outside of quotes
_RANGE = re.compile(r"(\d{1,20})\.\.(\d{1,20})(?:\.\.(\d{1,20}))?")

Block = dict[str, tuple[str, ...]]  # {flag: its values} in one block of a grid


@dataclass(frozen=True)
class SweepConfig(Checked):
    """Flags of the command `sweep`: the grid, and flags of `run` for all its configurations."""

    run: RunConfig = contained(RunConfig, is_unchecked=True)
    grid: str | None = flag(
        None, words, "configurations: a file, or flag=value,value; flag=FIRST..LAST; …"
    )
    repeats: int = flag(
        3,
        integer(1, 1000),
        "measurements of every configuration, each round of them in another order",
    )
    shard: str = flag("1/1", words, "I/N: every N-th configuration from the I-th on (job arrays)")

    def check(self) -> None:
        """Raises ConfigError for a missing grid, a wrong shard, or a flag that only `run` accepts.
        Other conflicts between flags are reported later, for each configuration."""
        super().check()
        if self.grid is None:
            raise ConfigError("grid: needed: a file, or flag=value,value; flag=…")
        if name := next((n for n in ("trace", "beside") if n in said(self.run)), None):
            raise ConfigError(f"{name} with sweep: allowed: with run, of one configuration")
        if self.run.on_draft_loss != "abort":
            raise ConfigError(f"on_draft_loss={self.run.on_draft_loss} with sweep: allowed: abort")
        self.shard_of  # noqa: B018  (A wrong shard raises here, before MPI starts.)

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Returns `flags` and those they imply: a prompt, or a pair with weights, means text."""
        return with_text(super().completed(flags))

    @property
    def shard_of(self) -> tuple[int, int]:
        """(I, N) of the flag --shard=I/N; raises ConfigError unless 1 <= I <= N."""
        first, _, count = self.shard.partition("/")
        shard = (int(first), int(count)) if first.isdigit() and count.isdigit() else (0, 0)
        if not 1 <= shard[0] <= shard[1]:
            raise ConfigError(f"shard={self.shard}: allowed: I/N with 1 <= I <= N")
        return shard


def read_grid(grid: str) -> list[Block]:
    """Returns the blocks of a grid, each as {flag: values}. grid: the grid itself, or the name of a
    file. Raises ConfigError for a missing file, an unknown or repeated flag, missing or wrong
    values, or a quotation without an end."""
    try:
        is_file = Path(grid).is_file()
    except OSError:  # The text is too long for a file name.
        is_file = False
    if "=" in grid and not is_file:
        axes: dict[str, str] = {}
        for part in _split(grid, ";", "grid"):
            name, is_said, values = map(str.strip, part.partition("="))
            if not is_said:
                raise ConfigError(f"grid: {part!r}: allowed: flag=value,value")
            if name in axes:
                raise ConfigError(f"grid: {name} twice")
            axes[name] = values
        return [_block(axes)]
    parser = configparser.ConfigParser(
        interpolation=None, delimiters="=", comment_prefixes="#", inline_comment_prefixes="#"
    )
    try:
        parser.read_string(read_file(Path(grid)).decode(), grid)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        allowed = "allowed: a file, or flag=value,value; flag=…"
        raise ConfigError(f"grid={grid!r}: {reason}; {allowed}") from error
    except configparser.MissingSectionHeaderError as error:
        raise ConfigError(f"grid={grid!r}: allowed: blocks, each below its [name]") from error
    except configparser.Error as error:
        raise ConfigError(f"grid {' '.join(str(error).split())}") from error
    if not parser.sections():
        raise ConfigError(f"grid={grid!r}: no [block]")
    return [_block(parser[name]) for name in parser.sections()]


def _block(axes: Mapping[str, str]) -> Block:
    block: Block = {}
    for name, text in axes.items():
        if name in _ONE_A_JOB:
            raise ConfigError(f"grid: {name} is one for all configurations: say --{name}=…")
        if name not in _FLAGS:
            raise unknown("flag in the grid", name, [n for n in _FLAGS if n not in _ONE_A_JOB])
        items = _split(text, ",", f"grid: {name}")
        values = [value for item in items for value in _expanded(name, item)]
        if not values:
            raise ConfigError(f"grid: {name} has no value")
        for value in values:
            if value != "none":
                _FLAGS[name].metadata["parse"](name, value)
        block[name] = tuple(dict.fromkeys(values))
    return block


def _expanded(name: str, item: str) -> list[str]:
    """Returns the values that `item` stands for: all numbers of a range such as 2..8, or else the
    text itself. name: the flag, for error messages."""
    if item[0] in "\"'":
        return [item[1:-1]]
    match = _RANGE.fullmatch(item)
    if match is None:
        return [item]
    first, last, step = (int(part or 1) for part in match.groups())
    if not (first <= last and step):
        raise ConfigError(f"grid: {name}={item}: allowed: FIRST..LAST or FIRST..LAST..STEP, rising")
    if last - first >= _MOST_VALUES:
        raise ConfigError(f"grid: {name}={item}: allowed: at most {_MOST_VALUES} values")
    return [str(value) for value in range(first, last + 1, step)]


def _split(text: str, separator: str, what: str) -> list[str]:
    """Splits text at separators outside quotes; drops empty parts. what: its name in errors."""
    if not re.search(f"^{_QUOTED}", text):
        raise ConfigError(f"{what}: a quotation does not end: {text.strip()!r}")
    parts = (part.strip() for part in re.split(separator + _QUOTED, text))
    return [part for part in parts if part]


@dataclass(frozen=True)
class Point:
    """One configuration of a grid. flags: the (name, value) pairs from the grid and the command
    line. config: the configuration, or None if the flags make no valid one."""

    flags: tuple[tuple[str, str], ...]
    config: RunConfig | None
    error: str | None = None  # the reason why config is None

    @cached_property
    def digest(self) -> str:
        """A hash of the configuration or, if there is none, of the flags."""
        return _digest(self.flags) if self.config is None else self.config.digest

    def __str__(self) -> str:
        return " ".join(f"{name}={text}" for name, text in self.flags) or "defaults"


@dataclass(frozen=True)
class SweepTask:
    """One measurement of a sweep: a configuration, and the number of its repeat (from 0)."""

    point: Point
    repeat: int

    def digest(self, tp: int, backend: str, device_name: str) -> str:
        """Returns a hash of configuration, repeat and machine (number of target ranks tp, backend,
        device), which identifies the measurement in rows. Tasks of equal hash are measured once."""
        return _digest([self.point.digest, self.repeat, tp, backend, device_name])


def _digest(named: Sequence[object]) -> str:
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class SweepPlan:
    """The configurations that a sweep measures: all of a grid, or those of one shard, in the grid's
    order. num_drafts: draft ranks D, enough for each of them. seed: of the random order."""

    points: tuple[Point, ...]
    repeats: int
    seed: int
    num_drafts: int

    def tasks(self) -> Iterator[SweepTask]:
        """Yields all measurements; each repeat visits all configurations, in a new random order."""
        import numpy as np  # imported late, so that --help is fast

        for repeat in range(self.repeats):
            for index in np.random.default_rng((self.seed, repeat)).permutation(len(self.points)):
                yield SweepTask(self.points[index], repeat)

    @property
    def drafts(self) -> list[int]:
        """The different numbers of draft ranks D that the configurations need, increasing."""
        return sorted({point.config.drafts for point in self.points if point.config is not None})


def planned(config: SweepConfig) -> SweepPlan:
    """Returns the configurations that a sweep measures, the same on every rank. A flag on the
    command line holds where no block of the grid sets it. Raises ConfigError if the grid is wrong,
    needs more draft ranks than --num_drafts, has too many combinations, or this shard none."""
    blocks = read_grid(str(config.grid))
    first, step = config.shard_of
    count = sum(math.prod(map(len, block.values())) for block in blocks)
    if count > _MOST_COMBINATIONS:
        raise ConfigError(f"grid: {count} combinations: allowed: at most {_MOST_COMBINATIONS}")
    given = said(config.run)
    job = {n: text for n, text in given.items() if n in _ONE_A_JOB and n not in _SWEEPS_OWN}
    job["progress"] = "off"  # The sweep prints a line per measurement instead.
    num_drafts = given.pop("num_drafts", None)
    shared = {name: text for name, text in given.items() if name not in _ONE_A_JOB}
    by_digest: dict[str, Point] = {}
    for block in blocks:
        for values in itertools.product(*block.values()):
            flags = shared | {n: v for n, v in zip(block, values, strict=True) if v != "none"}
            if num_drafts is not None and int(num_drafts) != 1:
                flags = {"num_drafts": num_drafts, **flags}
            point = _point(flags, job)
            by_digest.setdefault(point.digest, point)
    used = max((p.config.drafts for p in by_digest.values() if p.config is not None), default=0)
    if num_drafts is not None and used > int(num_drafts):
        raise ConfigError(f"num_drafts={used} in the grid: allowed: at most {num_drafts}, as said")
    points = tuple(by_digest.values())[first - 1 :: step]
    if not points:
        raise ConfigError(f"shard={config.shard}: {len(by_digest)} configurations leave it none")
    drafts = used if num_drafts is None else int(num_drafts)
    return SweepPlan(points, config.repeats, config.run.seed, drafts)


def _point(flags: Mapping[str, str], job: Mapping[str, str]) -> Point:
    """Makes a configuration from `flags`, without those that have no effect in its mode. job: flags
    that all share. If flags contradict each other, the result has the error's text."""
    try:
        mode = flags.get("mode", RunConfig.mode)
        unseen = set[str]()
        if mode in MODES:
            unseen = {name for name, field in _FLAGS.items() if mode not in field.metadata["modes"]}
        if flags.get("num_drafts", "1").strip("0") == "":  # "0" and "00" are both zero.
            unseen |= {"draft_backend", "draft_device"}
        if flags.get("backup", "jit") == "jit":
            unseen.add("acceptance_fast")
        kept = {name: text for name, text in flags.items() if name not in unseen}
        held = {name: text for name, text in job.items() if name not in unseen}
        return Point(tuple(kept.items()), parse_into(RunConfig, {**held, **kept}))
    except ConfigError as error:
        return Point(tuple(flags.items()), None, str(error))
