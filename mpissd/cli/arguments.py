"""The command line, read by fire: a command returns a request, which main then carries out.

fire would call a command with its defaults before it reports an unknown flag. Every command
therefore accepts any flag and checks it itself: a mistyped one gives one line with a suggestion.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import fire
from fire.decorators import SetParseFn

from mpissd.cli.configs import (
    CompareConfig,
    PlanConfig,
    ProbeConfig,
)
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import flags_of, parse_into
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.pair.config import PairConfig
from mpissd.lab.sweep.configs import SweepConfig
from mpissd.learn.config import DistillConfig
from mpissd.ops.doctor import DoctorConfig
from mpissd.serve.config import ChatConfig, ReplicasConfig, ServeConfig


@dataclasses.dataclass(frozen=True)
class Command:
    """A validated request: the command's name and its configuration."""

    name: str
    config: Any
    given: frozenset[str] = frozenset()  # the flags that the user gave

    @property
    def run(self) -> RunConfig:
        """The run's configuration, or its defaults for a command that has none."""
        if isinstance(self.config, RunConfig):
            return self.config
        return getattr(self.config, "run", None) or RunConfig()


@dataclasses.dataclass(frozen=True)
class Spec:
    """Description of a command: its configuration class, help, and positional flags."""

    config: type
    about: str
    words: tuple[str, ...] = ()  # the flags that arguments without -- give, in order


SPECS = {
    "run": Spec(RunConfig, "Runs one configuration; the last line of stdout is its JSON row."),
    "chat": Spec(ChatConfig, "Talks to a model in the terminal; starts its ranks by itself."),
    "serve": Spec(ServeConfig, "Serves a model over HTTP; starts its ranks by itself."),
    "replicas": Spec(
        ReplicasConfig, "Lists the servers of a folder; makes HAProxy's file of them.", ("folder",)
    ),
    "load": Spec(LoadConfig, "Sends requests to a server as they arrive; takes their times."),
    "probe": Spec(ProbeConfig, "Measures what this machine gives a pair; saves a device profile."),
    "doctor": Spec(DoctorConfig, "Examines this machine for a run; exit code 0 where it works."),
    "sweep": Spec(SweepConfig, "Runs many configurations in one job; resumes what was cut short."),
    "plan": Spec(PlanConfig, "Advises how to run on given GPUs; with mode, predicts a run."),
    "compare": Spec(
        CompareConfig,
        "Compares results: a pair, the best methods, claims, tables, gaps.",
        ("a", "b"),
    ),
    "pair": Spec(
        PairConfig,
        "Records a real pair for --workload=replay, or measures its laws for --laws.",
        ("sources",),
    ),
    "distill": Spec(DistillConfig, "Makes a draft of a target from what the target itself writes."),
}


def _command(name: str, spec: Spec) -> Callable[..., Command]:
    """Returns a function that fire calls with the words and flags of a command."""

    @SetParseFn(str)  # type: ignore[untyped-decorator]
    def command(*words: str, **flags: str) -> Command:
        names = [name for name in spec.words if name not in flags]
        if len(words) > len(names):
            raise ConfigError(f"{words[-1]!r} is not a flag: write --name=value")
        given = {**flags, **dict(zip(names, words, strict=False))}
        return Command(name, parse_into(spec.config, given), frozenset(given))

    return command  # type: ignore[no-any-return]


_RETIRED = {  # what takes the place of a retired command
    "predict": "plan --mode=ar|sd|ssd, or plan --rows=FOLDER",
    **dict.fromkeys(("record", "laws"), "pair"),
    **{name: f"compare --show={name}" for name in ("best", "claims", "tables", "why")},
    "bench-gpu": "make bench-gpu",
}
_ON_A_BACKEND = ("run", "chat", "serve", "probe", "doctor", "sweep")
COMMANDS = {name: _command(name, spec) for name, spec in SPECS.items()}


def parse(arguments: list[str]) -> Command:
    """Returns the command that the arguments name.

    Help goes to stdout and ends with SystemExit(0). Raises ConfigError: an unknown command or flag,
    a value of the wrong type, a device that would not be emulated.
    """
    command = [name for name in arguments[:1] if name not in ("-h", "--help", "--")]
    if command and command[0] not in COMMANDS:
        if command[0] in _RETIRED:
            raise ConfigError(f"{command[0]} is retired: instead: {_RETIRED[command[0]]}")
        raise unknown("command", command[0], COMMANDS)
    if not arguments or {"-h", "--help"} & set(arguments):
        print("\n".join(_help_of(command[0]) if command else _help()))
        sys.exit(0)
    if stray := {"-", "--"} & set(arguments):  # fire would take what follows for itself
        raise ConfigError(f"{min(stray)!r} is not a flag: write --name=value")
    request = fire.Fire(COMMANDS, command=arguments, name="mpissd", serialize=lambda _: None)
    if request.name in _ON_A_BACKEND and "device" in request.given:
        backend = request.run.backend
        if backend != "emulated":  # it would change nothing
            device = f"device={request.run.device} with backend={backend}"
            raise ConfigError(f"{device}: allowed: backend=emulated")
    return cast(Command, request)


def _help() -> Iterator[str]:
    yield "python -m mpissd COMMAND [--flag=value …]; COMMAND --help lists its flags"
    yield from (f"  {name:9} {spec.about}" for name, spec in SPECS.items())


def _help_of(name: str) -> Iterator[str]:
    """Yields a command's help: its words, and each flag with its default."""
    spec = SPECS[name]
    yield " ".join(
        ["python -m mpissd", name, *(f"[{w.upper()}]" for w in spec.words), "[--flag …]"]
    )
    yield f"  {spec.about}"
    for flag, known in flags_of(spec.config).items():
        default = "" if known.default is None else f"={known.default}"
        yield f"  --{flag}{default}\n      {known.metadata['help']}"
    yield from (f"  {word.upper()} is the value of --{word}" for word in spec.words)
