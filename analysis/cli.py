"""The command line, by fire. A command only *returns* what is to be done; __main__ then does it.

fire calls a function with its defaults before it complains about a flag that it doesn't know, so
every command takes whatever comes and checks it itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable

import fire
from fire.decorators import SetParseFn

from analysis.figures import FIGURES
from analysis.style import FORMATS
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import Checked, documented, flag, integer, parse_into, words

OTHERS = {
    "all": "Every figure of every machine for which there are rows.",
    "report": "One HTML page: figures, tables, provenance, and the numbers behind each figure.",
}


def formats(name: str, text: str) -> str:
    """Parses known formats with commas between."""
    for kind in words(name, text).split(","):
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return text


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """The flags, the same of every figure."""

    results: str = flag("results", words, "folders (every runs*.jsonl below) and files, by commas")
    out: str = flag("figures", words, "where the files go")
    device: str | None = flag(
        None,
        words,
        "device_name of the rows (default of a figure: GPUs, emulated ones, CPUs; most rows first)",
    )
    formats: str = flag(",".join(FORMATS), formats, "png,pdf,svg or some of them")
    workers: int = flag(2, integer(1, 64), "processes (all)")

    @property
    def paths(self) -> list[str]:
        """The results as paths."""
        return [path for path in self.results.split(",") if path]

    @property
    def kinds(self) -> list[str]:
        """The formats, each known."""
        return self.formats.split(",")


@dataclasses.dataclass(frozen=True)
class Plan(Options):
    """What to do, and how."""

    what: str = ""


def _command(what: str, about: str) -> Callable[..., Plan]:
    """A function for fire that takes the options."""

    def collect(*words: str, **flags: str) -> Plan:
        if words:
            raise ConfigError(f"{words[-1]!r} is not a flag: write --name=value")
        return checked(what, flags)

    command: Callable[..., Plan] = documented(SetParseFn(str)(collect), about, Options)
    return command


def checked(what: str, flags: dict[str, str]) -> Plan:
    """Flags as text → a plan. ConfigError: an unknown flag or format, a value that can't be."""
    return Plan(**dataclasses.asdict(parse_into(Options, flags)), what=what)


COMMANDS = {
    **{name: _command(name, spec.about.capitalize() + ".") for name, spec in FIGURES.items()},
    **{name: _command(name, about) for name, about in OTHERS.items()},
}


def parse(arguments: list[str]) -> Plan:
    """Returns the plan that the arguments name.

    Help goes to stdout and ends with SystemExit(0). Raises ConfigError: an unknown figure or flag,
    a value that can't be.
    """
    command = [name for name in arguments[:1] if name not in ("-h", "--help", "--")]
    if command and command[0] not in COMMANDS:
        raise unknown("figure", command[0], COMMANDS)
    if not arguments or {"-h", "--help"} & set(arguments):
        with contextlib.redirect_stderr(sys.stdout):  # fire writes help to stderr
            fire.Fire(COMMANDS, command=[*command, "--", "--help"], name="analysis")
    if stray := {"-", "--"} & set(arguments):  # fire would take what follows for itself
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    found = fire.Fire(COMMANDS, command=arguments, name="analysis", serialize=lambda _: None)
    assert isinstance(found, Plan), found
    return found
