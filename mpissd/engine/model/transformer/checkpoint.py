"""A model's weights by their Hugging Face names: the interface, and weights from files.

Matrices may be stored as int8 in blocks of 32 inputs, each with a float16 scale. A row of results
names weights by a digest: files up to 512 MiB are read whole. Reading 140 GB would take minutes at
every start, so the digest of a larger file covers its size, its first 16 MiB (with the header, and
a GGUF's tokenizer) and 64 blocks spread over the rest. Such a digest tells apart other models,
other training runs, other quantisations and truncated files; it may miss a few bytes changed on
purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.model.transformer.config import TransformerConfig

BLOCK = 32  # inputs that share a scale
Floats = NDArray[np.float32]
Int8 = tuple[NDArray[np.int8], Floats]  # weights, and the scale of each 32 inputs of an output
ALL = slice(None)
EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# What joins a token's embedding and a hidden state in a draft that reads its target's.
JOINED = ("model.embed_norm.weight", "model.state_norm.weight")
JOINS = ("model.embed_proj.weight", "model.state_proj.weight")
HEAD_NORM = "norm.weight"  # of one Medusa head, after its residual block
HEAD_IDS = "head_ids"
WHOLE = "whole files"
SAMPLED = "sizes, first 16 MiB and 64 blocks of 64 KiB of files above 512 MiB; others whole"
LARGEST = 1 << 29  # bytes of a file that is read whole
_HEAD, _SAMPLE, _SAMPLES = 1 << 24, 1 << 16, 64
_PIECE = 1 << 24  # bytes read at once


def tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor; matrices are [outputs, inputs].

    The LM head is left out where it is the embedding.
    """
    shape = config.shape
    yield EMBEDDING, (shape.vocab_size, shape.hidden)
    for layer in range(shape.num_layers):
        for name, size in layer_tensors(config):
            yield f"model.layers.{layer}.{name}", size
    if config.kind in ("mlp", "eagle"):
        yield from ((name, (shape.hidden,)) for name in JOINED)
        yield from ((name, (shape.hidden, shape.hidden)) for name in JOINS)
    if config.kind != "medusa":
        yield LAST_NORM, (shape.hidden,)
    if not config.tied:
        yield HEAD, (config.head_vocab, shape.hidden)


def layer_tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name within the layer, shape) of the tensors of one layer, or of one Medusa head."""
    hidden, ffn = config.shape.hidden, config.shape.ffn
    if config.kind in ("", "eagle"):
        yield from _attention_tensors(config)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (ffn, hidden)
    yield "mlp.up_proj.weight", (ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)
    if config.kind == "medusa":
        yield HEAD_NORM, (hidden,)


def _attention_tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = config.shape
    widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
    yield "input_layernorm.weight", (shape.hidden,)
    for name, width in widths.items():
        yield f"self_attn.{name}_proj.weight", (width, shape.hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (width,)
        if config.qk_norm and name != "v":
            yield f"self_attn.{name}_norm.weight", (shape.head_dim,)
    yield "self_attn.o_proj.weight", (shape.hidden, shape.q_width)


def quantize(
    matrix: Floats, dither: Floats | None = None
) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Returns int8 [outputs, inputs] and its scales, float16 [outputs, inputs / 32].

    A weight is its integer times its block's scale, which makes the largest of the block ±127.
    dither: float32 [outputs, inputs] in [0, 1): x is rounded up where that is less than x − ⌊x⌋, to
    x on average over a uniform dither (stochastic rounding: 1502.02551, section 3); default: to
    nearest.
    """
    outputs, inputs = matrix.shape
    if inputs % BLOCK:
        raise ConfigError(f"{inputs} inputs of a matrix: allowed: multiples of {BLOCK}")
    blocks = np.asarray(matrix, np.float32).reshape(outputs, inputs // BLOCK, BLOCK)
    tiny = np.finfo(np.float16).tiny
    scales = np.maximum(np.abs(blocks).max(-1) / 127, tiny).astype(np.float16)
    scaled = blocks / scales[..., None].astype(np.float32)
    if dither is None:
        scaled = np.rint(scaled)
    else:
        below = np.floor(scaled)
        scaled = below + (dither.reshape(blocks.shape) < scaled - below)
    return np.clip(scaled, -127, 127).astype(np.int8).reshape(outputs, inputs), scales


def dequantize(matrix: NDArray[np.int8], scales: NDArray[np.float16]) -> Floats:
    """Returns the float32 values of quantised weights."""
    outputs, inputs = matrix.shape
    blocks = matrix.reshape(outputs, inputs // BLOCK, BLOCK).astype(np.float32)
    return np.asarray(blocks * scales[..., None].astype(np.float32)).reshape(outputs, inputs)


class Checkpoint(Protocol):
    """Weights by their Hugging Face names ("model.layers.0.self_attn.q_proj.weight").

    Matrices are [outputs, inputs]. Only the asked part is read, so that each rank of T reads its
    share. "lm_head.weight" is the embedding where config.tied. Rotated pairs of q and k are
    (i, i + head_dim / 2), as in Hugging Face's layout.
    """

    config: TransformerConfig
    name: str

    @property
    def sha256(self) -> str | None:
        """Digest of the files; None for random weights."""

    @property
    def sha256_of(self) -> str | None:
        """What of the files the digest covers; None for random weights."""

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix; raises ConfigError if the file cannot give it."""

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as it is stored: int8 and the scale of each 32 inputs.

        None if it is stored otherwise, or if the part has no whole groups of 32 inputs.
        """

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a vector (a norm's weight or a bias)."""

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> WeightPart | None:
        """Describes a part of a matrix of random weights, so that a device can make it by itself.

        Its [in, out] are the matrix's columns and rows. None if the weights are not random.
        """

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of the LM head, rising; None where row i is token i."""


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
    for number in range(1, _SAMPLES + 1):
        file.seek(_HEAD + (size - _HEAD - _SAMPLE) * number // _SAMPLES)
        yield file.read(_SAMPLE)


class Tensors(Protocol):
    """Tensors of files by their Hugging Face names."""

    paths: list[Path]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns a tensor's shape; None if it is not there."""

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a tensor of one or two dimensions, float32."""

    def int8(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as Checkpoint.int8_part does."""

    def integers(self, name: str) -> Ints | None:
        """Returns a tensor of whole numbers, int32; None if it is not there."""


class FileCheckpoint:
    """Weights of one model in files (a Checkpoint)."""

    def __init__(
        self,
        files: Tensors,
        config: TransformerConfig,
        embedding: Checkpoint | None = None,
        *,
        shares_head: bool = False,
    ) -> None:
        """Judges the tensors; embedding: the model whose input embedding this one reads, if not
        its own. shares_head: its LM head too is that model's, the rows of head_ids.

        Raises ConfigError, one line that names the file and the tensor, if one is missing or has
        another shape than the configuration says.
        """
        self.name, self._files, self._embedding = config.shape.name, files, embedding
        self.shares_head = shares_head
        self._head_ids = files.integers(HEAD_IDS)
        if self._head_ids is not None:
            _check_head_ids(_where(files), self._head_ids, config.shape.vocab_size)
            config = replace(config, head_vocab=len(self._head_ids))
        self.config = replace(config, int8=_is_int8(files, config, shares_head))
        if embedding is not None:
            _check_embedding(_where(files), config, embedding.config)
        elsewhere = {EMBEDDING: embedding is not None, HEAD: shares_head}
        for name, size in tensors(config):
            if not elsewhere.get(name):
                _check_shape(files, name, size)

    @cached_property
    def _digest(self) -> tuple[str, str]:
        return digest(self._files.paths)

    @property
    def sha256(self) -> str | None:
        """Digest of one file, or of the list that sha256sum prints of several."""
        return self._digest[0]

    @property
    def sha256_of(self) -> str | None:
        """What of the files the digest covers."""
        return self._digest[1]

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix, float32 [outputs, inputs]."""
        name = EMBEDDING if name == HEAD and self.config.tied else name
        if name == EMBEDDING and self._embedding is not None:
            return self._embedding.matrix(name, rows, columns)
        if name == HEAD and self.shares_head:
            return dequantize(*self._target_rows(rows))[:, columns]
        return self._files.read(name, rows, columns)

    def _target_rows(self, rows: slice) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
        """Returns rows of the target's LM head, quantised as a head of one's own is stored."""
        assert self._embedding is not None
        ids = np.arange(self.config.head_vocab) if self._head_ids is None else self._head_ids
        ids = ids[rows]
        span = slice(int(ids.min(initial=0)), int(ids.max(initial=-1)) + 1)
        return quantize(self._embedding.matrix(HEAD, span)[ids - span.start])

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as it is stored, if that is int8."""
        name = EMBEDDING if name == HEAD and self.config.tied else name
        if name == EMBEDDING and self._embedding is not None:
            return self._embedding.int8_part(name, rows, columns)
        if name == HEAD and self.shares_head:
            return self._int8_head(rows, columns)
        return self._files.int8(name, rows, columns)

    def _int8_head(self, rows: slice, columns: slice) -> Int8 | None:
        start, stop, _ = columns.indices(self.config.shape.hidden)
        if start % BLOCK or stop % BLOCK:
            return None
        weights, scales = self._target_rows(rows)
        part = slice(start // BLOCK, stop // BLOCK)
        return weights[:, columns], scales[:, part].astype(np.float32)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a norm's weight or of a bias, float32."""
        return self._files.read(name, part)

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """None, because the weights are read from files."""
        return None

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of the LM head, int32; None where row i is token i."""
        return self._head_ids


def _is_int8(files: Tensors, config: TransformerConfig, shares_head: bool) -> bool:
    """Returns whether the matrices that a forward reads are int8: stored, or a shared head's."""
    head = EMBEDDING if config.tied else HEAD
    names = ["model.layers.0.mlp.down_proj.weight", *([] if shares_head else [head])]
    return all(files.shape(n) is not None and files.int8(n) is not None for n in names)


def _where(files: Tensors) -> str:
    """Returns the file, or the folder of several, as messages name it."""
    return repr(str(files.paths[0] if len(files.paths) == 1 else files.paths[0].parent))


def _check_shape(files: Tensors, name: str, size: tuple[int, ...]) -> None:
    """Raises ConfigError unless the files have a tensor of this shape."""
    found = files.shape(name)
    if found is None:
        raise ConfigError(f"{_where(files)}: the tensor {name} is missing")
    if found != size:
        raise ConfigError(f"{_where(files)}: {name} is {list(found)}: allowed: {list(size)}")


def _check_head_ids(where: str, ids: Ints, vocab_size: int) -> None:
    """Raises ConfigError unless a reduced head's ids rise and lie in the vocabulary."""
    if ids.ndim != 1 or not len(ids) or np.any(np.diff(ids) <= 0):
        raise ConfigError(f"{where}: {HEAD_IDS}: allowed: one list of rising token ids")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        told = f"{HEAD_IDS} reaches from {ids[0]} to {ids[-1]}"
        raise ConfigError(f"{where}: {told}: allowed: 0..{vocab_size - 1}")


def _check_embedding(where: str, config: TransformerConfig, target: TransformerConfig) -> None:
    """Raises ConfigError unless the target's embedding fits a draft that reads it."""
    wanted, found = ([told.shape.vocab_size, told.shape.hidden] for told in (config, target))
    if wanted != found:
        raise ConfigError(
            f"{where} reads its target's embedding, {wanted}; that of {target.shape.name} is "
            f"{found}: allowed: the target it was made for"
        )
