"""A replica's file in the shared folder: where it listens, and a count that says that it lives.

A file is written under another name and renamed, so that readers see the old one or the new one
whole, over NFS as well. Nothing is locked, and no time is compared with that of another machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA = 1
# What a file of anything else raises.
_NO_ENTRY = (ValueError, TypeError, LookupError, RecursionError)
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_NAME = re.compile(rf"{_ID.pattern}\.json")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}|::[A-Za-z0-9.:]{0,40}")


@dataclass(frozen=True)
class Entry:
    """A replica. id: also its server's name in HAProxy. max_wait_s: its longest request, in
    seconds. beat: grows by one every beat_s seconds. about: what people want to know of it."""

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
    text = json.dumps({"schema": SCHEMA, **asdict(entry)})
    made = folder / f".{entry.id}.new"  # one writer a name
    with made.open("w") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    made.replace(_path(folder, entry.id))


def remove(folder: Path, name: str) -> None:
    """Removes the entry of an id, and what is left of writing it, where they are there."""
    for path in (_path(folder, name), folder / f".{name}.new"):
        with contextlib.suppress(OSError):
            path.unlink()


def read(folder: Path) -> list[Entry]:
    """Returns the entries of a folder, by id; a file that is none is passed over.

    Raises OSError where the folder, or a file that is there, cannot be read.
    """
    found = []
    for name in sorted(name for name in os.listdir(folder) if _NAME.fullmatch(name)):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError, *_NO_ENTRY):
            path = folder / name
            found.append(_parsed(path.read_text(), path.stem))
    return found


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _parsed(text: str, name: str) -> Entry:
    """Returns the entry of a file; raises one of _NO_ENTRY for anything else.

    Its words go into HAProxy's configuration, so that none may hold a space or a new line.
    """
    told = dict(json.loads(text))
    known = {f.name for f in fields(Entry)}
    entry = Entry(**{key: value for key, value in told.items() if key in known})
    is_known = told["schema"] == SCHEMA and entry.id == name
    is_safe = _ID.fullmatch(entry.id) and _HOST.fullmatch(entry.host)
    numbers = (entry.port, entry.max_wait_s, entry.beat, entry.beat_s)
    if not is_known or not is_safe or not all(type(each) in (int, float) for each in numbers):
        raise ValueError(name)
    if not isinstance(entry.about, dict):
        raise ValueError(name)
    if not (isinstance(entry.port, int) and 0 < entry.port < 65536 and 0 < entry.max_wait_s < 1e6):
        raise ValueError(name)
    return entry
