"""The command line, by fire. A command only *returns* what is to be done; main then does it.

fire calls a command with its defaults before it complains about a flag it doesn't know, so every
command takes whatever comes and checks it itself: a mistyped flag is one line with a did-you-mean.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import fire
from fire.decorators import SetParseFn

from mpissd.config import RunConfig, parse_flags
from mpissd.errors import ConfigError, unknown


@dataclasses.dataclass(frozen=True)
class Command:
    """A validated request: which command, with what."""

    name: str
    config: RunConfig


def _run(*words: str, **flags: str) -> Command:
    if words:
        raise ConfigError(f"{words[0]!r} is not a flag: write --name=value")
    return Command("run", parse_flags(flags))


def _documented(function: Callable[..., Command], about: str) -> Callable[..., Command]:
    """Gives a command the flags of RunConfig as its signature and help."""
    fields = dataclasses.fields(RunConfig)
    keyword = inspect.Parameter.KEYWORD_ONLY
    flags = [inspect.Parameter(f.name, keyword, default=f.default) for f in fields]
    words = inspect.Parameter("words", inspect.Parameter.VAR_POSITIONAL)
    others = inspect.Parameter("flags", inspect.Parameter.VAR_KEYWORD)
    documented: Any = SetParseFn(str)(function)
    documented.__signature__ = inspect.Signature([words, *flags, others])
    lines = "\n".join(f"    {f.name}: {f.metadata['help']}" for f in fields)
    documented.__doc__ = f"{about}\n\nArgs:\n{lines}\n"
    command: Callable[..., Command] = documented
    return command


COMMANDS = {
    "run": _documented(_run, "Runs one configuration; the last line of stdout is its JSON row."),
}


def parse(arguments: list[str]) -> Command | None:
    """The command that the arguments name; None where fire showed help.

    Raises ConfigError: an unknown command or flag, a value of the wrong type.
    """
    command = [name for name in arguments[:1] if name not in ("-h", "--help", "--")]
    if command and command[0] not in COMMANDS:
        raise unknown("command", command[0], COMMANDS)
    if not arguments or {"-h", "--help"} & set(arguments):
        arguments = [*command, "--", "--help"]
    elif stray := {"-", "--"} & set(arguments):  # fire would take what follows for itself
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    found = fire.Fire(COMMANDS, command=arguments, name="mpissd", serialize=lambda _: None)
    return found if isinstance(found, Command) else None
