"""The configurations of commands that read rows and profiles, typed and checked like RunConfig."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, contained, flag, flags_of, integer, words
from mpissd.common.schedules import SCHEDULES

_ONE_GROUP = frozenset(flags_of(RunConfig)) - {"groups"}


@dataclass(frozen=True)
class ProbeConfig(Checked):
    """Flags of `probe`: those of a run (mode=ar: no draft), and the profile's name."""

    run: RunConfig = contained(RunConfig, only=_ONE_GROUP)
    name: str | None = flag(
        None, words, "name of the profile (default: made of device, T and pair)"
    )


@dataclass(frozen=True)
class PredictConfig(Checked):
    """Flags of `predict`: those of a run, T, and the profile to predict from."""

    run: RunConfig = contained(RunConfig)
    profile: str | None = flag(
        None,
        words,
        "profile of a job (OUT/profiles/RUN_ID.json) or of a device (a name or a file; with rows: "
        "several, separated by commas)",
    )
    tp: int | None = flag(None, integer(1), "target ranks (default: the job's, else 1)")
    rows: str | None = flag(
        None,
        words,
        "folders or runs.jsonl, separated by commas: prints the errors of predicting their rows",
    )
    host: str | None = flag(
        None, words, "with rows: a run's profile that gives the host costs (default: the profile)"
    )

    def check_host(self) -> None:
        """Refuses --host without --rows."""
        if self.host is not None and self.rows is None:
            raise ConfigError(f"host={self.host} without rows: allowed: with rows")

    def check_groups(self) -> None:
        """Refuses several groups with --rows, whose rows say their groups."""
        if self.run.groups > 1 and self.rows is not None:
            raise ConfigError(f"groups={self.run.groups} with rows: allowed: without rows")

    def check_schedule(self) -> None:
        """Refuses --schedule, because flags that are not given are taken from the profile."""
        if self.run.schedule is not None:
            name = self.run.schedule
            flags = " ".join(f"{name}={text}" for name, text in SCHEDULES[name].items())
            raise ConfigError(f"schedule={name} with predict: allowed: its flags, {flags}")


_PLANNED = (
    "pair",
    "alpha",
    "acceptance",
    "acceptance_fast",
    "p_hit",
    "hit_a",
    "hit_r",
    "hit_law",
    "laws",
    "lookup",
    "batch_size",
    "forward",
    "fuse",
    "lm_head",
    "context",
)


@dataclass(frozen=True)
class PlanConfig(Checked):
    """Flags of `plan`: the laws, the device profile, and the number of GPUs."""

    profile: str = flag("h100", words, "device profile: a name or a file")
    gpus: int = flag(2, integer(1), "largest number of GPUs to use")
    run: RunConfig = contained(RunConfig, only=_PLANNED)


@dataclass(frozen=True)
class WhyConfig(Checked):
    """Flags of `why`: the result whose gaps to its floor are shown."""

    result: str | None = flag(
        None, words, "result to explain: a run id in OUT, a runs.jsonl or a folder (default: OUT)"
    )
    out: str = flag("out", words, "folder in which run ids are searched, with its subfolders")


@dataclass(frozen=True)
class CompareConfig(Checked):
    """Flags of `compare`: the two results to compare."""

    a: str | None = flag(
        None, words, "first result: a run id in OUT, or the last row of a runs.jsonl or a folder"
    )
    b: str | None = flag(
        None, words, "second result (default: A is a folder of two configurations)"
    )
    out: str = flag("out", words, "folder in which run ids are searched, with its subfolders")


@dataclass(frozen=True)
class TablesConfig(Checked):
    """Flags of `tables`: the folder or file of rows."""

    results: str | None = flag(None, words, "folder or runs.jsonl (default: results and out)")
