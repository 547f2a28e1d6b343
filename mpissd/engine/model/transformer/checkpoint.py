"""A model's weights as a table of tensors by their Hugging Face names.

Files, random weights, a draft that borrows tensors of its target, and a newer version of a draft
all give such a table; what differs is the kind of Tensor in it. Matrices may be stored as int8 in
blocks of 32 inputs, each with a float16 scale.

A row of results names weights by a digest: files up to 512 MiB are read whole. Reading 140 GB would
take minutes at every start, so the digest of a larger file covers its size, its first 16 MiB (with
the header, and a GGUF's tokenizer) and 64 blocks spread over the rest. Such a digest distinguishes
other models, other training runs, other quantisations and truncated files; it may miss a few bytes
changed on purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

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
    shape = config.shape
    hidden, ffn = shape.hidden, shape.ffn
    if config.kind in ("", "eagle"):
        widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
        yield "input_layernorm.weight", (hidden,)
        for name, width in widths.items():
            yield f"self_attn.{name}_proj.weight", (width, hidden)
            if config.qkv_bias:
                yield f"self_attn.{name}_proj.bias", (width,)
            if config.qk_norm and name != "v":
                yield f"self_attn.{name}_norm.weight", (shape.head_dim,)
        yield "self_attn.o_proj.weight", (hidden, shape.q_width)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (ffn, hidden)
    yield "mlp.up_proj.weight", (ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)
    if config.kind == "medusa":
        yield HEAD_NORM, (hidden,)


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
    return ArrayTensor(matrix, scales).read()


class Tensor:
    """A vector [n], or a matrix [outputs, inputs]; only the part that is asked for is read."""

    shape: tuple[int, ...]

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part, float32; a vector has rows only."""
        raise NotImplementedError

    def int8(self, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as it is stored: int8 and the scale of each 32 inputs.

        None if it is stored otherwise, or if the part has no whole groups of 32 inputs.
        """
        return None

    def recipe(self, rows: slice = ALL, columns: slice = ALL) -> WeightPart | None:
        """Describes a part of random weights, so that a device can make it by itself.

        Its [in, out] are the matrix's columns and rows. None if the weights are not random.
        """
        return None


class ArrayTensor(Tensor):
    """A tensor in memory, or in a file that is mapped into it."""

    def __init__(self, values: NDArray[Any], scales: NDArray[Any] | None = None) -> None:
        """Takes values of any type; uint16 are the bits of bfloat16.

        scales: of int8 values, float16 [outputs, ⌈inputs / 32⌉].
        """
        self.shape = values.shape
        self._values, self._scales = values, scales

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Floats:
        part = self._values[rows] if len(self.shape) == 1 else self._values[rows, columns]
        if part.dtype == np.uint16:
            return (part.astype(np.uint32) << 16).view(np.float32)
        floats = np.ascontiguousarray(part, np.float32)
        if self._scales is None:
            return floats
        start, stop, _ = columns.indices(self.shape[1])
        blocks = self._scales[rows, start // BLOCK : -(-stop // BLOCK)].astype(np.float32)
        first = start % BLOCK
        return floats * np.repeat(blocks, BLOCK, axis=1)[:, first : first + stop - start]

    def int8(self, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        start, stop, _ = columns.indices(self.shape[-1])
        if self._scales is None or start % BLOCK or stop % BLOCK:
            return None
        scales = self._scales[rows, start // BLOCK : stop // BLOCK]
        return self._values[rows, columns], scales.astype(np.float32)


class LentRows(Tensor):
    """Rows of a target's LM head that its draft shares, quantised like a stored int8 head."""

    def __init__(self, head: Tensor, ids: Ints) -> None:
        """Takes the target's head, and the rising tokens of the draft's rows."""
        self.shape = len(ids), head.shape[1]
        self._head, self._ids = head, ids

    def _part(self, rows: slice) -> ArrayTensor:
        ids = self._ids[rows]
        first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
        return ArrayTensor(*quantize(self._head.read(slice(first, last + 1))[ids - first]))

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Floats:
        return self._part(rows).read(ALL, columns)

    def int8(self, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        return self._part(rows).int8(ALL, columns)


class Resized(Tensor):
    """A matrix cut to its first rows, or continued by rows of zeros."""

    def __init__(self, whole: Tensor, count: int) -> None:
        self.shape = count, whole.shape[1]
        self._whole = whole

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Floats:
        start, stop, _ = rows.indices(self.shape[0])
        known = self._whole.shape[0]
        part = self._whole.read(slice(min(start, known), min(stop, known)), columns)
        lacking = np.zeros((stop - start - len(part), part.shape[1]), np.float32)
        return np.concatenate([part, lacking]) if len(lacking) else part

    def int8(self, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        start, stop, _ = rows.indices(self.shape[0])
        is_stored = stop <= self._whole.shape[0]
        return self._whole.int8(slice(start, stop), columns) if is_stored else None


class Checkpoint:
    """One model's weights: its configuration and its tensors.

    The LM head is the embedding where config.tied. Rotated pairs of q and k are
    (i, i + head_dim / 2), as in Hugging Face's layout.
    """

    def __init__(
        self,
        config: TransformerConfig,
        by_name: Mapping[str, Tensor],
        *,
        paths: Sequence[Path] = (),
        head_ids: Ints | None = None,
        shares_head: bool = False,
    ) -> None:
        """Takes a tensor for each name of `tensors`, and the head's.

        paths: the files that the digest covers; () for random or replaced weights. head_ids: the
        token of each row of the LM head, rising; None where row i is token i. shares_head: whether
        the target lends the head.
        """
        self.config, self.name, self.by_name = config, config.shape.name, by_name
        self.paths, self._head_ids, self.shares_head = paths, head_ids, shares_head

    @cached_property
    def _digest(self) -> tuple[str | None, str | None]:
        return digest(self.paths) if self.paths else (None, None)

    @property
    def sha256(self) -> str | None:
        """Digest of one file, or of the list that sha256sum prints of several; None without."""
        return self._digest[0]

    @property
    def sha256_of(self) -> str | None:
        """What of the files the digest covers; None without files."""
        return self._digest[1]

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix, float32 [outputs, inputs]."""
        return self.by_name[name].read(rows, columns)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a norm's weight or of a bias, float32."""
        return self.by_name[name].read(part)

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as Tensor.int8 does."""
        return self.by_name[name].int8(rows, columns)

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> WeightPart | None:
        """Describes a part of random weights as Tensor.recipe does."""
        return self.by_name[name].recipe(rows, columns)

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of the LM head, int32, rising; None where row i is token
        i."""
        return self._head_ids


def digest(paths: Sequence[Path]) -> tuple[str, str]:
    """Returns (the SHA-256 of one file, or of the lines "digest  name" of several; its coverage:
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
    """Returns a file's digest. It is read again if its time or size differs: a sweep asks often."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        for piece in _pieces(file, size):
            sha256.update(piece)
    return sha256.hexdigest()


def _pieces(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yields the whole file, or of a large one the size in decimal, the beginning, and blocks of
    which the last ends the file."""
    if size <= LARGEST:
        yield from iter(lambda: file.read(_PIECE), b"")
        return
    yield str(size).encode()
    yield file.read(_HEAD)
    for number in range(1, _SAMPLES + 1):
        file.seek(_HEAD + (size - _HEAD - _SAMPLE) * number // _SAMPLES)
        yield file.read(_SAMPLE)
