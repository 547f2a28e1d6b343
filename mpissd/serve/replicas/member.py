"""A replica's membership: an entry that appears when it takes requests, and goes when it ends."""

from __future__ import annotations

import os
import platform
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.serve.replicas import entry as entries
from mpissd.serve.replicas.entry import Entry
from mpissd.serve.replicas.living import Living

_LEAVE_S = 5.0  # longest wait for the folder's file system, when the server ends
_ANY = ("0.0.0.0", "::", "")


class Member:
    """Keeps one entry of a folder, in a thread: a file system that hangs stops no request.

    It also removes the entries of replicas that died without a word.
    """

    def __init__(self, folder: str, entry: Entry) -> None:
        """Raises ConfigError where the folder cannot be made or written."""
        self._folder, self._entry = Path(folder), entry
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="replica", daemon=True)
        self._complained = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):  # without a name: nobody sees it
                pass
        except OSError as error:
            raise ConfigError(f"register={folder}: {error.strerror}: allowed: a folder") from error

    @property
    def id(self) -> str:
        """The replica's id."""
        return self._entry.id

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def join(self) -> None:
        """Adds the entry, from now on until `leave`."""
        if not self._is_over.is_set():
            self._thread.start()

    def leave(self) -> None:
        """Begins to remove the entry, and returns at once."""
        self._is_over.set()

    def close(self) -> None:
        """Leaves, and waits until the entry is gone, but not for long."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def _beat(self) -> None:
        living = Living(self._folder)
        beat = 0
        while not self._is_over.is_set():
            began, beat = time.monotonic(), beat + 1
            self._write(replace(self._entry, beat=beat), living)
            self._is_over.wait(max(0.0, self._entry.beat_s - (time.monotonic() - began)))
        entries.remove(self._folder, self._entry.id)

    def _write(self, entry: Entry, living: Living) -> None:
        """Writes the entry, and removes the dead ones; says the first failure, and goes on."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            entries.write(self._folder, entry)
            living.look()
        except OSError as error:
            if not self._complained:
                told = f"mpissd: serve: register={self._folder}: {error.strerror}: trying on\n"
                sys.stderr.write(told)
            self._complained = True


def new_id() -> str:
    """Returns the id of a new replica: Slurm's job and task where there are, and a random part."""
    environ = os.environ
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    parts = [part for part in (job, task) if part.isdecimal()]
    return "-".join(["r", *parts, secrets.token_hex(4)])


def entry_of(name: str, host: str, port: int, max_wait_s: float, about: Mapping[str, Any]) -> Entry:
    """Returns the entry of a server that listens; for one that listens on all addresses the name
    of its node stands, which the balancer resolves."""
    node = platform.node()
    where = {"node": node, "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
    return Entry(name, node if host in _ANY else host, port, max_wait_s, about={**where, **about})
