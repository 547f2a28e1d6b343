"""The output folder: judged before the run, written once."""

from __future__ import annotations

import os
from pathlib import Path

from mpissd.errors import ConfigError


def check_output(out: str) -> None:
    """ConfigError where the folder can't be made or written; creates nothing."""
    _check_folder(f"out={out!r}", Path(out).absolute())


def check_file(flag: str, path: str) -> None:
    """ConfigError where the file that `flag` names can't be written; creates nothing."""
    file = Path(path).absolute()
    _check_folder(f"{flag}={path!r}", file.parent)
    if file.is_dir():
        raise ConfigError(f"{flag}={path!r}: is a folder; allowed: a file")


def _check_folder(told: str, folder: Path) -> None:
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
    except OSError as error:  # a name too long, a parent that may not be searched
        raise ConfigError(f"{told}: {error.strerror}") from error
    if not existing.is_dir():
        raise ConfigError(f"{told}: {str(existing)!r} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"{told}: {str(existing)!r} cannot be written")


def make_output(out: str) -> None:
    """Creates OUT, OUT/rounds and OUT/profiles; ConfigError where that fails."""
    folder = Path(out)
    try:
        for name in ("rounds", "profiles"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        probe = folder / "rounds" / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
        if (folder / "runs.jsonl").exists():  # better now than when the rounds are measured
            (folder / "runs.jsonl").open("a").close()
    except OSError as error:
        raise ConfigError(f"out={out!r}: cannot be written: {error.strerror}") from error
