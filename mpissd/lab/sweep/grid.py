"""Reads a grid: a text that lists, block by block, the values of each flag.

A grid is inline, or a file of blocks. `lookahead` below takes seven values, `alpha` takes two:

    mode=sd,ssd; lookahead=2..8; alpha=.6,.8; fan_out=uniform:3,'list:4,4,3'

    [DEFAULT]               # holds in every block that does not override it
    pair = 8b/1b
    [acceptance]            # a block: every combination of its values
    mode = ar, sd, ssd
    lookahead = 2..8        # 2..8..2 takes every other one
    [hits]
    p_hit = none, 0, .5, 1  # none: as if the flag was not given

A value that contains a comma must be in single or double quotes.
"""

from __future__ import annotations

import configparser
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mpissd.common.config import MachineFlags, OutputFlags, RunConfig
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import RETIRED, flags_of

NONE = "none"
# Flags that the whole job shares, so that a grid may not vary them.
ONE_A_JOB = (*flags_of(MachineFlags), *flags_of(OutputFlags))
_PARSE = {name: field.metadata["parse"] for name, field in flags_of(RunConfig).items()}
_NAMES = tuple(_PARSE)
_FLAGS = tuple(name for name in _NAMES if name not in ONE_A_JOB)
_MOST_VALUES = 10_000  # in one range
_QUOTED = r"(?=(?:[^\"']|\"[^\"]*\"|'[^']*')*$)"  # matches outside quotations
_RANGE = re.compile(r"(\d{1,20})\.\.(\d{1,20})(?:\.\.(\d{1,20}))?")


@dataclass(frozen=True)
class Block:
    """One block of a grid: every combination of the values of its flags."""

    name: str
    axes: tuple[tuple[str, tuple[str, ...]], ...]


def read_grid(grid: str) -> list[Block]:
    """Returns the blocks of an inline grid, or of the file that `grid` names.

    Raises ConfigError for a missing file, an unknown or repeated flag, a flag without values, a
    value that the flag never takes, or an open quotation.
    """
    path = Path(grid)
    if "=" in grid and not _is_file(path):
        return [_block("grid", _inline(grid))]
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"grid={grid!r}: {reason}; allowed: a file, or flag=value,value; flag=…"
        ) from error
    return list(_blocks(grid, text))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # e.g. an inline grid that is too long for a file name
        return False


def _inline(text: str) -> dict[str, str]:
    axes: dict[str, str] = {}
    for part in _split(text, ";", "grid"):
        name, is_said, values = part.partition("=")
        if not is_said:
            raise ConfigError(f"grid: {part!r}: allowed: flag=value,value")
        if name.strip() in axes:
            raise ConfigError(f"grid: {name.strip()} twice")
        axes[name.strip()] = values
    return axes


def _blocks(where: str, text: str) -> Iterator[Block]:
    parser = configparser.ConfigParser(
        interpolation=None,
        delimiters=("=",),
        comment_prefixes=("#",),
        inline_comment_prefixes=("#",),
    )
    try:
        parser.read_string(text, where)
    except configparser.MissingSectionHeaderError as error:
        raise ConfigError(f"grid={where!r}: allowed: blocks, each below its [name]") from error
    except configparser.Error as error:
        raise ConfigError(f"grid {' '.join(str(error).split())}") from error
    if not parser.sections():
        raise ConfigError(f"grid={where!r}: no [block]")
    for name in parser.sections():
        yield _block(name, dict(parser[name]))


def _block(block: str, axes: dict[str, str]) -> Block:
    for name in axes:
        if name in ONE_A_JOB:
            raise ConfigError(f"grid: {name} is one for all configurations: say --{name}=…")
        if name not in _FLAGS:
            if name in RETIRED:
                raise ConfigError(f"grid: {name} is retired: instead: {RETIRED[name]}")
            raise unknown("flag in the grid", name, _FLAGS)
    return Block(block, tuple((name, _values(name, text)) for name, text in axes.items()))


def _values(name: str, text: str) -> tuple[str, ...]:
    parts = _split(text, ",", f"grid: {name}")
    values = [value for item in parts for value in _expanded(name, item)]
    if not values:
        raise ConfigError(f"grid: {name} has no value")
    for value in values:
        if value != NONE:
            _PARSE[name](name, value)
    return tuple(dict.fromkeys(values))


def _expanded(name: str, item: str) -> Iterator[str]:
    """Yields the values of a range such as 2..8; yields quoted or other text unchanged."""
    if item[0] in "\"'":
        yield item[1:-1]
        return
    match = _RANGE.fullmatch(item)
    if match is None:
        yield item
        return
    first, last, step = (int(part or 1) for part in match.groups())
    if not (first <= last and step):
        raise ConfigError(f"grid: {name}={item}: allowed: FIRST..LAST or FIRST..LAST..STEP, rising")
    if last - first >= _MOST_VALUES:
        raise ConfigError(f"grid: {name}={item}: allowed: at most {_MOST_VALUES} values")
    yield from map(str, range(first, last + 1, step))


def _split(text: str, separator: str, what: str) -> list[str]:
    """Splits text at separators outside quotes; drops empty parts.

    what: names the text in error messages.
    """
    if not re.search(f"^{_QUOTED}", text):
        raise ConfigError(f"{what}: a quotation does not end: {text.strip()!r}")
    parts = (part.strip() for part in re.split(separator + _QUOTED, text))
    return [part for part in parts if part]
