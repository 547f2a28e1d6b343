"""Declares and parses flags: a flag is a dataclass field with its parser, bounds and help.

A configuration is a frozen dataclass of such fields. It is checked whenever one is made
(`Checked`); `parse_into` makes one from flags as text. A field also declares which values of other
flags it requires and which workloads use it; other combinations are refused. A command's
configuration may contain another one (`contained`), whose flags the command then has too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from mpissd.common.errors import ConfigError, unknown

Parse = Callable[[str, str], Any]
Config = TypeVar("Config", bound="Checked")
MODES = ("ar", "sd", "ssd")
DRAFTING = ("sd", "ssd")  # modes that draft tokens
ANY = "any value"
GROWING = ("ssd",)  # the mode that fills a speculation cache


def _bounded(kind: type[int] | type[float], name: str, low: float, high: float = math.inf) -> Parse:
    """Returns a parser of numbers in [low, high]; name: what an error message calls the number."""
    limit = f">= {low:.15g}" if high == math.inf else f"in [{low:.15g}, {high}]"

    def parse(flag: str, text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value < math.inf):
            raise ConfigError(f"{flag}={text}: allowed: {name} {limit}")
        return value

    return parse


integer = partial(_bounded, int, "a whole number")  # integer(low, high) returns a parser
number = partial(_bounded, float, "a number")


def choice(*allowed: str) -> Parse:
    def parse(name: str, text: str) -> str:
        if text not in allowed:
            raise unknown(name, text, allowed)
        return text

    return parse


def switch(name: str, text: str) -> bool:
    """Parses a boolean flag; fire passes --flag as "true" or "True" and --noflag as "False"."""
    values = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in values:
        raise ConfigError(f"{name}={text}: allowed: true, false")
    return values[text.lower()]


def ranks_or_switch(name: str, text: str) -> bool | int:
    if text.isdecimal() and text != "0":
        return int(integer(1)(name, text))
    return switch(name, text)


def words(name: str, text: str) -> str:
    """Parses a text, which stays as it is. Raises ConfigError for "" and "True" (no value)."""
    if text in ("", "True"):
        raise ConfigError(f"{name}: needs a value")
    return text


def mapped(kind: type[Config], text: str | None, name: str) -> Config:
    """Parses the value of the flag `name`, which is itself a list of flags, such as
    rate=3e-5,batch=4, into a configuration of class `kind`. text: the value; None counts as an
    empty list. Raises ConfigError for a wrong list."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if bad := [key for key, is_said, _ in pairs if not is_said]:
        raise ConfigError(f"{name}={text}: {bad[0]!r}: allowed: {name}=name=value,name=value")
    try:
        return parse_into(kind, {key.strip(): value.strip() for key, _, value in pairs})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Condition:
    """A condition on another flag: `mode=sd|ssd` says that mode is sd or ssd, `temperature>0` that
    it is above 0, and `target` alone that this flag is given."""

    name: str
    allowed: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        name, is_equal, values = text.partition("=")
        if is_equal:
            return cls(name, values)
        name, is_above, bound = text.partition(">")
        return cls(name, f">{bound}" if is_above else "")

    def holds(self, value: Any) -> bool:
        if not self.allowed:
            return value is not None
        if self.allowed.startswith(">"):
            return value is not None and bool(value > float(self.allowed[1:]))
        return str(value) in self.allowed.split("|")

    def __str__(self) -> str:
        """Returns the part of an error message that says what the condition allows."""
        if self.allowed.startswith(">"):
            return f"{self.name} above {self.allowed[1:]}"
        if not self.allowed:
            return "both"
        named = self.allowed.removeprefix("None|")  # "None|": the flag may be left out, too
        return "one of them" if named == "None" else f"{self.name}={named}"


def flag(
    default: Any,
    parse: Parse,
    text: str,
    *,
    modes: Collection[str] = MODES,
    workloads: str = "",
    needs: str | Mapping[Any, str] = "",
    neutral: Any = None,
) -> Any:
    """Makes a dataclass field that is a command-line flag. parse: checks and converts its text.
    text: its help. modes: the decoding modes in which it has an effect; in other modes a sweep
    measures only one of its values. workloads: those that use the flag ("": all); others refuse it.
    needs: conditions on other flags (see Condition), separated by spaces, under which the flag may
    have a value other than the default and `neutral`; a mapping has conditions by value."""
    of_value = needs if isinstance(needs, Mapping) else {ANY: needs}
    return field(
        default=default,
        metadata={
            "parse": parse,
            "help": text,
            "modes": modes,
            "workloads": tuple(workloads.split()),
            "needs": {
                v: tuple(map(Condition.parse, needed.split())) for v, needed in of_value.items()
            },
            "neutral": (default, neutral),
        },
    )


def contained(
    kind: type[Config],
    only: Collection[str] | None = None,
    *,
    is_unchecked: bool = False,
    **instead: dataclasses.Field[Any],
) -> Any:
    """Makes a dataclass field that holds another configuration; the class with this field gets its
    flags too. kind: the other configuration's class. only: which of its flags are taken (None:
    all). is_unchecked: whether it is made without its own check, so that the class with the field
    must check it. instead: fields that replace flags of the same names."""
    flags = {**flags_of(kind), **instead}
    flags = {name: f for name, f in flags.items() if only is None or name in only}
    defaults = {name: f.default for name, f in instead.items()}
    return field(
        default_factory=lambda: kind(**defaults),
        metadata={"contains": kind, "flags": flags, "is_unchecked": is_unchecked},
    )


def flags_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Returns {name: field} of a configuration's flags and of those of contained configurations."""
    flags: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(kind):
        flags |= f.metadata.get("flags") or {f.name: f}
    return flags


def said(config: Checked) -> dict[str, str]:
    """Returns {name: value as text} of the flags whose values differ from their defaults."""
    values = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return {name: str(value) for name, (value, default) in values.items() if value != default}


class Checked:
    """The base class of configurations, which checks each new object. Parsing, constructor calls
    and dataclasses.replace all end in __post_init__."""

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ConfigError for a value that its flag's parser refuses, or that contradicts
        another flag. Subclasses add checks that field declarations cannot express."""
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if "parse" in f.metadata and value != f.default:
                f.metadata["parse"](f.name, str(value))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            needs = f.metadata.get("needs", {})
            is_set = ANY in needs and value not in f.metadata["neutral"]
            for need in needs.get(ANY if is_set else value, ()):
                other = self.effective(need.name)
                if not need.holds(other):
                    given = f"without {need.name}" if other is None else f"with {need.name}={other}"
                    raise ConfigError(f"{f.name}={value} {given}: allowed: {need}")

    def effective(self, name: str) -> Any:
        """Returns a flag's value. Subclasses may return the value that other flags imply."""
        return getattr(self, name)

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Returns {flag: text} of the given flags; a subclass adds flags that these imply."""
        return dict(flags)


def without(arguments: Sequence[str], name: str) -> list[str]:
    """Returns a command's arguments without the flag `name` and its value, in any spelling."""
    kept = list[str]()
    was_flag = False
    for word in arguments:
        flag = word.lstrip("-")
        is_value = was_flag
        was_flag = False
        if word.startswith("-") and flag.partition("=")[0].replace("-", "_") == name:
            was_flag = "=" not in flag
        elif not is_value or word.startswith("--"):
            kept.append(word)
    return kept


def read(
    arguments: Sequence[str], names: Collection[str], positional: Sequence[str] = ()
) -> dict[str, str]:
    """Parses a command's arguments with fire (--name=value, --name value, --noname) into {flag:
    text}. Raises ConfigError for a word that is no flag. names: the known flags. positional: the
    flags whose values words without -- are, in order. fire calls its function before it reports an
    unknown flag, so the function here takes any flag, and parse_into refuses unknown ones."""
    import fire
    from fire.decorators import SetParseFn

    @SetParseFn(str)  # type: ignore[untyped-decorator]
    def command(*words: str, **flags: str) -> dict[str, str]:
        for name in [n for n in flags if n not in names and n.startswith("no") and n[2:] in names]:
            flags[name[2:]] = str(flags.pop(name) != "True")
        free = [name for name in positional if name not in flags]
        if len(words) > len(free):
            raise ConfigError(f"{words[-1]!r} is not a flag: write --name=value")
        return {**flags, **dict(zip(free, words, strict=False))}

    if stray := {"-", "--"} & set(arguments):  # fire takes words after these as its own flags
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    given = fire.Fire(command, command=list(arguments), name="mpissd", serialize=lambda _: None)
    return dict(given)


def parse_into(kind: type[Config], flags: Mapping[str, str]) -> Config:
    """Makes a configuration of class `kind`, and those contained in it, from {flag: text}. Raises
    ConfigError for an unknown flag or a refused value."""
    fields = flags_of(kind)
    for name in flags:
        if name not in fields:
            raise unknown("flag", f"--{name}", (f"--{n}" for n in fields))
    completed = kind.completed({name: str(text) for name, text in flags.items()})
    values = {name: fields[name].metadata["parse"](name, text) for name, text in completed.items()}
    arguments: dict[str, Any] = {}
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        if f.name in values:
            arguments[f.name] = values[f.name]
        elif inner := f.metadata.get("flags"):
            inner = {name: values.get(name, declared.default) for name, declared in inner.items()}
            make = partial(unchecked, f.metadata["contains"])
            make = make if f.metadata["is_unchecked"] else f.metadata["contains"]
            arguments[f.name] = make(**inner)
    return kind(**arguments)


def unchecked(kind: type[Config], **values: Any) -> Config:
    """Makes a configuration without running its check; absent flags get their defaults."""
    made = kind.__new__(kind)
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        object.__setattr__(made, f.name, values.get(f.name, f.default))
    return made
