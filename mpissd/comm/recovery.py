"""Whether the launcher lets ranks live on when one of them is gone (--on_draft_loss=ar)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from mpissd.comm.topology import launcher_size
from mpissd.errors import ConfigError
from mpissd.watch import process

_FLAG = "--enable-recovery"


def check_recovery(environ: Mapping[str, str] = os.environ) -> None:
    """ConfigError where losing a draft would end the targets, too. Not under a launcher (a dry
    run): nothing is known yet."""
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
    """The arguments of a process and of those above it."""
    found = []
    while pid > 1:
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0"))
        except (OSError, UnicodeDecodeError):
            break
        told = process.stat(pid)
        if told is None:
            break
        pid = told[1]
    return found
