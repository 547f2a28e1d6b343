"""Flags as text: each is a dataclass field that knows how its text is typed, bounded and explained.

A configuration is a frozen dataclass of such fields, `Checked` whenever one is made; `parse_into`
makes one of what was said.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import field
from typing import Any, TypeVar

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.schedules import with_schedule

Parse = Callable[[str, str], Any]
Config = TypeVar("Config")


def integer(minimum: int, maximum: float = math.inf) -> Parse:
    """Parses a whole number in [minimum, maximum]."""

    def parse(name: str, text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            limit = f">= {minimum}" if maximum == math.inf else f"in [{minimum}, {maximum}]"
            raise ConfigError(f"{name}={text}: allowed: a whole number {limit}")
        return value

    return parse


def number(low: float, high: float = math.inf) -> Parse:
    """Parses a finite number in [low, high]."""

    def parse(name: str, text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and math.isfinite(value)):
            limit = f"in [{low:g}, {high:g}]" if high < math.inf else f">= {low:g}"
            raise ConfigError(f"{name}={text}: allowed: a number {limit}")
        return value

    return parse


def choice(*allowed: str) -> Parse:
    """Parses one of a few names."""

    def parse(name: str, text: str) -> str:
        if text not in allowed:
            raise unknown(name, text, allowed)
        return text

    return parse


def switch(name: str, text: str) -> bool:
    """Parses --flag, --flag=true, --noflag, --flag=false."""
    values = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in values:
        raise ConfigError(f"{name}={text}: allowed: true, false")
    return values[text.lower()]


def words(name: str, text: str) -> str:
    """Takes text as it is; a flag without a value is refused."""
    if text in ("", "True"):
        raise ConfigError(f"{name}: needs a value")
    return text


def flag(default: Any, parse: Parse, text: str) -> Any:
    """A dataclass field that is a flag."""
    return field(default=default, metadata={"parse": parse, "help": text})


class Checked:
    """Base of every configuration: judges each one that is made, whichever way it is made.

    Parsing, a constructor call and dataclasses.replace all end in __post_init__, which raises
    ConfigError for a value that its flag does not take and then runs every method named `check_…`,
    those of the base classes first. A subclass adds checks and cannot drop one: TypeError where it
    defines __post_init__ or a check that a base class has.
    """

    def __init_subclass__(cls) -> None:
        for name in vars(cls):
            if name == "__post_init__" or (_is_check(name) and hasattr(super(cls, cls), name)):
                raise TypeError(f"{cls.__name__}.{name} would replace a check of its base class")

    def __post_init__(self) -> None:
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if value != f.default:
                f.metadata["parse"](f.name, str(value))
        for kind in reversed(type(self).__mro__):
            for name in filter(_is_check, vars(kind)):
                self._run(getattr(kind, name))

    def _run(self, check: Check) -> None:
        try:
            check(self)
        except ConfigError:
            if not self.excuses(flags_read(check, self)):
                raise

    def excuses(self, flags: AbstractSet[str]) -> bool:
        """Whether a failed check that read these flags is judged later, when they are known."""
        return False


Check = Callable[[Any], None]


def _is_check(name: str) -> bool:
    return name.startswith("check_")


def flags_read(check: Check, config: Checked) -> set[str]:
    """The names of the flags that a check reads of this configuration, up to what it refuses."""
    names = set[str]()

    class Reading:
        def __getattr__(self, name: str) -> Any:
            found = inspect.getattr_static(config, name)
            if isinstance(found, property):
                return found.fget(self)  # type: ignore[misc]
            names.add(name)
            return getattr(config, name)

    with contextlib.suppress(ConfigError):
        check(Reading())
    return names


def documented(command: Any, about: str, kind: type) -> Any:
    """A function (*words, **flags) with the signature and the help of a configuration's fields, as
    fire shows them."""
    fields = dataclasses.fields(kind)
    keyword = inspect.Parameter.KEYWORD_ONLY
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter("words", inspect.Parameter.VAR_POSITIONAL),
            *(inspect.Parameter(f.name, keyword, default=f.default) for f in fields),
            inspect.Parameter("flags", inspect.Parameter.VAR_KEYWORD),
        ]
    )
    lines = "\n".join(f"    {f.name}: {f.metadata['help']}" for f in fields)
    command.__doc__ = f"{about}\n\nArgs:\n{lines}\n"
    return command


def parse_into(kind: type[Config], flags: Mapping[str, str]) -> Config:
    """Flags as text → a validated configuration of this kind."""
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    told = {}
    for name, text in flags.items():
        short = [f for f in fields if len(name) == 1 and f.startswith(name)]
        name = short[0] if len(short) == 1 else name  # -m=sd, as the help offers
        if name not in fields:
            raise unknown("flag", f"--{name}", (f"--{n}" for n in fields))
        told[name] = str(text)
    parse = {name: fields[name].metadata["parse"] for name in fields}
    return kind(**{name: parse[name](name, text) for name, text in with_schedule(told).items()})
