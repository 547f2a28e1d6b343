"""The files that weights are read from: *.safetensors of a Hugging Face folder, and .gguf.

Tensors are memory-mapped, so that each rank reads its slice only. In safetensors a matrix may be
quantised by mpissd ("int8-32"): `X.weight` int8 [out, in] with `X.scale` float16 [out, in / 32],
where element (o, i) is weight · scale[o, i // 32]. The library gguf dequantises a .gguf's tensors.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf
from mpissd.common.presets import is_missing, missing_pair
from mpissd.engine.model.transformer.checkpoint import (
    ALL,
    BLOCK,
    EMBEDDING,
    HEAD,
    LAST_NORM,
    Floats,
    Int8,
)

_FETCHED = ["*.json", "*.safetensors", "*.jinja"]
_TIMEOUT_S = 10
INDEX = "model.safetensors.index.json"
_BFLOAT16 = "BF16"
_DTYPES = {"F32": "<f4", "F16": "<f2", _BFLOAT16: "<u2", "I8": "<i1", "I32": "<i4"}
ROPE_FACTORS = "rope_freqs.weight"
_PIECE = 1 << 17  # elements dequantised at once; they stay in the processor's cache
_OUTSIDE = {EMBEDDING: "token_embd.weight", HEAD: "output.weight", LAST_NORM: "output_norm.weight"}
_INSIDE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def library(name: str, what: str) -> ModuleType:
    """Imports a library that `what` needs; raises ConfigError, one line, where it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ConfigError(f"{what} needs {name}: pip install 'mpissd[text]'") from missing


def fetch_missing(pair: str | None, *models: str | None) -> None:
    """Downloads the models of these names that the hub's cache lacks; local files are skipped.

    Raises ConfigError, one line that says how to go on without a network.
    """
    for name in [*(missing_pair(pair) if pair else ()), *filter(None, models)]:
        if is_missing(name):
            _fetch(name)


def _fetch(name: str) -> None:
    hub = library("huggingface_hub", name)
    try:
        hub.snapshot_download(name, allow_patterns=_FETCHED, etag_timeout=_TIMEOUT_S)
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"{name} is not on this machine and cannot be fetched ({reason}): give "
            "--target=FOLDER (--draft, --pair) with its config.json and *.safetensors, or a .gguf"
        ) from error


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


def gguf_name(name: str) -> str:
    """Returns the GGUF name of a Hugging Face tensor ("blk.0.attn_q.weight")."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    inside, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_INSIDE[inside]}.{kind}" if inside in _INSIDE else name


class GgufFiles:
    """The tensors of one .gguf (a source of weights for FileCheckpoint)."""

    def __init__(self, path: Path, head_dim: int) -> None:
        """Reads the metadata; head_dim: width of a head, whose rows of q and k are reordered.

        Raises ConfigError, one line, if the file is damaged.
        """
        self.paths, self.file = [path], read_gguf(path)
        self._data, self._told = np.memmap(path, np.uint8, "r"), repr(str(path))
        # llama.cpp's converter puts a rotated pair's rows beside each other, for "llama" alone.
        self._interleaved = self.file.metadata["general.architecture"] == "llama"
        self._head_dim = head_dim

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a tensor's shape, [outputs, inputs]; None if it is not there.

        Raises ConfigError for a type that the library cannot dequantise, and for a tensor that
        ends beyond the file.
        """
        if (info := self.file.tensors.get(gguf_name(name))) is None:
            return None
        if _block(info.kind) is None:
            raise ConfigError(f"{self._told}: {name} is of ggml's type {info.kind}, not supported")
        self._bytes(name)
        return info.shape[::-1]

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a tensor of one or two dimensions, float32."""
        info = self.file.tensors[gguf_name(name)]
        if len(info.shape) == 1:
            return np.asarray(_values(self._bytes(name)[None], info.kind)[0, rows], np.float32)
        start, stop, _ = columns.indices(info.shape[0])
        block, size = _block(info.kind) or (1, 4)
        first, last = start // block, -(-stop // block)
        picked = self._rows(name, rows, info.shape[1])
        data = self._bytes(name)[picked, first * size : last * size]
        return _values(data, info.kind)[:, start - first * block : stop - first * block]

    def int8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """None, because a .gguf's weights enter products as bfloat16."""
        return None

    def integers(self, name: str) -> None:
        """None, because a .gguf has no reduced head."""
        return None

    def _rows(self, name: str, rows: slice, count: int) -> slice | NDArray[np.int64]:
        """Returns the rows of the file that hold these rows of the matrix."""
        if not self._interleaved or not name.endswith(("q_proj.weight", "k_proj.weight")):
            return rows
        wanted, width = np.arange(count)[rows], self._head_dim
        pair, half = wanted % width % (width // 2), wanted % width // (width // 2)
        return np.asarray(wanted - wanted % width + 2 * pair + half, np.int64)

    def _bytes(self, name: str) -> NDArray[np.uint8]:
        """Maps a tensor's bytes, [rows, bytes of a row], or [bytes] of a vector."""
        info = self.file.tensors[gguf_name(name)]
        block, size = _block(info.kind) or (1, 4)
        if not info.shape or info.shape[0] % block:
            raise ConfigError(f"{self._told}: {name}: {info.shape} elements, in blocks of {block}")
        shape = (*info.shape[:0:-1], info.shape[0] // block * size)
        start = self.file.data_start + info.offset
        if start + math.prod(shape) > len(self._data):
            raise ConfigError(f"{self._told} is cut off before the end of {name}")
        return self._data[start : start + math.prod(shape)].reshape(shape)


@lru_cache(maxsize=64)
def _block(kind: int) -> tuple[int, int] | None:
    """Returns (elements, bytes) of a block of a ggml type; None if the library lacks it."""
    gguf = library("gguf", "a .gguf")
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        _values(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return block, size


def _values(data: NDArray[Any], kind: int) -> Floats:
    """Dequantises whole blocks, bytes [rows, n], in pieces: the library splits what it is given
    into groups of 16 rows, whose calls take longer than their arithmetic."""
    gguf = library("gguf", "a .gguf")
    told = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[told]
    pieces = np.ascontiguousarray(data).reshape(-1, size)
    values = np.empty((len(pieces), block), np.float32)
    for first in range(0, len(pieces), _PIECE // block):
        part = slice(first, first + _PIECE // block)
        found = gguf.quants.dequantize(pieces[part].reshape(1, -1), told)
        values[part] = found.reshape(-1, block)
    return values.reshape(len(data), data.shape[1] // size * block)
