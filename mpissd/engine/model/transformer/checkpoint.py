"""A model's weights as a table of tensors by their Hugging Face names.

Files, random weights, a draft that borrows tensors of its target, and a newer version of a draft
all give such a table, each with its own kind of Tensor. A Part of a tensor is the share that one
rank packs (Ops). Matrices may be stored in ggml's blocks; int8 with a float16 scale for each 32
inputs is its Q8_0.

A row of results names weights by a digest: files up to 512 MiB are read whole. Reading 140 GB would
take minutes at every start, so the digest of a larger file covers its size, its first 16 MiB (with
the header, and a GGUF's tokenizer) and 64 blocks spread over the rest. Such a digest distinguishes
other models, other training runs, other quantisations and truncated files; it may miss a few bytes
changed on purpose.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError, ProtocolError
from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.model.transformer.config import TransformerConfig

BLOCK = 32  # inputs that share a scale
Floats = NDArray[np.float32]
Blocks = tuple[int, NDArray[np.uint8]]  # ggml's type, and bytes [outputs, blocks, bytes of a block]
PACKED = Q4_0, Q4_1, Q8_0, Q4_K, Q6_K = 2, 3, 8, 12, 14  # ggml's types that a CPU reads as they are
INT8_BITS = 8.5  # of an int8 weight, with its share of a scale
Arrays = Mapping[str, NDArray[Any]]
ALL = slice(None)
EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# What joins a token's embedding and a hidden state in a draft that reads its target's.
JOINED = ("model.embed_norm.weight", "model.state_norm.weight")
JOINS = ("model.embed_proj.weight", "model.state_proj.weight")
HEAD_NORM = "norm.weight"  # norm of one Medusa head, after its residual block
HEAD_IDS = "head_ids"
WHOLE = "whole files"
SAMPLED = "sizes, first 16 MiB and 64 blocks of 64 KiB of files above 512 MiB; others whole"
LARGEST = 1 << 29  # bytes of a file that is read whole
_HEAD, _SAMPLE, _SAMPLES = 1 << 24, 1 << 16, 64
_PIECE = 1 << 24  # bytes read at once
_SPREAD = 0.1  # standard deviation of random norms' weights around 1, and of biases around 0


def tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor; matrices are [outputs, inputs].

    The LM head is left out where it is the embedding. The layers of "medusa" are its heads.
    """
    shape, kind = config.shape, config.kind
    hidden, ffn = shape.hidden, shape.ffn
    yield EMBEDDING, (shape.vocab_size, hidden)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        if kind in ("", "eagle"):
            yield f"{prefix}input_layernorm.weight", (hidden,)
            for name, width in zip("qkv", (shape.q_width, *[shape.kv_width] * 2), strict=True):
                yield f"{prefix}self_attn.{name}_proj.weight", (width, hidden)
                if config.qkv_bias:
                    yield f"{prefix}self_attn.{name}_proj.bias", (width,)
                if config.qk_norm and name != "v":
                    yield f"{prefix}self_attn.{name}_norm.weight", (shape.head_dim,)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, shape.q_width)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}mlp.gate_proj.weight", (ffn, hidden)
        yield f"{prefix}mlp.up_proj.weight", (ffn, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, ffn)
        if kind == "medusa":
            yield prefix + HEAD_NORM, (hidden,)
    if kind in ("mlp", "eagle"):
        yield from ((name, (hidden,)) for name in JOINED)
        yield from ((name, (hidden, hidden)) for name in JOINS)
    if kind != "medusa":
        yield LAST_NORM, (hidden,)
    if not config.tied:
        yield HEAD, (config.head_vocab, hidden)


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
    return ArrayTensor(matrix, scales).part().read()


class Tensor:
    """A vector [n], or a matrix [outputs, inputs]; only the part that is asked for is read.

    The methods take slices with a start and a stop; a vector has rows only.
    """

    shape: tuple[int, ...]
    bits = 16.0  # of a weight in a CPU's memory

    def part(self, rows: slice = ALL, columns: slice = ALL) -> Part:
        """Returns these rows and columns; nothing is read yet."""
        sizes = zip((rows, columns), (*self.shape, 1)[:2], strict=True)
        return Part(self, *(slice(*part.indices(size)[:2]) for part, size in sizes))

    def read(self, rows: slice, columns: slice) -> Floats:
        """Returns the part's values, float32."""
        raise NotImplementedError

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        """Returns a matrix's part in ggml's blocks, as it is stored.

        None if it is stored otherwise, or if the part's columns are no whole blocks.
        """
        return None

    def recipe(self, rows: slice, columns: slice) -> WeightPart | None:
        """Describes a part of random weights, so that a device can make it by itself.

        Its [in, out] are the matrix's columns and rows. None if the weights are not random.
        """
        return None


@dataclass(frozen=True)
class Part:
    """Rows (outputs) and columns (inputs) of a tensor, slices with a start and a stop."""

    tensor: Tensor
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """(outputs, inputs)."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def outputs(self, first: int, last: int) -> Part:
        """Returns the outputs first … last − 1 of this part."""
        start = self.rows.start
        return replace(self, rows=slice(start + first, start + last))

    def read(self) -> Floats:
        """Returns the values, float32."""
        return self.tensor.read(self.rows, self.columns)

    def blocks(self) -> Blocks | None:
        """Returns ggml's blocks if they are stored so; see Tensor.blocks."""
        return self.tensor.blocks(self.rows, self.columns)

    def recipe(self) -> WeightPart | None:
        """Describes random weights; see Tensor.recipe."""
        return self.tensor.recipe(self.rows, self.columns)


class ArrayTensor(Tensor):
    """A tensor in memory, or in a file that is mapped into it."""

    def __init__(self, values: NDArray[Any], scales: NDArray[Any] | None = None) -> None:
        """Takes values of any type; uint16 are the bits of bfloat16.

        scales: of int8 values, float16 [outputs, ⌈inputs / 32⌉].
        """
        self.shape = values.shape
        self._values, self._scales = values, scales
        self.bits = Tensor.bits if scales is None else INT8_BITS

    def read(self, rows: slice, columns: slice) -> Floats:
        part = self._values[rows] if len(self.shape) == 1 else self._values[rows, columns]
        if part.dtype == np.uint16:
            return (part.astype(np.uint32) << 16).view(np.float32)
        floats = np.ascontiguousarray(part, np.float32)
        if self._scales is None:
            return floats
        blocks = self._scales[rows, columns.start // BLOCK : -(-columns.stop // BLOCK)]
        scales = np.repeat(blocks.astype(np.float32), BLOCK, axis=1)
        return floats * scales[:, columns.start % BLOCK :][:, : floats.shape[1]]

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        start, stop = columns.start, columns.stop
        if self._scales is None or start % BLOCK or stop % BLOCK:
            return None
        scales = np.asarray(self._scales[rows, start // BLOCK : stop // BLOCK, None], np.float16)
        values = np.ascontiguousarray(self._values[rows, columns])
        groups = values.reshape(*scales.shape[:2], BLOCK)
        return Q8_0, np.concatenate([scales.view(np.uint8), groups.view(np.uint8)], axis=-1)


class LentRows(Tensor):
    """Rows of a target's LM head that its draft shares, in its blocks or else as an int8 head."""

    def __init__(self, head: Tensor, ids: Ints) -> None:
        """Takes the target's head, and the rising tokens of the draft's rows."""
        self.shape = len(ids), head.shape[1]
        self.bits = head.bits if head.bits < Tensor.bits else INT8_BITS
        self._head, self._ids = head, ids

    def _whole(self, rows: slice) -> tuple[Part, Ints]:
        """Returns the span of the target's head that holds these rows, and their places in it."""
        ids = self._ids[rows]
        first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
        return self._head.part(slice(first, last + 1)), ids - first

    def _quantized(self, rows: slice) -> ArrayTensor:
        whole, places = self._whole(rows)
        return ArrayTensor(*quantize(whole.read()[places]))

    def read(self, rows: slice, columns: slice) -> Floats:
        whole, places = self._whole(rows)
        if whole.blocks() is None:
            return self._quantized(rows).part(columns=columns).read()
        return replace(whole, columns=columns).read()[places]

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        whole, places = self._whole(rows)
        if whole.blocks() is None:
            return self._quantized(rows).part(columns=columns).blocks()
        stored = replace(whole, columns=columns).blocks()
        return None if stored is None else (stored[0], stored[1][places])


class Resized(Tensor):
    """A matrix cut to its first rows, or continued by rows of zeros."""

    def __init__(self, whole: Tensor, count: int) -> None:
        self.shape, self.bits = (count, whole.shape[1]), whole.bits
        self._whole = whole

    def read(self, rows: slice, columns: slice) -> Floats:
        known = self._whole.shape[0]
        part = self._whole.read(slice(min(rows.start, known), min(rows.stop, known)), columns)
        lacking = np.zeros((rows.stop - rows.start - len(part), part.shape[1]), np.float32)
        return np.concatenate([part, lacking]) if len(lacking) else part

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        return self._whole.blocks(rows, columns) if rows.stop <= self._whole.shape[0] else None


class RandomTensor(Tensor):
    """A tensor whose elements are hashes of its name and their places, uniform around `mean`.

    A part therefore holds the values of the whole, whatever T is. scale: standard deviation.
    """

    def __init__(self, key: int, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> None:
        self.shape = shape
        self._key, self._scale, self._mean = key, scale, mean

    def read(self, rows: slice, columns: slice) -> Floats:
        values = np.asarray(self.recipe(rows, columns).values().T)
        return values if len(self.shape) == 2 else values[:, 0] + np.float32(self._mean)

    def recipe(self, rows: slice, columns: slice) -> WeightPart:
        return WeightPart(
            self._key, columns.start, columns.stop, rows.start, rows.stop, self._scale
        )


@dataclass(eq=False)
class Checkpoint:
    """One model's weights: its configuration, and a tensor for each name of `tensors`.

    The LM head is the embedding where config.tied. Rotated pairs of q and k are
    (i, i + head_dim / 2), as in Hugging Face's layout. paths: the files that the digest covers; ()
    for random or replaced weights. head_ids: int32, the token of each row of the LM head, rising;
    None where row i is token i. shares_head: whether the target lends the head.
    """

    config: TransformerConfig
    by_name: Mapping[str, Tensor]
    paths: Sequence[Path] = ()
    head_ids: Ints | None = None
    shares_head: bool = False

    @property
    def name(self) -> str:
        """The model's name."""
        return self.config.shape.name

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

    def part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Part:
        """Returns a part of a tensor; nothing is read yet."""
        return self.by_name[name].part(rows, columns)

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix [outputs, inputs], or of a vector, float32."""
        return self.part(name, rows, columns).read()


def random_checkpoint(config: TransformerConfig, seed: int = 0) -> Checkpoint:
    """Returns random weights; equal seeds give equal weights, also at another depth.

    The scales keep activations near 1 at any depth: what o and down add to the residual stream over
    all layers has variance 1 together.
    """

    def tensor(name: str, size: tuple[int, ...]) -> RandomTensor:
        key = zlib.crc32(f"{seed} {name}".encode())
        if len(size) == 1:
            return RandomTensor(key, size, _SPREAD, 0.0 if name.endswith(".bias") else 1.0)
        scale = float(size[1] ** -0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= float((2 * config.shape.num_layers) ** -0.5)
        return RandomTensor(key, size, scale)

    by_name = {name: tensor(name, size) for name, size in tensors(config)}
    if config.tied:
        by_name[HEAD] = tensor(EMBEDDING, (config.head_vocab, config.shape.hidden))
    return Checkpoint(config, by_name)


def replaced(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns (name: shape) of the tensors that a version of this model replaces: all but the
    embedding, and the LM head where the target lends it."""
    lent = {EMBEDDING, HEAD} if checkpoint.shares_head else {EMBEDDING}
    return {name: size for name, size in tensors(checkpoint.config) if name not in lent}


def new_version(base: Checkpoint, arrays: Arrays) -> Checkpoint:
    """Returns a checkpoint with the tensors of `replaced` taken from arrays.

    arrays: matrices in a float type, or in int8 with a float16 scale for each 32 inputs ("X.weight"
    and "X.scale"); vectors. Raises ProtocolError unless each array has the shape of a tensor of
    `base` and is finite, and none is missing.
    """
    where, sizes, by_name = f"version of {base.name}", replaced(base), dict(base.by_name)
    for name, values in arrays.items():
        if values.dtype != np.int8 and not np.isfinite(values).all():
            raise ProtocolError(f"{where}: {name}: a number is not finite")
        scales, wanted = None, sizes.get(name)
        if name.endswith(".scale"):
            outputs, inputs = sizes.get(name.removesuffix("scale") + "weight", (0, 0))
            wanted = outputs, inputs // BLOCK
        elif values.dtype == np.int8:
            scales = arrays.get(name.removesuffix("weight") + "scale")
            wanted = None if scales is None else wanted
        if values.shape != wanted:
            shapes = f"{name} is {list(values.shape)}, expected {wanted and list(wanted)}"
            raise ProtocolError(f"{where}: {shapes}")
        if not name.endswith(".scale"):
            by_name[name] = ArrayTensor(values, scales)
    if missing := [name for name in sizes if name not in arrays]:
        raise ProtocolError(f"{where}: {missing[0]} is missing, one of {len(missing)}")
    return replace(base, by_name=by_name, paths=())


def packed(arrays: Arrays) -> bytes:
    """Returns a version's arrays as bytes of safetensors."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(values) for name, values in arrays.items()}))


def unpacked(data: bytes | bytearray | memoryview) -> Arrays:
    """Returns the arrays of a version; raises ProtocolError for bytes that are none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: Arrays = load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError(f"a version of {len(data)} bytes: {error}") from error
    return arrays


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
    """Returns a file's digest. It is read again if its time or size differs: a sweep asks often.

    Of a large file it covers the size in decimal, the beginning, and blocks of which the last ends
    the file.
    """
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        if size <= LARGEST:
            while piece := file.read(_PIECE):
                sha256.update(piece)
            return sha256.hexdigest()
        sha256.update(str(size).encode() + file.read(_HEAD))
        for number in range(1, _SAMPLES + 1):
            file.seek(_HEAD + (size - _HEAD - _SAMPLE) * number // _SAMPLES)
            sha256.update(file.read(_SAMPLE))
    return sha256.hexdigest()
