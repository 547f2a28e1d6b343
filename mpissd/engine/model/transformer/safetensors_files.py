"""Reads the tensors of a Hugging Face folder: *.safetensors, memory-mapped, each rank its slice.

A matrix may be quantised by mpissd ("int8-32"): `X.weight` int8 [out, in] with `X.scale` float16
[out, in / 32], where element (o, i) is weight · scale[o, i // 32].
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.engine.model.transformer.checkpoint import ALL, Floats, Int8
from mpissd.engine.model.transformer.libraries import library

INDEX = "model.safetensors.index.json"
BLOCK = 32  # inputs that share a scale
_BFLOAT16 = "BF16"
_DTYPES = {"F32": "<f4", "F16": "<f2", _BFLOAT16: "<u2", "I8": "<i1", "I32": "<i4"}


@dataclass(frozen=True)
class Stored:
    """One tensor as it lies in a file; offset is counted from the file's start, in bytes."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def array(self) -> NDArray[Any]:
        """Maps the tensor; bfloat16 comes as its 16 bits, uint16."""
        told = _DTYPES[self.dtype]
        if 0 in self.shape:  # nothing can be mapped
            return np.zeros(self.shape, told)
        return np.memmap(self.path, told, "r", offset=self.offset, shape=self.shape)


def stored(folder: Path) -> dict[str, Stored]:
    """Returns every tensor of the folder by its name, read from the files' headers.

    Raises ConfigError, one line that names the file, if one is missing or damaged.
    """
    found: dict[str, Stored] = {}
    for path in files(folder):
        found.update(_header(path))
    return found


def files(folder: Path) -> list[Path]:
    """Returns the folder's files of weights; if the folder has an index, those that it names."""
    index = folder / INDEX
    if index.exists():
        paths = [folder / name for name in sorted(set(_index(index).values()))]
        for path in paths:
            if not path.exists():
                raise ConfigError(f"{str(index)!r} names {path.name!r}, which is not there")
        return paths
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise ConfigError(f"{str(folder)!r} has no *.safetensors: allowed: a folder with weights")
    return paths


def _index(path: Path) -> Mapping[str, str]:
    try:
        names = json.loads(path.read_text("utf-8"))["weight_map"]
        if names and all(isinstance(name, str) for name in names.values()):
            return dict(names)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        pass
    raise ConfigError(f"{str(path)!r} is no index of safetensors (weight_map)")


def _header(path: Path) -> dict[str, Stored]:
    """Returns the tensors of one file.

    The safetensors library only checks the file. The header is read here, because the library does
    not give the offsets that a memory map needs.
    """
    safetensors = library("safetensors", str(path.parent))
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is damaged or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: Stored(path, told["dtype"], tuple(told["shape"]), 8 + size + told["data_offsets"][0])
        for name, told in header.items()
    }


class SafetensorsFiles:
    """The tensors of a folder (a source of weights for FileCheckpoint)."""

    def __init__(self, folder: Path) -> None:
        """Reads the headers; raises ConfigError as `stored` does."""
        self.paths = files(folder)
        self._stored = stored(folder)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a tensor's shape; None if it is not there. Raises ConfigError for a type or a
        scale that cannot be read."""
        if (found := self._stored.get(name)) is None:
            return None
        if found.dtype not in _DTYPES:
            raise ConfigError(
                f"{str(found.path)!r}: {name} is {found.dtype}: allowed: {', '.join(_DTYPES)}"
            )
        if found.dtype == "I8":
            self._check_scale(name, found)
        return found.shape

    def _check_scale(self, name: str, found: Stored) -> None:
        if len(found.shape) != 2:
            raise ConfigError(f"{str(found.path)!r}: {name} is I8: allowed: of a matrix alone")
        scale = self._stored.get(_scale(name))
        blocks = (*found.shape[:-1], -(-found.shape[-1] // BLOCK))
        if scale is None or (scale.dtype, scale.shape) != ("F16", blocks):
            told = "missing" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise ConfigError(
                f"{str(found.path)!r}: {_scale(name)} is {told}: allowed: F16 {list(blocks)}"
            )

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a tensor of one or two dimensions, float32."""
        found = self._stored[name]
        array = found.array()
        part = array[rows] if array.ndim == 1 else array[rows, columns]
        if found.dtype == _BFLOAT16:
            return (part.astype(np.uint32) << 16).view(np.float32)
        values = np.ascontiguousarray(part, np.float32)
        return values * self._scales(name, rows, columns) if found.dtype == "I8" else values

    def int8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as Checkpoint.int8_part does."""
        found = self._stored[name]
        start, stop, _ = columns.indices(found.shape[1])
        if found.dtype != "I8" or start % BLOCK or stop % BLOCK:
            return None
        scales = self._stored[_scale(name)].array()[rows, start // BLOCK : stop // BLOCK]
        return found.array()[rows, columns], scales.astype(np.float32)

    def _scales(self, name: str, rows: slice, columns: slice) -> Floats:
        """Returns the scale of each element of a part, float32 [rows, columns]."""
        start, stop, _ = columns.indices(self._stored[name].shape[1])
        blocks = self._stored[_scale(name)].array()[rows, start // BLOCK : -(-stop // BLOCK)]
        cut = slice(start % BLOCK, start % BLOCK + stop - start)
        return np.repeat(blocks.astype(np.float32), BLOCK, axis=1)[:, cut]

    def integers(self, name: str) -> NDArray[np.int32] | None:
        """Returns a tensor of whole numbers, int32; None if it is not there. Raises ConfigError for
        another type."""
        if (found := self._stored.get(name)) is None:
            return None
        if found.dtype != "I32":
            raise ConfigError(f"{str(found.path)!r}: {name} is {found.dtype}: allowed: I32")
        return np.array(found.array(), np.int32)


def _scale(name: str) -> str:
    return name.removesuffix("weight") + "scale"
