"""The command line, by fire. A command only *returns* what is to be done; __main__ then does it.

fire calls a function with its defaults before it complains about a flag that it doesn't know, so
every command takes whatever comes and checks it itself.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import fire
from fire.decorators import SetParseFn

from analysis.figures import FIGURES
from analysis.style import FORMATS
from mpissd.errors import ConfigError, unknown

OTHERS = {
    "all": "Every figure of every machine for which there are rows.",
    "report": "One HTML page: figures, tables, provenance, and the numbers behind each figure.",
}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to do. results: files and folders, with commas between; device: None is the measured
    machine with most rows; formats: of the saved figures; workers: processes."""

    what: str
    results: str = "results"
    out: str = "figures"
    device: str | None = None
    formats: str = ",".join(FORMATS)
    workers: int = 2

    @property
    def paths(self) -> list[str]:
        """The results as paths."""
        return [path for path in self.results.split(",") if path]

    @property
    def kinds(self) -> list[str]:
        """The formats, each known."""
        return self.formats.split(",")


_HELP = {
    "results": "folders (every runs*.jsonl below) and files, with commas between",
    "out": "where the files go",
    "device": "device_name of the rows (default: measured before emulated, then most rows)",
    "formats": "png,pdf,svg or some of them",
    "workers": "processes (all)",
}


def _command(what: str, about: str) -> Callable[..., Plan]:
    """A function for fire whose signature and help are the plan's fields."""

    def collect(*words: str, **flags: str) -> Plan:
        if words:
            raise ConfigError(f"{words[-1]!r} is not a flag: write --name=value")
        return checked(what, flags)

    fields = [f for f in dataclasses.fields(Plan) if f.name != "what"]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("words", inspect.Parameter.VAR_POSITIONAL),
        *(inspect.Parameter(f.name, keyword, default=f.default) for f in fields),
        inspect.Parameter("flags", inspect.Parameter.VAR_KEYWORD),
    ]
    documented: Any = SetParseFn(str)(collect)
    documented.__signature__ = inspect.Signature(parameters)
    lines = "\n".join(f"    {f.name}: {_HELP[f.name]}" for f in fields)
    documented.__doc__ = f"{about}\n\nArgs:\n{lines}\n"
    command: Callable[..., Plan] = documented
    return command


def checked(what: str, flags: dict[str, str]) -> Plan:
    """Flags as text → a plan. ConfigError: an unknown flag or format, an empty value."""
    for name, value in flags.items():
        if name not in _HELP:
            raise unknown("flag", f"--{name}", (f"--{n}" for n in _HELP))
        if str(value) in ("", "True"):
            raise ConfigError(f"{name}: needs a value")
    values: dict[str, Any] = {name: str(value) for name, value in flags.items()}
    if "workers" in values:
        if values["workers"] not in map(str, range(1, 65)):
            raise ConfigError(f"workers={values['workers']}: allowed: a whole number in [1, 64]")
        values["workers"] = int(values["workers"])
    plan = Plan(what, **values)
    for kind in plan.kinds:
        if kind not in FORMATS:
            raise unknown("format", kind, FORMATS)
    return plan


COMMANDS = {
    **{name: _command(name, spec.about.capitalize() + ".") for name, spec in FIGURES.items()},
    **{name: _command(name, about) for name, about in OTHERS.items()},
}


def parse(arguments: list[str]) -> Plan | None:
    """The plan that the arguments name; None where fire showed help.

    Raises ConfigError: an unknown figure or flag, a value that can't be.
    """
    command = [name for name in arguments[:1] if name not in ("-h", "--help", "--")]
    if command and command[0] not in COMMANDS:
        raise unknown("figure", command[0], COMMANDS)
    if not arguments or {"-h", "--help"} & set(arguments):
        arguments = [*command, "--", "--help"]
    elif stray := {"-", "--"} & set(arguments):  # fire would take what follows for itself
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    found = fire.Fire(COMMANDS, command=arguments, name="analysis", serialize=lambda _: None)
    return found if isinstance(found, Plan) else None
