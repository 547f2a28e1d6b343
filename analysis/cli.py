"""The command line, by fire. Commands only *return* a plan, which __main__ then executes.

fire calls a function with its defaults before it reports an unknown flag, so every command accepts
any flag and checks it itself.
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
from mpissd.common.flags import Checked, flag, integer, parse_into, words
from mpissd.common.manual import manual, signed

OTHERS = {
    "all": "Every figure of every machine for which there are rows.",
    "report": "One HTML page: figures, tables, provenance, and the numbers behind each figure.",
}


def formats(name: str, text: str) -> str:
    """Parses a comma-separated list of known formats; raises ConfigError otherwise."""
    for kind in words(name, text).split(","):
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return text


@dataclasses.dataclass(frozen=True)
class Options(Checked):
    """The flags, which are the same for every figure."""

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
        """The paths of the results."""
        return [path for path in self.results.split(",") if path]

    @property
    def kinds(self) -> list[str]:
        """The file formats, all known."""
        return self.formats.split(",")


@dataclasses.dataclass(frozen=True)
class Plan(Options):
    """What to draw (a figure, "all" or "report"), with its flags."""

    what: str = ""


def _command(what: str) -> Callable[..., Plan]:
    """Returns a function for fire that takes the options and returns a plan."""

    def collect(*words: str, **flags: str) -> Plan:
        if words:
            raise ConfigError(f"{words[-1]!r} is not a flag: write --name=value")
        return checked(what, flags)

    command: Callable[..., Plan] = signed(SetParseFn(str)(collect), Options)
    return command


def checked(what: str, flags: dict[str, str]) -> Plan:
    """Makes a plan from flags as text; raises ConfigError for an unknown flag or format, or a bad
    value."""
    return Plan(**dataclasses.asdict(parse_into(Options, flags)), what=what)


ABOUT = {
    **{name: f"{spec.about[0].upper()}{spec.about[1:]}." for name, spec in FIGURES.items()},
    **OTHERS,
}
COMMANDS = {name: _command(name) for name in ABOUT}


def parse(arguments: list[str]) -> Plan:
    """Returns the plan that the arguments name.

    Help goes to stdout and ends with SystemExit(0). Raises ConfigError for an unknown figure or
    flag, or a bad value.
    """
    command = [name for name in arguments[:1] if name not in ("-h", "--help", "--")]
    if command and command[0] not in COMMANDS:
        raise unknown("figure", command[0], COMMANDS)
    if not arguments or {"-h", "--help"} & set(arguments):
        manuals = {name: manual(about, Options) for name, about in ABOUT.items()}
        with contextlib.redirect_stderr(sys.stdout):  # fire writes help to stderr.
            fire.Fire(manuals, command=[*command, "--", "--help"], name="analysis")
    # fire would interpret the arguments after these itself.
    if stray := {"-", "--"} & set(arguments):
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    plan = fire.Fire(COMMANDS, command=arguments, name="analysis", serialize=lambda _: None)
    assert isinstance(plan, Plan), plan
    return plan
