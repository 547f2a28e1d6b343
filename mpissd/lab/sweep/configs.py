"""The configuration of the command `sweep`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpissd.common.config import RunConfig, with_text
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, contained, flag, integer, switch, words


@dataclass(frozen=True)
class SweepConfig(Checked):
    """The configuration of `sweep`: a grid, and the flags of a run that all its points share."""

    run: RunConfig = contained(RunConfig, is_unchecked=True)
    grid: str | None = flag(
        None, words, "configurations: a file, or flag=value,value; flag=FIRST..LAST; …"
    )
    repeats: int = flag(
        3,
        integer(1, 1000),
        "measurements of every configuration, each round of them in another order",
    )
    shard: str = flag("1/1", words, "I/N: every N-th configuration from the I-th on (job arrays)")
    retry: bool = flag(False, switch, "repeat configurations that failed or were flagged before")

    def check(self) -> None:
        """Refuses a sweep without a grid, and flags of single runs.

        Contradictions of its other flags are refused with each configuration that has them.
        """
        super().check()
        if self.grid is None:
            raise ConfigError("grid: needed: a file, or flag=value,value; flag=…")
        if self.run.trace:
            raise ConfigError("trace with sweep: allowed: with run, of one configuration")
        if self.run.on_draft_loss != "abort":
            raise ConfigError(f"on_draft_loss={self.run.on_draft_loss} with sweep: allowed: abort")
        self.shard_of  # noqa: B018  (raises a wrong shard before MPI starts)

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags implied by a prompt, or a pair with weights."""
        return with_text(super().completed(flags))

    @property
    def shard_of(self) -> tuple[int, int]:
        """The shard (I, N), with 1 <= I <= N."""
        first, _, count = self.shard.partition("/")
        shard = (int(first), int(count)) if first.isdigit() and count.isdigit() else (0, 0)
        if not 1 <= shard[0] <= shard[1]:
            raise ConfigError(f"shard={self.shard}: allowed: I/N with 1 <= I <= N")
        return shard
