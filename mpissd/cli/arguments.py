"""Parses the command line: the commands, their flags, and their help."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import (
    Checked,
    choice,
    contained,
    flag,
    flags_of,
    integer,
    parse_into,
    read,
    switch,
    words,
)
from mpissd.common.ranks import DraftConfig
from mpissd.common.workloads import imported
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.pair.config import PairConfig
from mpissd.lab.sweep.plan import SweepConfig
from mpissd.learn.config import DistillConfig
from mpissd.ops.doctor import DoctorConfig
from mpissd.serve.config import ChatConfig, ReplicasConfig, ServeConfig

_ONE_GROUP = frozenset(flags_of(RunConfig)) - {
    "groups",
    "tree_shape",
    "draft_backend",
    "shard_draft",
}


def _file_name(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,119}", words(name, text)):
        allowed = "letters, digits and ._@+- (at most 120), a letter or digit first"
        raise ConfigError(f"{name}={text!r}: allowed: {allowed}")
    return text


@dataclass(frozen=True)
class ProbeConfig(Checked):
    """Flags of `probe`: those of a run (mode=ar for no draft), and the saved profile's name."""

    run: RunConfig = contained(RunConfig, only=_ONE_GROUP)
    name: str | None = flag(
        None, _file_name, "name of the profile (default: made of device, T and pair)"
    )
    brief: bool = flag(
        False,
        switch,
        "measure a transformer for a plan of its T and batch size only: at two contexts, without "
        "larger batches and other T",
    )

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds mode=sd if num_drafts=0: only sd can draft without a draft rank."""
        completed = super().completed(flags)
        return {"mode": "sd", **completed} if flags.get("num_drafts") == "0" else completed


PLANNED = (  # flags of a run that hold for every configuration that `plan` compares
    "pair target draft alpha acceptance acceptance_fast p_hit hit_law laws lookup batch_size "
    "forward fuse lm_head context".split()
)


@dataclass(frozen=True)
class PlanConfig(Checked):
    """Flags of `plan`, which advises how to run on some GPUs of one kind, or predicts one run."""

    profile: str | None = flag(
        None,
        words,
        "device profile: a name or a file, or several of one device, separated by commas (default: "
        "h100)",
    )
    gpus: int = flag(2, integer(1), "most GPUs to use")
    link: str | None = flag(
        None,
        words,
        "the link to the last GPU, if that is on another host: shm, nvlink, pcie, ib, 100g, 25g, "
        "10g, or its one-way latency and GB/s as 500us:1.2",
    )
    trees: bool = flag(
        True, switch, "weigh trees as well, of up to 16 drafted tokens (sd) or 12 (ssd)"
    )
    details: bool = flag(
        False, switch, "print every use, the assumptions, and the source of each derived time"
    )
    run: RunConfig = contained(
        RunConfig,
        only=_ONE_GROUP,
        mode=flag("ssd", choice("ar", "sd", "ssd"), "predict the configuration of these flags"),
        lm_head=flag(True, switch, "with the LM head; run needs --lm_head for the same"),
    )
    tp: int | None = flag(None, integer(1), "with mode: target ranks (default: 1)")
    measured: str = flag(
        "results,out",
        words,
        "folders of rows: those of the planned case are shown next to the predictions",
    )

    @property
    def device(self) -> str:
        return self.profile or "h100"


@dataclass(frozen=True)
class CompareConfig(Checked):
    """Flags of `compare`: one or two results, and the folder to look in."""

    a: str | None = flag(
        None,
        words,
        "a run id in OUT, a runs.jsonl or a folder: of two configurations one over the other is "
        "shown, else the fastest methods; several, by commas (default: OUT): the fastest methods",
    )
    b: str | None = flag(None, words, "second result: B over A is shown")
    out: str = flag("out", words, "folder in which run ids are searched, with its subfolders")


class Spec(NamedTuple):
    """A command's configuration class and help text."""

    config: type[Checked]
    about: str
    words: tuple[str, ...] = ()  # the flags whose values are the arguments without --


SPECS = {
    "run": Spec(RunConfig, "Runs one configuration; the last line of a pipe is its JSON row."),
    "chat": Spec(ChatConfig, "Talks to a model in the terminal; starts its ranks by itself."),
    "serve": Spec(ServeConfig, "Serves a model over HTTP; starts its ranks by itself."),
    "replicas": Spec(
        ReplicasConfig, "Lists the servers of a folder; makes HAProxy's file of them.", ("folder",)
    ),
    "load": Spec(LoadConfig, "Sends requests to a server as they arrive; takes their times."),
    "draft": Spec(DraftConfig, "Drafts for vLLM or another engine over a socket."),
    "probe": Spec(ProbeConfig, "Measures what this machine gives a pair; saves a device profile."),
    "doctor": Spec(DoctorConfig, "Examines this machine for a run; exit code 0 where it works."),
    "sweep": Spec(SweepConfig, "Runs many configurations in one job; resumes what was cut short."),
    "plan": Spec(PlanConfig, "Advises how to run on given GPUs; with mode, predicts a run."),
    "compare": Spec(CompareConfig, "Compares results: a pair, or the best methods.", ("a", "b")),
    "pair": Spec(
        PairConfig,
        "Records a real pair for --workload=replay, or measures its laws for --laws.",
        ("sources",),
    ),
    "distill": Spec(DistillConfig, "Makes a draft of a target from what the target itself writes."),
}


_ON_A_BACKEND = ("run", "chat", "serve", "probe", "doctor", "sweep")


@dataclass(frozen=True)
class Command:
    """A parsed command line. given: the names of the flags that it gave."""

    name: str
    config: Any
    given: frozenset[str] = frozenset()

    @property
    def run(self) -> RunConfig:
        """The configuration of the command's run; that of the default flags if it has none."""
        if isinstance(self.config, RunConfig):
            return self.config
        return getattr(self.config, "run", None) or RunConfig()


def parse(arguments: Sequence[str]) -> Command:
    """Parses the arguments, of which the first is a command. Prints help or versions and raises
    SystemExit(0) if they ask for it. Raises ConfigError for an unknown command, a wrong flag or
    value, or a --device where no device is emulated."""
    if list(arguments) in (["--version"], ["version"]):
        print("\n".join(imported("mpissd.cli.version:lines")()))
        sys.exit(0)
    name = next((word for word in arguments[:1] if word not in ("-h", "--help", "--")), None)
    if name is not None and name not in SPECS:
        raise unknown("command", name, SPECS)
    if not arguments or {"-h", "--help"} & set(arguments):
        print("\n".join(_help() if name is None else _help_of(name)))
        sys.exit(0)
    if name is None:
        raise ConfigError(f"{arguments[0]!r} is not a flag: write --name=value")
    spec = SPECS[name]
    given = read(arguments[1:], flags_of(spec.config), spec.words)
    command = Command(name, parse_into(spec.config, given), frozenset(given))
    if name in _ON_A_BACKEND and "device" in given and command.run.backend != "emulated":
        device = f"device={command.run.device} with backend={command.run.backend}"
        raise ConfigError(f"{device}: allowed: backend=emulated")  # --device would have no effect
    return command


def _help() -> Iterator[str]:
    yield "python -m mpissd COMMAND [--flag=value …]; COMMAND --help lists its flags"
    yield from (f"  {name:9} {spec.about}" for name, spec in SPECS.items())
    yield "  --version Prints the versions of mpissd and its libraries."


def _help_of(name: str) -> Iterator[str]:
    """Yields a command's help: its usage, its purpose, and each flag with its default."""
    spec = SPECS[name]
    places = [f"[{word.upper()}]" for word in spec.words]
    yield " ".join(["python -m mpissd", name, *places, "[--flag …]"])
    yield f"  {spec.about}"
    for flag_name, field in flags_of(spec.config).items():
        default = "" if field.default is None else f"={field.default}"
        yield f"  --{flag_name}{default}\n      {field.metadata['help']}"
    yield from (f"  {word.upper()} is the value of --{word}" for word in spec.words)
