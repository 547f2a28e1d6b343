"""Flags of the commands whose models answer text, and the command line that starts MPI ranks."""

import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING

from mpissd.common.config import RunConfig, with_measured, with_text
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, choice, contained, flag, flags_of, integer, words
from mpissd.common.workloads import readers

_PR_SET_PDEATHSIG = 1
_MEASURED = (
    "prompt prompts prompt_ids batch_size rounds warmup_rounds trace dry_run out progress beside "
    "beside_s json on_draft_loss num_drafts groups chat_template workload grammar tree_shape "
    "shard_draft"
).split()
# Flags of `run` that all commands which answer text have, too: models, methods, sampling.
ANSWERING = frozenset(
    name
    for name, field in flags_of(RunConfig).items()
    if name not in _MEASURED and "text" in readers(name, field.metadata["workloads"])
)


@dataclass(frozen=True)
class TextFlags(Checked):
    """The base class of the flags of `chat`, `serve` and `draft`, whose models answer text."""

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds pair=smollm2 if the flags name no model, and that pair's measured K and fan-out."""
        return with_measured(with_text({"workload": "text", **super().completed(flags)}))


@dataclass(frozen=True)
class DraftConfig(TextFlags):
    """Flags of `draft`, which drafts for another engine: its models, rounds and socket."""

    run: RunConfig = contained(
        RunConfig,
        only="pair target draft mode lookahead fan_out backup backup_lookahead lookup batch_size "
        "context backend graph deadline_s workload parallel_drafting".split(),
        mode=flag("ssd", choice("sd", "ssd"), "sd: drafts only when asked; ssd: also ahead"),
        workload=flag("text", choice("text"), "what draft drafts"),
    )
    socket: str = flag("mpissd.sock", words, "Unix socket, or tcp://HOST:PORT; fd:N: inherited")


@dataclass(frozen=True)
class RanksFlags(TextFlags):
    """The base of the flags of `chat` and `serve`: how many ranks they start, and a run's flags."""

    if TYPE_CHECKING:
        run: RunConfig

    tp: int = flag(1, integer(1), "target ranks")
    num_drafts: int = flag(1, integer(0, 1), "draft ranks; 0: ar, or sd with an inline draft")

    def check(self) -> None:
        super().check()
        if self.run.mode == "ssd" and not self.num_drafts:
            raise ConfigError("num_drafts=0 with mode=ssd: allowed: 1 (or mode=sd, mode=ar)")

    @property
    def num_ranks(self) -> int:
        return self.tp + self.num_drafts

    def fit_world(self, command: str, num_ranks: int) -> None:
        """Raises ConfigError if the launcher did not start tp + num_drafts ranks."""
        if num_ranks != self.num_ranks:
            raise ConfigError(
                f"{command} with tp={self.tp}, num_drafts={self.num_drafts} on {num_ranks} ranks: "
                f"allowed: {self.num_ranks}"
            )

    def of_mode(self, mode: str) -> RunConfig:
        """Returns the run's configuration in `mode`; raises ConfigError if its flags exclude it."""
        return replace(self.run, mode=mode, num_drafts=0 if mode == "ar" else self.num_drafts)


def launcher() -> list[str]:
    """Returns the words of the MPI launcher's command: the value of MPIRUN, or else `mpirun`.
    Raises ConfigError if there is no such program."""
    given = os.environ.get("MPIRUN", "").strip() or "mpirun"
    try:
        command = shlex.split(given)
    except ValueError as error:
        raise ConfigError(f"MPIRUN={given}: {error}") from error
    sibling = Path(sys.executable).parent / command[0]
    if which(command[0]) is None and sibling.exists():
        command[0] = str(sibling)
    elif which(command[0]) is None:
        raise ConfigError(f"no {command[0]}: load an MPI module, set MPIRUN, or use make")
    return command


def ranks_command(
    arguments: Sequence[str], num_ranks: int, options: Sequence[str] = ()
) -> list[str]:
    """Returns the command that starts `num_ranks` ranks of mpissd with these arguments; raises
    ConfigError without an mpirun. options: options of the launcher."""
    ranks = ["-n", str(num_ranks), sys.executable, "-m", "mpi4py", "-m", "mpissd"]
    return [*launcher(), *options, *ranks, *arguments]


def end_with_parent() -> None:
    """Has Linux send this process SIGTERM when its parent process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
