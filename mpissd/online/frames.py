"""Messages over pipes between a learner's rank and its trainer, a process of its own.

A frame is a kind (one byte), a length, and bytes. To the trainer go EXAMPLE frames; back come
VERSION frames (a number and the packed weights) and REPORT frames (JSON).
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

import numpy as np

from mpissd.online.examples import Example

EXAMPLE, VERSION, REPORT = b"E", b"V", b"R"
_HEAD = struct.Struct("<cq")
_SIZES = struct.Struct("<3q")
_NUMBER = struct.Struct("<q")
Frame = tuple[bytes, bytes]


def write(pipe: BinaryIO, kind: bytes, data: bytes) -> None:
    """Writes a frame; blocks while the pipe is full."""
    pipe.write(_HEAD.pack(kind, len(data)) + data)
    pipe.flush()


def read(pipe: BinaryIO) -> Frame | None:
    """Returns the next frame as (kind, data); None at the pipe's end."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, size = _HEAD.unpack(head)
    data = pipe.read(size)
    return None if len(data) < size else (kind, data)


def of_example(example: Example) -> bytes:
    """Returns an example's bytes."""
    sizes = len(example.tokens), len(example.at), example.ids.shape[-1]
    parts = example.tokens, example.at, example.ids, example.logs
    return _SIZES.pack(*sizes) + b"".join(part.tobytes() for part in parts)


def example_of(data: bytes) -> Example:
    """Returns the example of these bytes."""
    tokens, rows, kept = _SIZES.unpack_from(data)
    ends = np.cumsum([_SIZES.size, 4 * tokens, 4 * rows, 4 * rows * kept, 2 * rows * kept])
    kinds = np.int32, np.int32, np.int32, np.float16
    parts: list[Any] = [
        np.frombuffer(data[start:stop], kind)
        for start, stop, kind in zip(ends, ends[1:], kinds, strict=False)
    ]
    return Example(parts[0], parts[1], *(part.reshape(rows, kept) for part in parts[2:]))


def of_version(version: int, data: bytes) -> bytes:
    """Returns the bytes of a version and its number."""
    return _NUMBER.pack(version) + data


def version_of(data: bytes) -> tuple[int, bytes]:
    """Returns (version, packed weights)."""
    return _NUMBER.unpack_from(data)[0], data[_NUMBER.size :]


def of_report(report: dict[str, Any]) -> bytes:
    """Returns the bytes of a report."""
    return json.dumps(report).encode()
