"""The folder in which replicas write their addresses, one file each.

The folder is all that replicas share: no locks, no clock, no agreed port. A file is written under
another name and renamed, so that readers see the old or the new one whole, over NFS as well. Its
count grows while the replica lives.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError

SCHEMA = 1
EXPIRE_S = 60.0  # after a replica's last beat; NFS may show a file this late (acregmax)
_LEAVE_S = 5.0  # longest wait for the folder's file system when the server ends
_ANY = ("0.0.0.0", "::", "")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_NAME = re.compile(rf"{_ID.pattern}\.json")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}|::[A-Za-z0-9.:]{0,40}")
# Raised by a file that is no entry.
_NO_ENTRY = (ValueError, TypeError, LookupError, RecursionError)


@dataclass(frozen=True)
class Entry:
    """A replica.

    id: also its server's name in HAProxy. max_wait_s: its longest request, in seconds. beat: grows
    by one every beat_s seconds. about: its description, for people.
    """

    id: str
    host: str
    port: int
    max_wait_s: float = 600.0
    beat: int = 0
    beat_s: float = 5.0
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def write(folder: Path, entry: Entry) -> None:
    """Writes an entry, or replaces it; raises OSError."""
    made = folder / f".{entry.id}.new"  # only its own replica writes it
    with made.open("w") as file:
        file.write(json.dumps({"schema": SCHEMA, **asdict(entry)}) + "\n")
        file.flush()
        os.fsync(file.fileno())
    made.replace(folder / f"{entry.id}.json")


def remove(folder: Path, name: str) -> None:
    """Removes the entry of an id and its unfinished file, if they exist."""
    for path in (folder / f"{name}.json", folder / f".{name}.new"):
        with contextlib.suppress(OSError):
            path.unlink()


def read(folder: Path) -> list[Entry]:
    """Returns the entries of a folder, sorted by id; skips files that are no entry.

    Raises OSError if the folder, or a file in it, cannot be read.
    """
    entries = []
    for name in sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name)):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, *_NO_ENTRY):
            path = folder / name
            entries.append(_parsed(path.read_text(), path.stem))
    return entries


def _parsed(text: str, name: str) -> Entry:
    """Returns the entry of a file; raises one of _NO_ENTRY for other text.

    Its words go into HAProxy's configuration, so none may hold a space or a newline.
    """
    values = dict(json.loads(text))
    known = {f.name for f in fields(Entry)}
    entry = Entry(**{key: value for key, value in values.items() if key in known})
    numbers = (entry.port, entry.max_wait_s, entry.beat, entry.beat_s)
    is_entry = (
        values["schema"] == SCHEMA
        and entry.id == name
        and _ID.fullmatch(entry.id)
        and _HOST.fullmatch(entry.host)
        and all(type(each) in (int, float) for each in numbers)
        and isinstance(entry.about, dict)
        and isinstance(entry.port, int)
        and 0 < entry.port < 65536
        and 0 < entry.max_wait_s < 1e6
    )
    if not is_entry:
        raise ValueError(name)
    return entry


class Living:
    """Reads a folder again and again, and removes the entries of dead replicas.

    An entry is dead once its count has not changed for `expire_s`, by this observer's own clock. So
    the clocks of nodes may differ, and file times, which some file systems take from the writer's
    node, do not matter. A new observer calls nothing dead for `expire_s`. A live replica whose file
    was removed writes it again.
    """

    def __init__(
        self,
        folder: Path,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._expire_s, self._clock = folder, expire_s, clock
        self._seen: dict[str, tuple[int, float]] = {}  # by id: the count, and since when

    def look(self) -> list[Entry]:
        """Returns the live entries, sorted by id, and removes the files of dead ones.

        Raises OSError if the folder cannot be read, or is gone: that ends no replica.
        """
        now, entries, before = self._clock(), read(self._folder), self._seen
        self._seen = {}
        for each in entries:
            last = before.get(each.id)
            self._seen[each.id] = last if last and last[0] == each.beat else (each.beat, now)
        dead = {name for name, (_, since) in self._seen.items() if now - since > self._expire_s}
        for name in dead:
            remove(self._folder, name)
        return [each for each in entries if each.id not in dead]


class Member:
    """Keeps one entry in a folder from when its server takes requests until it ends.

    It writes in a thread, so that a file system that hangs stops no request. It also removes the
    entries of dead replicas.
    """

    def __init__(self, folder: str, entry: Entry) -> None:
        """Raises ConfigError if the folder cannot be made or written."""
        self._folder, self._entry = Path(folder), entry
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="replica", daemon=True)
        self._has_complained = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self._folder):  # without a name, so it is invisible
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
        """Leaves, and waits at most _LEAVE_S until the entry is gone."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def join(self) -> None:
        """Adds the entry, from now on until `leave`."""
        if not self._is_over.is_set():
            self._thread.start()

    def leave(self) -> None:
        """Begins to remove the entry, and returns at once."""
        self._is_over.set()

    def _beat(self) -> None:
        living, beat = Living(self._folder), 0
        while not self._is_over.is_set():
            began_s, beat = time.monotonic(), beat + 1
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                write(self._folder, replace(self._entry, beat=beat))
                living.look()
            except OSError as error:
                self._complain(error)
            self._is_over.wait(max(0.0, self._entry.beat_s - (time.monotonic() - began_s)))
        remove(self._folder, self._entry.id)

    def _complain(self, error: OSError) -> None:
        """Prints the first failure."""
        if not self._has_complained:
            message = f"register={self._folder}: {error.strerror}: trying on"
            sys.stderr.write(f"mpissd: serve: {message}\n")
        self._has_complained = True


def new_id() -> str:
    """Returns the id of a new replica: Slurm's job and task, if any, and a random part."""
    environ = os.environ
    job = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID", "")
    task = environ.get("SLURM_ARRAY_TASK_ID", "")
    parts = [part for part in (job, task) if part.isdecimal()]
    return "-".join(["r", *parts, secrets.token_hex(4)])


def entry_of(name: str, host: str, port: int, max_wait_s: float, about: Mapping[str, Any]) -> Entry:
    """Returns the entry of a running server.

    If it is bound to all addresses, the host is its node's name, which the balancer resolves.
    """
    node = platform.node()
    where = {"node": node, "pid": os.getpid(), "job": os.environ.get("SLURM_JOB_ID")}
    return Entry(name, node if host in _ANY else host, port, max_wait_s, about={**where, **about})
