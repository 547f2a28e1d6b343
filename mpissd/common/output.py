"""Writes the output folder: checks it before a run, appends lines to its *.jsonl files, and
replaces files as a whole.

A line is one write in append mode, so lines of jobs that share a folder never mix. A line that a
kill cut off is removed before the next line is added; readers skip it.
"""

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

_OF_DISKS = frozenset(  # errors of a full disk or of permissions, which are no defects of mpissd
    getattr(errno, name)
    for name in "ENOSPC EDQUOT EROFS EACCES EPERM EFBIG EIO ENOTDIR EISDIR EEXIST".split()
)
_LONGEST_LINE = 1 << 24  # bytes
_UNREAD = 128 + signal.SIGPIPE  # exit code 141, which shells give to a program that SIGPIPE ended


def check_output(out: str) -> None:
    """Raises ConfigError if the output folder cannot be made or written; leaves no file there."""
    check_folder(f"out={out!r}", Path(out).absolute())


def check_file(flag: str, path: str) -> None:
    """Raises ConfigError if the file at `path` cannot be written; leaves no file behind. flag: the
    flag that gave the path, which the message names."""
    file = Path(path).absolute()
    check_folder(f"{flag}={path!r}", file.parent)
    if file.is_dir():
        raise ConfigError(f"{flag}={path!r}: is a folder; allowed: a file")


def check_folder(asked: str, folder: Path) -> None:
    """Raises ConfigError, whose text begins with `asked`, if a folder cannot be written or made."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # the name is too long, or a parent folder is not readable
        raise ConfigError(f"{asked}: {error.strerror}") from error
    if not existing.is_dir():
        raise ConfigError(f"{asked}: {str(existing)!r} is not a folder")
    try:
        # The file has no name, so a kill leaves nothing behind.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ConfigError(f"{asked}: {str(existing)!r} cannot be written") from error


def make_output(out: str) -> None:
    """Creates the folders OUT and OUT/rounds; raises ConfigError if they cannot be written."""
    folder = Path(out)
    try:
        (folder / "rounds").mkdir(parents=True, exist_ok=True)
        # The file has no name, so a kill leaves nothing behind.
        with tempfile.TemporaryFile(dir=folder / "rounds"):
            pass
        if (folder / "runs.jsonl").exists():  # raises OSError now rather than after the measurement
            (folder / "runs.jsonl").open("a").close()
    except OSError as error:
        raise ConfigError(f"out={out!r}: cannot be written: {error.strerror}") from error


def json_line(row: Any) -> str:
    """Returns strict JSON text of `row`, with null for numbers that are not finite."""
    return json.dumps(_finite(row), allow_nan=False)


def print_json(row: Any, *, always: bool = False) -> None:
    """Prints a command's result as a line of JSON if stdout is a pipe or a file. On a terminal
    prints it only if `always`, since the line would push the readable output off the screen."""
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
    """Appends `row` as a line of JSON to a file to which other jobs may append at the same time. If
    the file's last line lacks its newline, that line gets one, or is removed if it is no complete
    row. Raises OSError with the path if the disk is full."""
    line = f"{json_line(row)}\n".encode()
    with _named(path), path.open("a+b", buffering=0) as file:
        with suppress(OSError):  # some file systems have no locks; closing the file unlocks it
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
    """Adds the path to an OSError that the block raises, since the errors of writes lack it."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def fault_of_disk(error: OSError) -> FaultError | None:
    """Returns a FaultError with path and reason for an error of a disk or permission, else None."""
    if error.errno not in _OF_DISKS:
        return None
    return FaultError(f"{error.filename or 'stdout'}: {error.strerror}")


def _is_row(text: bytes) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Returns the complete rows of a file to which jobs may append; [] without such a file."""
    try:
        lines = read_file(path).split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if _is_row(line)]


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file for writing, which replaces `path` once the block ends without an
    error. So readers see the old or the new content, never a part, also over NFS. A device or a
    pipe is written directly. Raises OSError with the path."""
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
    """Makes stdin, stdout and stderr usable in any environment: a closed stream becomes /dev/null,
    and a character that stdout cannot encode is printed as a backslash escape."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until the process ends)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def unless_unread(command: Callable[[], int]) -> int:
    """Runs a command and flushes stdout; returns its exit code, or 141 if the reader of stdout is
    gone. Raises FaultError if a disk is full or refuses a write. After either failure stdout
    becomes /dev/null, so that Python does not print a second error at exit."""
    try:
        try:
            return command()
        finally:  # also runs after SystemExit, which --help raises
            sys.stdout.flush()
    except OSError as error:
        fault = fault_of_disk(error)
        if fault is None and not isinstance(error, BrokenPipeError):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if fault is not None:
            raise fault from error
        return _UNREAD
