"""Digests of weights' files, which say in a row what ran.

Whole files up to 512 MiB are read. Reading 140 GB would take minutes at every start, so of a larger
file its size, its beginning (with the header, and a GGUF's tokenizer) and 64 blocks spread over the
rest count. Such a digest tells apart other models, other training runs, other quantisations and
truncated files; a few bytes changed on purpose it may miss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

WHOLE = "whole files"
SAMPLED = "sizes, first 16 MiB and 64 blocks of 64 KiB of files above 512 MiB; others whole"
LARGEST = 1 << 29  # bytes of a file that is read whole
_HEAD, _BLOCK, _BLOCKS = 1 << 24, 1 << 16, 64
_PIECE = 1 << 24  # bytes read at once


def digest(paths: Sequence[Path]) -> tuple[str, str]:
    """Returns (the SHA-256 of one file, or of the lines "digest  name" of several; what it covers:
    WHOLE or SAMPLED)."""
    stats = [(path, path.stat()) for path in paths]
    digests = [(_digest_of(path, at.st_mtime_ns, at.st_size), path.name) for path, at in stats]
    covers = SAMPLED if any(at.st_size > LARGEST for _, at in stats) else WHOLE
    if len(digests) == 1:
        return digests[0][0], covers
    lines = "".join(f"{each}  {name}\n" for each, name in digests)
    return hashlib.sha256(lines.encode()).hexdigest(), covers


@lru_cache(maxsize=256)
def _digest_of(path: Path, mtime_ns: int, size: int) -> str:
    """Reads a file that has changed since the last call, as its time says; a sweep asks often."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        for piece in _sampled(file, size) if size > LARGEST else _whole(file):
            found.update(piece)
    return found.hexdigest()


def _whole(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


def _sampled(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the size in decimal, the beginning, and blocks of which the last ends the file."""
    yield str(size).encode()
    yield file.read(_HEAD)
    for number in range(1, _BLOCKS + 1):
        file.seek(_HEAD + (size - _HEAD - _BLOCK) * number // _BLOCKS)
        yield file.read(_BLOCK)
