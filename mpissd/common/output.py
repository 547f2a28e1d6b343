"""The output folder: checks before a run, whole lines in its *.jsonl files, and whole files.

A line is one write in append mode, so that jobs which share a folder never mix their lines. A line
that was cut off by a kill is removed before the next one is added, and readers skip it.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.files import read_file

_OF_DISKS = frozenset(  # errors of a disk or its permissions, and none of this program
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO ENOTDIR EISDIR EEXIST".split()
)
_LONGEST_LINE = 1 << 24  # bytes
_UNREAD = 128 + signal.SIGPIPE  # 141, the shell's exit code for a program that SIGPIPE ended


def check_output(out: str) -> None:
    """Raises ConfigError if the folder cannot be made or written; leaves no file."""
    check_folder(f"out={out!r}", Path(out).absolute())


def check_file(flag: str, path: str) -> None:
    """Raises ConfigError, which names `flag`, if the file cannot be written; leaves no file."""
    file = Path(path).absolute()
    check_folder(f"{flag}={path!r}", file.parent)
    if file.is_dir():
        raise ConfigError(f"{flag}={path!r}: is a folder; allowed: a file")


def check_folder(asked: str, folder: Path) -> None:
    """Raises ConfigError, which names `asked`, if a folder cannot be made or written."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # The name is too long, or a parent folder may not be searched.
        raise ConfigError(f"{asked}: {error.strerror}") from error
    if not existing.is_dir():
        raise ConfigError(f"{asked}: {str(existing)!r} is not a folder")
    try:
        with tempfile.TemporaryFile(dir=existing):  # a nameless file leaves no trace
            pass
    except OSError as error:
        raise ConfigError(f"{asked}: {str(existing)!r} cannot be written") from error


def make_output(out: str) -> None:
    """Creates OUT and OUT/rounds; raises ConfigError if that fails."""
    folder = Path(out)
    try:
        (folder / "rounds").mkdir(parents=True, exist_ok=True)
        # The file has no name, so a kill leaves no trace.
        with tempfile.TemporaryFile(dir=folder / "rounds"):
            pass
        if (folder / "runs.jsonl").exists():  # Fail now rather than after the rounds were measured.
            (folder / "runs.jsonl").open("a").close()
    except OSError as error:
        raise ConfigError(f"out={out!r}: cannot be written: {error.strerror}") from error


def json_line(row: Any) -> str:
    """Returns strict JSON, in which a number that is not finite is null."""
    return json.dumps(_finite(row), allow_nan=False)


def print_json(row: Any, *, always: bool = False) -> None:
    """Prints a command's last line for a pipe or a file, JSON. In a terminal it would scroll away
    what a person reads, so it is printed there only if `always`."""
    if always or not sys.stdout.isatty():
        sys.stdout.write(f"{json_line(row)}\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Adds a line to a file that other jobs may be adding to; first the last line gets its newline,
    or is removed if it is no whole row. Raises OSError with the path if the disk is full."""
    line = f"{json_line(row)}\n".encode()
    with _named(path), path.open("a+b", buffering=0) as file:
        with suppress(OSError):  # a file system without locks; the lock ends with the block
            fcntl.flock(file, fcntl.LOCK_EX)
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _LONGEST_LINE))
        last = file.read().rpartition(b"\n")[2]
        if _is_row(last):
            file.write(b"\n")
        elif last:
            file.truncate(end - len(last))
        end = file.seek(0, os.SEEK_END)
        if file.write(line) != len(line):
            file.truncate(end)
            raise OSError(errno.ENOSPC, f"a line of {len(line)} bytes was written in part")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Adds the path to an OSError of the block, since that of a write has none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def fault_of_disk(error: OSError) -> FaultError | None:
    """Returns a disk's error as a FaultError with path and reason; None for another error."""
    if error.errno not in _OF_DISKS:
        return None
    return FaultError(f"{error.filename or 'stdout'}: {error.strerror}")


def _is_row(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the whole rows of a file that jobs may be adding to; [] if it does not exist."""
    try:
        lines = read_file(path).split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if _is_row(line)]


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a file for writing that replaces `path` once the block ends without an error: readers
    see all or nothing, also over NFS. A device or pipe is written into. Raises OSError with the
    path."""
    if path.exists() and not path.is_file():
        with _named(path), path.open("wb") as file:
            yield file
        return
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with _named(path), half.open("wb") as file:
            yield file
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def open_streams() -> None:
    """Makes stdin, stdout and stderr usable in any environment: a closed one becomes /dev/null, and
    a character that stdout's encoding lacks is printed as its escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def unless_unread(command: Callable[[], int]) -> int:
    """Runs a command and flushes stdout; returns its exit code, or 141 if stdout's reader is gone.
    Raises FaultError if a disk is full or refuses. After either, stdout is /dev/null, or Python
    would print a second error at exit."""
    try:
        try:
            return command()
        finally:  # also reached after SystemExit, which --help raises
            sys.stdout.flush()
    except OSError as error:
        fault = fault_of_disk(error)
        if fault is None and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if fault is not None:
            raise fault from error
        return _UNREAD
