"""Opens a model's weights by its name: random ones, a Hugging Face folder, or a .gguf.

A draft is mapped to its target's vocabulary if one of the two vocabularies begins with the other.
The config.json of a draft that mpissd distilled names its target by two digests. The digest of the
files identifies one file only. The digest of the norms' weights identifies the model in all its
formats, because a .gguf of any quantisation keeps vectors as they are in the Hugging Face folder. A
fine-tuned model that left its parent's norms as they were (most LoRA) counts as its parent.

Files are memory-mapped, so that each rank reads its slice only. In safetensors a matrix may be
quantised by mpissd ("int8-32"): `X.weight` int8 [out, in] with `X.scale` float16 [out, in / 32],
where element (o, i) is weight · scale[o, i // 32]. The library gguf dequantises a .gguf's tensors.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common import hf_config
from mpissd.common.errors import ConfigError
from mpissd.common.files import check_regular, read_file
from mpissd.common.gguf import is_gguf, read_gguf
from mpissd.common.model_files import has_files, read_shape
from mpissd.common.presets import files_of, is_missing, missing_pair, resolve_model
from mpissd.common.rounds import Ints
from mpissd.common.shapes import MOST_MASKS
from mpissd.common.token_lists import check_same_tokens
from mpissd.engine.model.transformer import config as configs
from mpissd.engine.model.transformer.checkpoint import (
    BLOCK,
    EMBEDDING,
    HEAD,
    HEAD_IDS,
    MASKS,
    PACKED,
    ArrayTensor,
    Blocks,
    Checkpoint,
    Floats,
    LentRows,
    Resized,
    Tensor,
    random_checkpoint,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig

_FETCHED = ["*.json", "*.safetensors", "*.jinja"]
_TIMEOUT_S = 10
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I8": "<i1", "I32": "<i4"}
_LAYER = re.compile(r"(?:model\.layers|blk)\.(\d{1,9})\.")
_UNREAD = "allowed: files without tensors that are not read, as they may change the result"
ROPE_FACTORS = "rope_freqs.weight"
_PIECE = 1 << 17  # elements dequantised at once, so few that they stay in the processor's cache


def library(name: str, what: str) -> ModuleType:
    """Imports the library `name`; raises ConfigError if it is missing. what: the feature that needs
    the library, as the error's message names it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        raise ConfigError(f"{what} needs {name}: pip install 'mpissd[text]'") from missing


def fetch_missing(pair: str | None, *models: str | None) -> None:
    """Downloads the given models that the Hugging Face hub's local cache lacks. pair: the name of a
    pair of a target and a draft. models: names of models; None is skipped. Raises ConfigError,
    which says how to go on without a network."""
    for name in [*(missing_pair(pair) if pair else ()), *filter(None, models)]:
        if not is_missing(name):
            continue
        hub = library("huggingface_hub", name)
        try:
            hub.snapshot_download(name, allow_patterns=_FETCHED, etag_timeout=_TIMEOUT_S)
        except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"{name} is not on this machine and cannot be fetched ({reason}): give "
                "--target=FOLDER (--draft, --pair) with its config.json and *.safetensors, or a "
                ".gguf"
            ) from error


def open_files(
    files: SafetensorsFiles | GgufFiles,
    config: TransformerConfig,
    target: Checkpoint | None = None,
    *,
    shares_head: bool = False,
    depth: int = 0,
) -> Checkpoint:
    """Returns the weights in files; reads no tensor yet but those of mask tokens.

    target: the model that lends its input embedding to a draft without one. shares_head: whether
    the target also lends rows of its LM head, those that the tensor `head_ids` lists. depth: the
    number of layers in the files, which may be more than the configuration has. Raises ConfigError
    for a tensor that is missing, has another shape than in the configuration, or is not read, and
    for mask tokens that are not finite.
    """
    where = repr(str(files.paths[0] if len(files.paths) == 1 else files.paths[0].parent))
    # Only safetensors may list the tokens that a draft can propose.
    ids = files.integers(HEAD_IDS) if isinstance(files, SafetensorsFiles) else None
    by_name = dict[str, Tensor]()
    if ids is not None:
        last = config.shape.vocab_size - 1
        if ids.ndim != 1 or not len(ids) or np.any(np.diff(ids) <= 0):
            raise ConfigError(f"{where}: {HEAD_IDS}: allowed: one list of rising token ids")
        if ids[0] < 0 or ids[-1] > last:
            span = f"{HEAD_IDS} reaches from {ids[0]} to {ids[-1]}"
            raise ConfigError(f"{where}: {span}: allowed: 0..{last}")
        config = replace(config, head_vocab=len(ids))
    if target is not None:
        shapes = config.shape, target.config.shape
        read, lent = ([shape.vocab_size, shape.hidden] for shape in shapes)
        if read != lent:
            raise ConfigError(
                f"{where} reads its target's embedding, {read}; that of {target.name} is {lent}: "
                "allowed: the target it was made for"
            )
        by_name[EMBEDDING] = target.by_name[EMBEDDING]
        if shares_head:
            rows = np.arange(config.head_vocab, dtype=np.int32) if ids is None else ids
            by_name[HEAD] = LentRows(target.by_name[HEAD], rows)
    for name, size in tensors(config):
        if name in by_name:
            continue
        tensor = files.get(name)
        if tensor is None:
            raise ConfigError(f"{where}: the tensor {name} is missing")
        if tensor.shape != size:
            raise ConfigError(f"{where}: {name} is {list(tensor.shape)}: allowed: {list(size)}")
        by_name[name] = tensor
    if config.masks and not np.isfinite(by_name[MASKS].part().read()).all():
        raise ConfigError(f"{where}: {MASKS} has a number that is not finite")
    for name in sorted(files.unread):
        layer = _LAYER.match(name)
        if layer is None or not config.shape.num_layers <= int(layer[1]) < depth:
            raise ConfigError(f"{where}: the tensor {name!r} is not supported: {_UNREAD}")
    if config.tied:
        by_name[HEAD] = by_name[EMBEDDING]
    tensors_ = [tensor for name, tensor in by_name.items() if name not in (EMBEDDING, MASKS)]
    matrices = [tensor for tensor in tensors_ if len(tensor.shape) == 2]
    sizes = [math.prod(matrix.shape) for matrix in matrices]
    bits = sum(m.bits * size for m, size in zip(matrices, sizes, strict=True)) / sum(sizes)
    return Checkpoint(replace(config, bits=bits), by_name, files.paths, ids, shares_head)


def _weight_paths(folder: Path) -> list[Path]:
    """Returns the folder's file model.safetensors, or else the files that its index names."""
    index = folder / INDEX
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not index.exists():
        allowed = f"allowed: a folder with {WEIGHTS} or {INDEX}"
        adapter = ", but an adapter's" if (folder / "adapter_config.json").exists() else ""
        raise ConfigError(f"{str(folder)!r} has no *.safetensors of a model{adapter}: {allowed}")
    try:
        names = set(json.loads(read_file(index))["weight_map"].values())
        paths = [folder / name for name in sorted(names)]
        if not paths:
            raise ValueError("it is empty")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"is no index of safetensors (weight_map): {error}"
        raise ConfigError(f"{str(index)!r} {reason}") from error
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{str(index)!r} names {path.name!r}, which is not there")
    return paths


class SafetensorsFiles:
    """The tensors of a folder of safetensors. unread: names of tensors not returned yet."""

    def __init__(self, folder: Path) -> None:
        """Reads the files' headers; raises ConfigError if a file is missing or damaged."""
        self.paths = _weight_paths(folder)
        self._entries: dict[str, tuple[Path, dict[str, Any]]] = {}
        for path in self.paths:
            for name, entry in _header(path).items():
                if name in self._entries:
                    first = self._entries[name][0].name
                    raise ConfigError(f"{str(path)!r}: {name!r} is in {first}, too: allowed: once")
                self._entries[name] = path, entry
        self.unread = {name for name in self._entries if not name.endswith("rotary_emb.inv_freq")}
        self._maps = {path: np.memmap(path, np.uint8, "r") for path in self.paths}

    def get(self, name: str) -> Tensor | None:
        """Returns a tensor, None if it is missing. Raises ConfigError for an unsupported type."""
        if name not in self._entries:
            return None
        values = self._array(name, [kind for kind in _DTYPES if kind != "I32"])
        if values.dtype != "i1":
            return ArrayTensor(values)
        where = repr(str(self._entries[name][0]))
        scale = name.removesuffix("weight") + "scale"
        if values.ndim != 2:
            raise ConfigError(f"{where}: {name} is I8: allowed: of a matrix alone")
        _, entry = self._entries.get(scale, (None, {}))
        blocks = [len(values), -(-values.shape[1] // BLOCK)]
        if (entry.get("dtype"), entry.get("shape")) != ("F16", blocks):
            kind = f"{entry['dtype']} {entry['shape']}" if entry else "missing"
            raise ConfigError(f"{where}: {scale} is {kind}: allowed: F16 {blocks}")
        return ArrayTensor(values, self._array(scale, ("F16",)))

    def integers(self, name: str) -> Ints | None:
        """Returns a tensor of integers, int32; None if it is missing."""
        return np.array(self._array(name, ("I32",))) if name in self._entries else None

    def _array(self, name: str, kinds: Iterable[str]) -> NDArray[Any]:
        """Returns a tensor as it is stored; raises ConfigError if its dtype is not in `kinds`."""
        path, entry = self._entries[name]
        self.unread.discard(name)
        if entry["dtype"] not in kinds:
            allowed = ", ".join(kinds)
            raise ConfigError(f"{str(path)!r}: {name} is {entry['dtype']}: allowed: {allowed}")
        first, last = entry["data_offsets"]
        data = np.asarray(self._maps[path][first:last])
        values: NDArray[Any] = np.ndarray(entry["shape"], _DTYPES[entry["dtype"]], data)
        return values


def _header(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the dtype, shape and data_offsets (from the start of the file) of each tensor by
    name. The safetensors library only checks the file, since it does not give the offsets."""
    safetensors = library("safetensors", str(path.parent))
    try:
        check_regular(path)
        with safetensors.safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
    except (safetensors.SafetensorError, OSError, ValueError) as error:
        raise ConfigError(f"{str(path)!r} is damaged or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [8 + size + offset for offset in entry["data_offsets"]]
    return dict(header)


def gguf_name(name: str) -> str:
    """Returns the name in a .gguf of a Hugging Face tensor, such as "blk.0.attn_q.weight"."""
    layer = _LAYER.match(name)
    if layer is None:
        return _gguf_name(name)
    return _gguf_name(f"model.layers.0.{name[layer.end() :]}").replace(".0.", f".{layer[1]}.", 1)


@lru_cache(maxsize=256)
def _gguf_name(name: str) -> str:
    """Returns the name in a .gguf of a Hugging Face tensor outside the layers or in layer 0."""
    gguf = library("gguf", "a .gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)  # Qwen3 has all tensors' names
    return str(names.get_name(name, try_suffixes=(".weight", ".bias")) or name)


class GgufTensor(Tensor):
    """A tensor of a .gguf, stored in ggml's blocks, which the library gguf dequantises."""

    def __init__(
        self, data: NDArray[np.uint8], kind: int, shape: tuple[int, ...], head_dim: int
    ) -> None:
        """Wraps a tensor's blocks. data: the blocks, [rows, bytes of a row], or [bytes] of a
        vector. kind: their ggml type. head_dim: the width of a head if the tensor is q or k in
        llama.cpp's order of rows (rotated pairs adjacent), else 0."""
        self.shape = shape
        self._data = data
        self._kind = kind
        self._head_dim = head_dim
        self._block = _block(kind) or (1, 4)
        self.bits = 8 * self._block[1] / self._block[0] if kind in PACKED else Tensor.bits

    def read(self, rows: slice, columns: slice) -> Floats:
        if len(self.shape) == 1:
            values = _values(self._data[None], self._kind)[0]
            return np.asarray(values[self._stored(rows)], np.float32)
        first = columns.start // self._block[0] * self._block[0]
        values = _values(self._bytes(rows, columns), self._kind)
        return values[:, columns.start - first : columns.stop - first]

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        block, size = self._block
        if self._kind not in PACKED or columns.start % block or columns.stop % block:
            return None
        data = self._bytes(rows, columns)
        return self._kind, data.reshape(len(data), -1, size)

    def _stored(self, rows: slice) -> slice | NDArray[np.int64]:
        """Returns which rows of the file hold these rows of the tensor: llama.cpp stores the rows
        of q and k in another order than Hugging Face."""
        if not (width := self._head_dim):
            return rows
        wanted = np.arange(rows.start, rows.stop)
        half, pair = np.divmod(wanted % width, width // 2)
        return np.asarray(wanted - wanted % width + 2 * pair + half)

    def _bytes(self, rows: slice, columns: slice) -> NDArray[np.uint8]:
        """Returns the stored bytes of a part of the matrix, uint8 [rows, n]: of each row, the
        quantised blocks that contain the columns."""
        block, size = self._block
        stored = self._stored(rows)
        return self._data[stored, columns.start // block * size : -(-columns.stop // block) * size]


class GgufFiles:
    """The tensors of a .gguf, which may be split. unread: names of tensors not returned yet."""

    def __init__(self, path: Path, head_dim: int) -> None:
        """Reads the metadata; raises ConfigError if damaged. head_dim: the width of a head."""
        self.file = read_gguf(path)
        self.paths = list(self.file.paths)
        self.unread = set(self.file.tensors)
        self._data = {part: np.memmap(part, np.uint8, "r") for part in self.paths}
        # For "llama" alone, llama.cpp's converter puts the rows of a rotated pair side by side.
        self.is_llama = self.file.metadata["general.architecture"] == "llama"
        self._head_dim = head_dim if self.is_llama else 0

    def get(self, name: str) -> Tensor | None:
        """Returns the tensor of this name, None if missing; raises ConfigError if unreadable."""
        if (info := self.file.tensors.get(gguf_name(name))) is None:
            return None
        self.unread.discard(gguf_name(name))
        where = repr(str(info.path))
        file = self._data[info.path]
        if (sizes := _block(info.kind)) is None:
            raise ConfigError(f"{where}: {name} is of ggml's type {info.kind}, not supported")
        block, size = sizes
        if not info.shape or info.shape[0] % block:
            raise ConfigError(f"{where}: {name}: {info.shape} elements, in blocks of {block}")
        shape = (*info.shape[:0:-1], info.shape[0] // block * size)
        if info.start + math.prod(shape) > len(file):
            raise ConfigError(f"{where} is cut off before the end of {name}")
        data = file[info.start : info.start + math.prod(shape)].reshape(shape)
        is_rotated = name.partition("self_attn.")[2].startswith(("q_proj", "k_proj"))
        return GgufTensor(data, info.kind, info.shape[::-1], is_rotated * self._head_dim)


@lru_cache(maxsize=64)
def _block(kind: int) -> tuple[int, int] | None:
    """Returns (elements, bytes) of a block of a ggml type; None if the library gguf lacks it."""
    gguf = library("gguf", "a .gguf")
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        _values(np.zeros((1, size), np.uint8), kind)
    except (ValueError, KeyError, NotImplementedError):
        return None
    return block, size


def _values(data: NDArray[Any], kind: int) -> Floats:
    """Dequantises whole blocks, bytes [rows, n]. Many blocks are passed as one row: the library
    works on 16 rows at a time, in calls that take longer than their arithmetic."""
    gguf = library("gguf", "a .gguf")
    type_ = gguf.GGMLQuantizationType(kind)
    block, size = gguf.GGML_QUANT_SIZES[type_]
    pieces = np.ascontiguousarray(data).reshape(-1, size)
    values = np.empty((len(pieces), block), np.float32)
    for first in range(0, len(pieces), _PIECE // block):
        part = slice(first, first + _PIECE // block)
        floats = gguf.quants.dequantize(pieces[part].reshape(1, -1), type_)
        values[part] = floats.reshape(-1, block)
    return values.reshape(len(data), data.shape[1] // size * block)


def check_vocabularies(target: str, draft: str) -> None:
    """Raises ConfigError if the vocabularies of two models differ in more than padding. target,
    draft: names of models (a preset, a folder or a file); a model without files passes."""
    here = files_of(target)
    there = files_of(draft)
    if here is not None and there is not None and here != there:
        sizes = resolve_model(target).vocab_size, resolve_model(draft).vocab_size
        check_same_tokens(here, there, sizes)


def known_ids(draft: Checkpoint, vocab: int) -> Ints | None:
    """Returns the tokens that a draft can propose, rising; None if it can propose all of the
    target's. vocab: the size of the target's vocabulary."""
    count = draft.config.head_vocab
    if draft.head_ids is None and count < vocab:
        return np.arange(count, dtype=np.int32)
    return draft.head_ids


def config_of(where: str, target: str | None = None) -> TransformerConfig:
    """Returns the architecture of a model from its metadata, without its weights. where: the
    model's name (a preset, a folder or a file). target: for a draft, the name of its target, to
    whose vocabulary the draft is cut and whose embedding it may use. Raises ConfigError, which says
    what is missing, damaged or unsupported."""
    return _config(where, target, _stamp(where), None if target is None else _stamp(target))


Stamp = tuple[tuple[str, int, int], ...]


@lru_cache(maxsize=32)
def _config(where: str, target: str | None, *stamps: Stamp | None) -> TransformerConfig:
    return open_checkpoint(where, target=target).config


def _stamp(where: str) -> Stamp:
    """Returns (name, time, size) of each of a model's files; they change when a file changes."""
    path = files_of(where)
    if path is None or not os.path.exists(path):
        return ()
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    files = list(read_gguf(path).paths) if is_gguf(path) else files
    stats = [(file, file.stat()) for file in files if file.exists()]  # a link may be broken
    return tuple((str(file), at.st_mtime_ns, at.st_size) for file, at in stats)


def open_checkpoint(where: str, seed: int = 0, target: str | None = None) -> Checkpoint:
    """Opens a model's weights; reads no tensor yet. where: the model's name (a preset, a folder or
    a file). seed: decides random weights. target: for a draft, the name of its target: the draft's
    LM head is cut to the target's vocabulary, and tokens that the draft lacks are never drafted.
    Raises ConfigError if a file is missing, damaged or unsupported."""
    path = files_of(where)
    shape = resolve_model(where)
    other = None if target is None else open_checkpoint(target)
    vocab_size = shape.vocab_size if other is None else other.config.shape.vocab_size

    def mapped(config: TransformerConfig) -> TransformerConfig:
        sized = replace(config.shape, vocab_size=vocab_size)
        return replace(config, shape=sized, head_vocab=min(config.head_vocab, vocab_size))

    if path is None or not has_files(path):
        config = configs.of_preset(shape) if path is None else configs.of_folder(path, shape)
        masks = config.masks or (0 if target is None else MOST_MASKS)
        return random_checkpoint(mapped(replace(config, masks=masks)), seed)
    depth = read_shape(path)["num_layers"]
    if is_gguf(path):
        gguf = GgufFiles(path, shape.head_dim)
        factors = gguf.get(ROPE_FACTORS) if gguf.is_llama else None
        read = None if factors is None else factors.part().read()
        opened = open_files(gguf, configs.of_gguf(gguf.file, shape, read), depth=depth)
    else:
        config = configs.of_folder(path / "config.json", shape)
        files = SafetensorsFiles(path)
        ours = configs.own_keys(hf_config.load(path / "config.json"))
        reads_target = ours.get("embedding") == "target"
        if reads_target and other is None:
            raise ConfigError(f"{str(path)!r} reads its target's embedding: allowed: as a draft")
        shares_head = reads_target and ours.get("head") == "target"
        # An LM head in the files is used even if config.json says that the embedding is the head.
        config = replace(config, tied=config.tied and HEAD not in files.unread)
        lender = other if reads_target else None
        opened = open_files(files, config, lender, shares_head=shares_head, depth=depth)
    if vocab_size == shape.vocab_size:
        return opened
    config = mapped(opened.config)
    ids = opened.head_ids
    if ids is not None:  # ids rise, so that those that the target lacks come last
        ids = ids[ids < vocab_size]
        config = replace(config, head_vocab=len(ids))
    by_name = dict(opened.by_name)  # tokens that the draft lacks have an embedding of zeros
    for name, rows in ((EMBEDDING, vocab_size), (HEAD, config.head_vocab)):
        by_name[name] = Resized(by_name[name], rows)
    return replace(opened, config=config, by_name=by_name, head_ids=ids)


_ORIGIN_KEYS = "target", "target_sha256", "target_norms_sha256"


def origin_of(target: Checkpoint) -> dict[str, str | None]:
    """Returns what a draft's config.json stores about its target, by key: the target's name, the
    SHA-256 of its files (None if it has random weights), and the SHA-256 of the weights of all its
    norms as float32, in the order of `tensors` (None if all are 1, as before training)."""
    names = (name for name, _ in tensors(target.config) if name.endswith("norm.weight"))
    norms = np.concatenate([np.asarray(target.read(name), "<f4") for name in names])
    digest = hashlib.sha256(norms.tobytes()).hexdigest() if np.any(norms != 1) else None
    return dict(zip(_ORIGIN_KEYS, (target.name, target.sha256, digest), strict=True))


def _origin(draft: str, target: str) -> tuple[str | None, str | None, bool | None]:
    """Returns the name and SHA-256 of the target that a draft's files name (None: none), and
    whether `target` is that model (None: unknown). Raises ConfigError for a damaged config.json."""
    path = files_of(draft)
    if path is None or not (path / "config.json").is_file():
        return None, None, None
    ours = configs.own_keys(hf_config.load(path / "config.json"))
    values = (ours.get(key) for key in _ORIGIN_KEYS)
    name, sha256, norms = (value if isinstance(value, str) else None for value in values)
    if name is None:
        return None, None, None
    _, target_sha256, target_norms = origin_of(open_checkpoint(target)).values()
    if norms is not None and target_norms is not None:
        return name, sha256, norms == target_norms
    return name, sha256, True if sha256 is not None and sha256 == target_sha256 else None


def made_for(draft: str, target: str) -> bool | None:
    """Returns whether a draft was made for this target, both given by name; None if unknown."""
    return _origin(draft, target)[2]


def doubt(draft: str, target: str) -> str:
    """Returns a warning if a draft's files name a target that may differ from this one; else ""."""
    name, sha256, is_of = _origin(draft, target)
    if name is None or is_of:
        return ""
    other = open_checkpoint(target).name
    why = f"not for {other}, whose weights differ: few of its tokens may be accepted"
    if is_of is None:
        files = "no file" if sha256 is None else f"files of sha256 {sha256[:12]}"
        why = f"from {files}: whether {other} is the same model is not known"
    return f"draft={draft} was made for {name}, {why}"
