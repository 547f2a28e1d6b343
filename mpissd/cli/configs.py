"""The configurations of commands that read rows and profiles, typed and checked like RunConfig."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, contained, flag, flags_of, integer, words

_ONE_GROUP = frozenset(flags_of(RunConfig)) - {"groups"}


@dataclass(frozen=True)
class ProbeConfig(Checked):
    """Flags of `probe`: a run's flags (mode=ar: no draft), and the profile's name."""

    run: RunConfig = contained(RunConfig, only=_ONE_GROUP)
    name: str | None = flag(
        None, words, "name of the profile (default: made of device, T and pair)"
    )

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds mode=sd to num_drafts=0, the one mode whose draft needs no rank."""
        completed = super().completed(flags)
        return {"mode": "sd", **completed} if flags.get("num_drafts") == "0" else completed


PLANNED = (  # flags of a run that apply to every configuration that `plan` weighs
    "pair",
    "alpha",
    "acceptance",
    "acceptance_fast",
    "p_hit",
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
    """Flags of `plan`: the device profile and the number of GPUs, or one configuration, or rows."""

    profile: str | None = flag(
        None,
        words,
        "device profile: a name or a file (default: h100; with rows: several, separated by commas, "
        "default: of each row's device)",
    )
    gpus: int = flag(2, integer(1), "largest number of GPUs to use")
    run: RunConfig = contained(
        RunConfig,
        mode=flag("ssd", choice("ar", "sd", "ssd"), "predict the configuration of these flags"),
    )
    tp: int | None = flag(None, integer(1), "with mode: target ranks (default: 1)")
    rows: str | None = flag(
        None,
        words,
        "folders or runs.jsonl, separated by commas: prints the errors of predicting their rows",
    )
    host: str | None = flag(
        None, words, "with rows: a run's profile that gives the host costs (default: the profile)"
    )

    @property
    def device(self) -> str:
        """The profile of an advice or a prediction."""
        return self.profile or "h100"

    def check(self) -> None:
        """Refuses contradictory flags; raises ConfigError."""
        super().check()
        if self.host is not None and self.rows is None:
            raise ConfigError(f"host={self.host} without rows: allowed: with rows")
        if self.run.groups > 1 and self.rows is not None:
            raise ConfigError(f"groups={self.run.groups} with rows: allowed: without rows")


@dataclass(frozen=True)
class CompareConfig(Checked):
    """Flags of `compare`: the results, and what to show of them."""

    a: str | None = flag(
        None, words, "a run id in OUT, a runs.jsonl or a folder; best, claims: several, by commas"
    )
    b: str | None = flag(None, words, "second result of a pair (default: A has two configurations)")
    show: str | None = flag(
        None,
        choice("pair", "best", "claims", "tables", "why"),
        "pair: B over A; best: the fastest method; claims: SSD over the strongest other use of its "
        "GPUs; tables: the milestone report's; why: the gaps between a row and its floor "
        "(default: pair where there are two configurations, else best)",
    )
    out: str = flag("out", words, "folder in which run ids are searched, with its subfolders")

    def check(self) -> None:
        """Refuses contradictory flags; raises ConfigError."""
        super().check()
        if self.b is not None and self.show not in (None, "pair"):
            raise ConfigError(f"b={self.b} with show={self.show}: allowed: with show=pair")
