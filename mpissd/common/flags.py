"""Flags as text: each is a dataclass field with its parser, bounds and help.

A configuration is a frozen dataclass of such fields, checked whenever one is made (`Checked`);
`parse_into` makes one from flags. A field also declares what the flag needs of other flags, and
which workloads read it: contradictions are refused from these declarations. A command's
configuration may contain another one (`contained`), whose flags are then the command's too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpissd.common.errors import ConfigError, unknown

Parse = Callable[[str, str], Any]
Config = TypeVar("Config", bound="Checked")
MODES = ("ar", "sd", "ssd")
DRAFTING = ("sd", "ssd")  # The modes with a draft.
ANY = "any value"
GROWING = ("ssd",)  # The mode that fills a speculation cache.


def integer(minimum: int, maximum: float = math.inf) -> Parse:
    """Parses a whole number in [minimum, maximum]."""
    return _bounded(int, minimum, maximum, "a whole number")


class Auto(int):
    """A number that is still to be chosen, 0; its text is `auto`."""

    def __str__(self) -> str:
        return "auto"


def integer_or_auto(minimum: int, maximum: float) -> Parse:
    """Parses a whole number in [minimum, maximum], or `auto`."""
    parse = integer(minimum, maximum)
    return lambda flag, text: Auto() if text == str(Auto()) else parse(flag, text)


def number(low: float, high: float = math.inf) -> Parse:
    """Parses a finite number in [low, high]."""
    return _bounded(float, low, high, "a number")


def _bounded(kind: type[int] | type[float], low: float, high: float, name: str) -> Parse:
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


def choice(*allowed: str) -> Parse:
    """Parses one of a few names."""

    def parse(name: str, text: str) -> str:
        if text not in allowed:
            raise unknown(name, text, allowed)
        return text

    return parse


def switch(name: str, text: str) -> bool:
    """Parses --flag, --flag=true, --noflag and --flag=false."""
    values = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in values:
        raise ConfigError(f"{name}={text}: allowed: true, false")
    return values[text.lower()]


def ranks_or_switch(name: str, text: str) -> bool | int:
    """Parses a switch, or a number of ranks in its place."""
    if text.isdecimal() and text != "0":
        return int(integer(1)(name, text))
    return switch(name, text)


def words(name: str, text: str) -> str:
    """Returns the text unchanged; raises ConfigError for a flag without a value."""
    if text in ("", "True"):
        raise ConfigError(f"{name}: needs a value")
    return text


def mapped(kind: type[Config], text: str | None, name: str) -> Config:
    """Returns the configuration that a flag's name=value pairs make; raises ConfigError."""
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if bad := [key for key, is_said, _ in pairs if not is_said]:
        raise ConfigError(f"{name}={text}: {bad[0]!r}: allowed: {name}=name=value,name=value")
    try:
        return parse_into(kind, {key.strip(): value.strip() for key, _, value in pairs})
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


@dataclass(frozen=True)
class Condition:
    """A condition on another flag: `mode=sd|ssd` (one of these values), `temperature>0`, or
    `target` (it is given)."""

    name: str
    allowed: str

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Reads a condition; it is made of names and values without spaces."""
        name, is_equal, values = text.partition("=")
        if is_equal:
            return cls(name, values)
        name, is_above, bound = text.partition(">")
        return cls(name, f">{bound}" if is_above else "")

    def holds(self, value: Any) -> bool:
        """Returns whether a value meets the condition."""
        if not self.allowed:
            return value is not None
        if self.allowed.startswith(">"):
            return value is not None and bool(value > float(self.allowed[1:]))
        return str(value) in self.allowed.split("|")

    def __str__(self) -> str:
        """Returns what is allowed, for a message."""
        if self.allowed.startswith(">"):
            return f"{self.name} above {self.allowed[1:]}"
        if not self.allowed:
            return "both"
        named = self.allowed.removeprefix("None|")  # a flag that is left out is None
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
    """Makes a dataclass field that is a flag.

    text: its help. modes: the modes in which the flag has an effect; in other modes a sweep
    measures one value of it. workloads: those that read it ("": all); others refuse it. needs: what
    other flags have to be (Condition), separated by spaces, if the value is neither the default nor
    `neutral`; as a mapping, for each value.
    """
    of_value = needs if isinstance(needs, Mapping) else {ANY: needs}
    return field(
        default=default,
        metadata={
            "parse": parse,
            "help": text,
            "modes": modes,
            "workloads": tuple(workloads.split()),
            "needs": {v: tuple(map(Condition.parse, each.split())) for v, each in of_value.items()},
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
    """Makes a dataclass field that holds another configuration, whose flags the holder also has.

    only: the flags that the holder takes (None: all). is_unchecked: whether the holder checks its
    combination of values itself. instead: flags of the holder that replace the contained flags of
    the same name, with another default and help.
    """
    flags = {**flags_of(kind), **instead}
    flags = {name: known for name, known in flags.items() if only is None or name in only}
    defaults = {name: known.default for name, known in instead.items()}
    return field(
        default_factory=lambda: kind(**defaults),
        metadata={"contains": kind, "flags": flags, "is_unchecked": is_unchecked},
    )


def flags_of(kind: type) -> dict[str, dataclasses.Field[Any]]:
    """Returns {name: field} of a configuration's flags, with the flags of contained
    configurations."""
    flags: dict[str, dataclasses.Field[Any]] = {}
    for known in dataclasses.fields(kind):
        flags |= known.metadata.get("flags") or {known.name: known}
    return flags


def said(config: Checked) -> dict[str, str]:
    """Returns a configuration's own flags that are not their defaults, as text."""
    values = {f.name: (getattr(config, f.name), f.default) for f in dataclasses.fields(config)}  # type: ignore[arg-type]
    return {name: str(value) for name, (value, default) in values.items() if value != default}


class Checked:
    """The base of every configuration: checks each one that is made, in whichever way.

    Parsing, a constructor call and dataclasses.replace all end in __post_init__.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ConfigError for a value that its flag does not take, or other flags rule out.

        Subclasses call this first, and then refuse what no declaration states.
        """
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, f.name)
            if "parse" in f.metadata and value != f.default:
                f.metadata["parse"](f.name, str(value))
        for f in dataclasses.fields(self):  # type: ignore[arg-type]
            value, needs = getattr(self, f.name), f.metadata.get("needs", {})
            is_set = ANY in needs and value not in f.metadata["neutral"]
            for need in needs.get(ANY if is_set else value, ()):
                other = self.effective(need.name)
                if not need.holds(other):
                    given = f"without {need.name}" if other is None else f"with {need.name}={other}"
                    raise ConfigError(f"{f.name}={value} {given}: allowed: {need}")

    def effective(self, name: str) -> Any:
        """Returns the value of a flag, with the default that other flags give it."""
        return getattr(self, name)

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Returns flags together with the flags that they imply; all values are text."""
        return dict(flags)


def without(arguments: Sequence[str], name: str) -> list[str]:
    """Returns a command's arguments without a flag and its value, in every form that is read:
    --name=…, --name …, and with hyphens."""
    kept, was_flag = list[str](), False
    for word in arguments:
        flag, is_value, was_flag = word.lstrip("-"), was_flag, False
        if word.startswith("-") and flag.partition("=")[0].replace("-", "_") == name:
            was_flag = "=" not in flag
        elif not is_value or word.startswith("--"):
            kept.append(word)
    return kept


def read(
    arguments: Sequence[str], known: Collection[str], positional: Sequence[str] = ()
) -> dict[str, str]:
    """Returns a command's flags as text, read by fire: --name=value, --name value or --noname.

    positional: the flags that words without -- give, in order. fire would call a command with its
    defaults before it reports an unknown flag, so the command that it calls takes any flag, and
    parse_into refuses them. Raises ConfigError for a word that is no flag.
    """
    import fire
    from fire.decorators import SetParseFn

    @SetParseFn(str)  # type: ignore[untyped-decorator]
    def command(*words: str, **flags: str) -> dict[str, str]:
        for name in [n for n in flags if n not in known and n.startswith("no") and n[2:] in known]:
            flags[name[2:]] = str(flags.pop(name) != "True")
        free = [name for name in positional if name not in flags]
        if len(words) > len(free):
            raise ConfigError(f"{words[-1]!r} is not a flag: write --name=value")
        return {**flags, **dict(zip(free, words, strict=False))}

    if stray := {"-", "--"} & set(arguments):  # fire would take what follows for itself
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    given = fire.Fire(command, command=list(arguments), name="mpissd", serialize=lambda _: None)
    return dict(given)


def parse_into(kind: type[Config], flags: Mapping[str, str]) -> Config:
    """Makes a validated configuration of this kind, with those it contains, from flags as text."""
    known = flags_of(kind)
    texts = {}
    for name, text in flags.items():
        if name not in known:
            raise unknown("flag", f"--{name}", (f"--{n}" for n in known))
        texts[name] = str(text)
    values = {
        name: known[name].metadata["parse"](name, text)
        for name, text in kind.completed(texts).items()
    }
    return _filled(kind, values)


def _filled(kind: type[Config], values: Mapping[str, Any]) -> Config:
    """Makes a configuration from typed values, putting each into the configuration that has its
    flag."""
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    arguments = {f.name: values[f.name] for f in fields if f.name in values}
    for f in fields:
        if flags := f.metadata.get("flags"):
            inner = {name: values.get(name, known.default) for name, known in flags.items()}
            held = f.metadata["contains"]
            is_unchecked = f.metadata["is_unchecked"]
            arguments[f.name] = unchecked(held, **inner) if is_unchecked else held(**inner)
    return kind(**arguments)


def unchecked(kind: type[Config], **values: Any) -> Config:
    """Makes a configuration whose combination of values is not checked."""
    made = kind.__new__(kind)
    for f in dataclasses.fields(kind):  # type: ignore[arg-type]
        object.__setattr__(made, f.name, values.get(f.name, f.default))
    return made
