"""Reads a GGUF file's metadata, its list of tensors and its model's shape, but no weights.

Source: the GGUF specification, version 3. The library `gguf` makes a NumPy view of each token in
the vocabulary, which takes 2 s for 49,152 tokens; this reader takes 0.05 s.
"""

import mmap
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from struct import Struct
from struct import error as StructError
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.files import check_regular

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_KEYS = {
    "num_layers": "block_count",
    "hidden": "embedding_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "ffn": "feed_forward_length",
}
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING = 8
_ARRAY = 9
_HEADER = Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
_LENGTH = Struct("<Q")
_KIND = Struct("<I")
_ARRAY_HEAD = Struct("<IQ")
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_DIMS = 4
# Errors that reading a damaged file raises, as its sizes and types may be impossible.
_DAMAGED: tuple[type[Exception], ...] = (StructError, LookupError, ValueError, TypeError)
_DAMAGED += (ArithmeticError, MemoryError, RecursionError)


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is stored in a GGUF file. shape: its dimensions, the contiguous one first.
    kind: ggml's number of its data type. start: its offset in the file `path`, in bytes."""

    shape: tuple[int, ...]
    kind: int
    start: int
    path: Path


@dataclass(frozen=True)
class GgufFile:
    """What a GGUF file says without its weights: metadata {key: value}, and tensors by name. paths:
    the file, or all shards of a split model, of which the first has the metadata."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    paths: tuple[Path, ...]


def is_gguf(path: Path) -> bool:
    """Returns whether a file begins with GGUF's magic bytes, or its name ends in .gguf."""
    try:
        check_regular(path)
        with path.open("rb") as file:
            has_magic = file.read(4) == _MAGIC
    except OSError:  # the caller reads the file next, which reports the error
        has_magic = False
    return has_magic or path.suffix == ".gguf"


def read_gguf(path: Path) -> GgufFile:
    """Returns the metadata and tensors of a GGUF file. For the first shard of a split model the
    tensors of all shards are returned. Results for unchanged files are cached. Raises ConfigError
    if a file is damaged or is no GGUF file."""
    first = _read(path)
    count = first.metadata.get("split.count", 1)
    return first if count in (0, 1) else _joined(first, count)


def _joined(first: GgufFile, count: Any) -> GgufFile:
    """Returns a split model with the tensors of all `count` shards, which are named as llama.cpp
    names them. Raises ConfigError if `first` is not the first shard, or if a shard is missing or
    belongs to another model."""
    where = repr(str(first.path))
    name = first.path.name
    ending = "-{:05d}-of-{:05d}.gguf"
    number = first.metadata.get("split.no")
    is_count = type(count) is int and 1 < count < 1 << 16
    if number != 0 or not is_count or not name.endswith(ending.format(1, count)):
        raise ConfigError(
            f"{where}: split.no={number!r}, split.count={count!r}: this is a shard of a split "
            "model: allowed: the first, *-00001-of-….gguf, next to the others"
        )
    prefix = name.removesuffix(ending.format(1, count))
    tensors = dict(first.tensors)
    paths = [first.path.with_name(prefix + ending.format(n + 1, count)) for n in range(count)]
    for number, path in enumerate(paths[1:], 1):
        shard = _read(path)
        place = shard.metadata.get("split.no"), shard.metadata.get("split.count")
        if place != (number, count) or tensors.keys() & shard.tensors.keys():
            raise ConfigError(f"{str(path)!r} is not shard {number + 1} of {count} of {where}")
        tensors |= shard.tensors
    if (total := first.metadata.get("split.tensors.count")) != len(tensors):
        raise ConfigError(f"{where}: split.tensors.count={total!r}: its shards have {len(tensors)}")
    return replace(first, tensors=tensors, paths=tuple(paths))


def _read(path: Path) -> GgufFile:
    try:
        state = check_regular(path)
        return _read_once(path, state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise ConfigError(f"{str(path)!r}: {error.strerror}") from error
    except _DAMAGED as error:
        raise ConfigError(f"{str(path)!r}: a GGUF file that is cut off or damaged") from error


@lru_cache(maxsize=8)
def _read_once(path: Path, *state: int) -> GgufFile:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(path, data).read()


@dataclass
class _Reader:
    path: Path
    data: mmap.mmap
    at: int = 0  # bytes read so far

    def read(self) -> GgufFile:
        magic, version, num_tensors, num_entries = self._next(_HEADER)
        where = repr(str(self.path))
        if magic != _MAGIC:
            raise ConfigError(f"{where}: is no GGUF file")
        if version not in _VERSIONS:
            raise ConfigError(f"{where}: GGUF version {version}: allowed: 2, 3, little-endian")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            name = self._name("key", metadata)
            metadata[name] = self._value(self._next(_KIND)[0])
        tensors: dict[str, TensorInfo] = {}
        for _ in range(num_tensors):
            name = self._name("tensor", tensors)
            (num_dims,) = self._next(_KIND)
            if num_dims > _MOST_DIMS:
                raise ValueError(f"tensor {name!r} of {num_dims} dimensions")
            shape = self._next(Struct(f"<{num_dims}Q"))
            kind, offset = self._next(Struct("<IQ"))
            tensors[name] = TensorInfo(shape, kind, offset, self.path)
        align = int(metadata.get("general.alignment", 32))
        start = -(-self.at // align) * align
        for name, info in tensors.items():
            if info.start % align:
                raise ValueError(f"tensor {name!r} at {info.start}, not aligned to {align}")
            if start + info.start >= len(self.data):
                raise ConfigError(f"{where}: cut off before tensor {name!r}")
            tensors[name] = replace(info, start=start + info.start)
        return GgufFile(self.path, metadata, tensors, (self.path,))

    def _next(self, form: Struct) -> tuple[Any, ...]:
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def _string(self) -> str:
        (length,) = self._next(_LENGTH)
        end = self.at + length
        if end > len(self.data):
            raise ValueError("a string beyond the end of the file")
        text = self.data[self.at : end].decode(errors="replace")
        self.at = end
        return text

    def _name(self, what: str, others: Collection[str]) -> str:
        """Reads the name of a key or a tensor. Raises an error if it is not printable, or is in
        `others`, the names that were read before."""
        name = self._string()
        if not name.isprintable():
            raise ValueError(f"the name {name!r}")
        if name in others:
            raise ConfigError(f"{str(self.path)!r}: the {what} {name} is there twice")
        return name

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._next(Struct(f"<{_SCALARS[kind]}"))[0]
        item, count = self._next(_ARRAY_HEAD)
        if count > len(self.data):
            raise ValueError("an array beyond the end of the file")
        if item in _SCALARS:
            return list(self._next(Struct(f"<{count}{_SCALARS[item]}")))
        return [self._value(item) for _ in range(count)]


def read_fields(path: Path) -> dict[str, Any]:
    """Returns the fields of presets.ModelShape for a GGUF file. Raises ConfigError, which names
    file and key, if the file is unreadable or incomplete, or its architecture is not supported."""
    file = read_gguf(path)
    where = repr(str(path))
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ConfigError(f"{where}: general.type={kind!r} is not supported: allowed: model")
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: general.architecture={architecture!r} is not supported: allowed: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if experts := file.metadata.get(f"{architecture}.expert_count"):
        raise ConfigError(
            f"{where}: {architecture}.expert_count={experts} says mixture-of-experts, which is not "
            "supported"
        )
    shape: dict[str, Any] = {"name": path.stem}
    for field, name in _KEYS.items():
        key = f"{architecture}.{name}"
        value = shape[field] = file.metadata.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{where}: {key}={value!r}: allowed: whole numbers from 1")
    shape["num_kv_heads"] = shape["num_kv_heads"] or shape["num_heads"]
    shape["head_dim"] = shape["head_dim"] or (shape["hidden"] or 0) // (shape["num_heads"] or 1)
    # GGUF puts the hidden dimension first, so the vocabulary size is the second.
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{where}: the tensor token_embd.weight is missing")
    if missing := [name for field, name in _KEYS.items() if not shape[field]]:
        raise ConfigError(f"{where}: {architecture}.{missing[0]} is missing")
    return {**shape, "vocab_size": int(embedding.shape[1]), "gated": True}
