"""Checks whether the launcher lets the other ranks live when one is gone (--on_draft_loss=ar)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpissd.common import process
from mpissd.common.errors import ConfigError
from mpissd.engine.comm.topology import launcher_size

_FLAG = "--enable-recovery"


def check_recovery(environ: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError where the loss of a draft would end the target ranks as well.

    Outside a launcher, as in a dry run, it raises nothing: the launcher is not known yet.
    """
    if launcher_size(environ) is None:
        return
    allowed = f"allowed: on_draft_loss=abort, or mpirun {_FLAG} of Open MPI 5 on one host"
    version = environ.get("OMPI_VERSION", "")
    if version.partition(".")[0] != "5":
        what = f"Open MPI {version}" if version else "this launcher"
        raise ConfigError(f"on_draft_loss=ar: {what} ends all ranks with one; {allowed}")
    if environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") != environ.get("OMPI_COMM_WORLD_SIZE"):
        raise ConfigError(f"on_draft_loss=ar: ranks on several hosts; {allowed}")
    if not any(_FLAG in line for line in command_lines(os.getppid())):
        raise ConfigError(f"on_draft_loss=ar: mpirun was started without recovery; {allowed}")


def command_lines(pid: int) -> list[list[str]]:
    """Returns the command lines of a process, its parent, the parent's parent, and so on."""
    lines = []
    while pid > 1:
        try:
            lines.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"))
        except (OSError, UnicodeDecodeError):
            break
        fields = process.stat(pid)
        if fields is None:
            break
        pid = fields[1]
    return lines
