"""A model's weights as a table of tensors by their Hugging Face names.

Such a table is made from files, from random numbers, for a draft that borrows tensors of its
target, and for a newer version of a draft; each source has its own kind of Tensor. A Part of a
tensor is the share that one rank packs for its device. Matrices may be stored in ggml's blocks;
int8 with a float16 scale for each 32 inputs is ggml's Q8_0.

Results name weights by a digest. It covers all of a file up to 512 MiB. Reading 140 GB would take
minutes at every start, so of a larger file it covers the size, the first 16 MiB (with the header,
and a GGUF's tokenizer) and 64 blocks spread over the rest. That distinguishes other models,
training runs and quantisations, and truncated files; it may miss a few bytes changed on purpose.
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

BLOCK = 32  # number of inputs of an int8 weight that share a scale
Floats = NDArray[np.float32]
Blocks = tuple[int, NDArray[np.uint8]]  # (ggml's type, bytes [outputs, blocks, bytes of a block])
PACKED = Q4_0, Q4_1, Q8_0, Q4_K, Q6_K = 2, 3, 8, 12, 14  # ggml type numbers, kept packed on a CPU
INT8_BITS = 8.5  # bits of an int8 weight, with its share of a 16-bit scale
Arrays = Mapping[str, NDArray[Any]]
ALL = slice(None)
EMBEDDING = "model.embed_tokens.weight"
MASKS = "mask_embedding.weight"  # has a row for each mask token of a parallel draft
HEAD = "lm_head.weight"
LAST_NORM = "model.norm.weight"
# Norms and matrices of a draft that joins a token's embedding with its target's hidden state.
JOINED = ("model.embed_norm.weight", "model.state_norm.weight")
JOINS = ("model.embed_proj.weight", "model.state_proj.weight")
HEAD_NORM = "norm.weight"  # the norm after a Medusa head's residual block
HEAD_IDS = "head_ids"
WHOLE = "whole files"
SAMPLED = "sizes, first 16 MiB and 64 blocks of 64 KiB of files above 512 MiB; others whole"
LARGEST = 1 << 29  # size in bytes of the largest file that is digested whole
_HEAD = 1 << 24
_SAMPLE = 1 << 16
_SAMPLES = 64
_PIECE = 1 << 24  # bytes read at once
_SPREAD = 0.1  # standard deviation of random norms' weights around 1, and of biases around 0


def tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the (name, shape) of all of a model's tensors. Matrices are [outputs, inputs]; a
    Medusa head is named as a layer."""
    shape = config.shape
    kind = config.kind
    hidden = shape.hidden
    ffn = shape.ffn
    yield EMBEDDING, (shape.vocab_size, hidden)
    if config.masks:
        yield MASKS, (config.masks, hidden)
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
    """Quantises a matrix [outputs, inputs] to int8, with a scale for each block of 32 inputs;
    returns the integers and the scales, float16 [outputs, inputs / 32]. A block's largest weight
    becomes ±127. dither: float32 [outputs, inputs], uniform in [0, 1), for stochastic rounding
    (1502.02551, section 3): x is rounded up where the dither is less than x − ⌊x⌋. Without dither,
    it is rounded to the nearest integer."""
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
    """Returns the float32 values of an int8 matrix. scales: float16 [outputs, ⌈inputs / 32⌉]."""
    return ArrayTensor(matrix, scales).part().read()


class Tensor:
    """A stored vector [n] or matrix [outputs, inputs], of which methods read only the part that
    they are asked for. bits: how many bits a weight takes in a CPU's memory. rows, columns: the
    ranges of a part, slices with a start and a stop; a vector has rows only."""

    shape: tuple[int, ...]
    bits = 16.0

    def part(self, rows: slice = ALL, columns: slice = ALL) -> Part:
        """Returns the part with these rows and columns; nothing is read yet."""
        sizes = zip((rows, columns), (*self.shape, 1)[:2], strict=True)
        return Part(self, *(slice(*part.indices(size)[:2]) for part, size in sizes))

    def read(self, rows: slice, columns: slice) -> Floats:
        """Returns the values in these rows and columns, float32."""
        raise NotImplementedError

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        """Returns these rows and columns of a matrix in ggml's quantised blocks; None if the matrix
        is not stored so, or if the columns are not whole blocks."""
        return None

    def recipe(self, rows: slice, columns: slice) -> WeightPart | None:
        """Returns the key and the ranges from which a device generates this part's random weights;
        None if the weights are not random."""
        return None


@dataclass(frozen=True)
class Part:
    """A part of a stored tensor. rows, columns: slices of outputs and inputs with both ends."""

    tensor: Tensor
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start

    def outputs(self, first: int, last: int) -> Part:
        """Returns the outputs first … last − 1 of this part."""
        start = self.rows.start
        return replace(self, rows=slice(start + first, start + last))

    def read(self) -> Floats:
        """Returns the part's values, float32."""
        return self.tensor.read(self.rows, self.columns)

    def blocks(self) -> Blocks | None:
        """Returns the part in ggml's quantised blocks; None if it is not stored in whole blocks."""
        return self.tensor.blocks(self.rows, self.columns)

    def recipe(self) -> WeightPart | None:
        """Returns how a device generates the part's random weights, as Tensor.recipe does."""
        return self.tensor.recipe(self.rows, self.columns)


class ArrayTensor(Tensor):
    """A tensor in memory, or in a file that is mapped into memory."""

    def __init__(self, values: NDArray[Any], scales: NDArray[Any] | None = None) -> None:
        """Wraps an array. values: numbers of any type; uint16 holds the bits of bfloat16. scales:
        the scales of int8 values, float16 [outputs, ⌈inputs / 32⌉]."""
        self.shape = values.shape
        self._values = values
        self._scales = scales
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
        if self._scales is None or columns.start % BLOCK or columns.stop % BLOCK:
            return None
        blocks = slice(columns.start // BLOCK, columns.stop // BLOCK)
        scales = np.asarray(self._scales[rows, blocks, None], np.float16)
        values = np.ascontiguousarray(self._values[rows, columns])
        groups = values.reshape(*scales.shape[:2], BLOCK)
        return Q8_0, np.concatenate([scales.view(np.uint8), groups.view(np.uint8)], axis=-1)


class LentRows(Tensor):
    """A draft's LM head that consists of rows of its target's LM head. They stay in ggml's blocks
    if the target's head is stored so, and are quantised to int8 otherwise."""

    def __init__(self, head: Tensor, ids: Ints) -> None:
        """Takes the target's LM head, and `ids`, the token of each of the draft's rows, rising."""
        self.shape = len(ids), head.shape[1]
        self.bits = head.bits if head.bits < Tensor.bits else INT8_BITS
        self._head = head
        self._ids = ids

    def _parts(self, rows: slice, columns: slice) -> tuple[Part, Ints | slice]:
        """Returns a part of the target's head, in quantised blocks, that contains these rows, and
        where in that part the rows are."""
        ids = self._ids[rows]
        first, last = (int(ids[0]), int(ids[-1])) if len(ids) else (0, -1)
        span = self._head.part(slice(first, last + 1))
        if span.blocks() is None:
            return ArrayTensor(*quantize(span.read()[ids - first])).part(columns=columns), ALL
        return replace(span, columns=columns), ids - first

    def read(self, rows: slice, columns: slice) -> Floats:
        part, places = self._parts(rows, columns)
        return part.read()[places]

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        part, places = self._parts(rows, columns)
        stored = part.blocks()
        return None if stored is None else (stored[0], stored[1][places])


class Resized(Tensor):
    """A matrix cut to its first `count` rows, or continued by the rows of `more` or by zeros."""

    def __init__(self, matrix: Tensor, count: int, more: Tensor | None = None) -> None:
        self.shape = (count, matrix.shape[1])
        self.bits = matrix.bits
        self._matrix = matrix
        self._more = more

    def read(self, rows: slice, columns: slice) -> Floats:
        count = self._matrix.shape[0]
        part = self._matrix.read(slice(min(rows.start, count), min(rows.stop, count)), columns)
        if rows.stop <= count:
            return part
        lacking = np.zeros((rows.stop - rows.start - len(part), part.shape[1]), np.float32)
        if self._more is not None:
            lacking = self._more.read(slice(max(rows.start - count, 0), rows.stop - count), columns)
        return np.concatenate([part, lacking])

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        return self._matrix.blocks(rows, columns) if rows.stop <= self._matrix.shape[0] else None


@dataclass(eq=False)
class RandomTensor(Tensor):
    """A tensor of random numbers, uniform around `mean` with standard deviation `scale`. An element
    is a hash of `key` and of its row and column, so that each rank generates only its own part."""

    key: int
    shape: tuple[int, ...]
    scale: float
    mean: float = 0.0

    def read(self, rows: slice, columns: slice) -> Floats:
        values = np.asarray(self.recipe(rows, columns).values().T)
        return values if len(self.shape) == 2 else values[:, 0] + np.float32(self.mean)

    def recipe(self, rows: slice, columns: slice) -> WeightPart:
        sizes = columns.start, columns.stop, rows.start, rows.stop
        return WeightPart(self.key, *sizes, self.scale)


@dataclass(eq=False)
class Checkpoint:
    """One model's weights: its configuration, and a tensor for each name that `tensors` yields.

    The LM head is the embedding where config.tied. The rotated pairs of q and k are (i, i +
    head_dim / 2), as in Hugging Face's layout. paths: the files that the digest covers; () for
    random or replaced weights. head_ids: int32, the token of each row of the LM head, rising; None
    where row i is token i. shares_head: whether the LM head consists of rows of the target's LM
    head.
    """

    config: TransformerConfig
    by_name: Mapping[str, Tensor]
    paths: Sequence[Path] = ()
    head_ids: Ints | None = None
    shares_head: bool = False

    @property
    def name(self) -> str:
        return self.config.shape.name

    @cached_property
    def _digest(self) -> tuple[str | None, str | None]:
        return digest(self.paths) if self.paths else (None, None)

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the weights' file, or of its files' sha256sum lines; None without files."""
        return self._digest[0]

    @property
    def sha256_of(self) -> str | None:
        """How much of the files the digest covers, WHOLE or SAMPLED; None without files."""
        return self._digest[1]

    def part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Part:
        """Returns a part of the tensor `name`; nothing is read yet."""
        return self.by_name[name].part(rows, columns)

    def table(self) -> Part:
        """Returns the embedding [vocab + masks, hidden]; mask token j has row vocab + j."""
        if not self.config.masks:
            return self.part(EMBEDDING)
        count = self.config.shape.vocab_size + self.config.masks
        return Resized(self.by_name[EMBEDDING], count, self.by_name[MASKS]).part()

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of the tensor `name`, float32: [outputs, inputs], or a vector."""
        return self.part(name, rows, columns).read()


def random_checkpoint(config: TransformerConfig, seed: int = 0) -> Checkpoint:
    """Returns random weights, which `seed` decides. Models that differ only in their number of
    layers have the same weights in each common layer, except for the scale of o and down."""

    def tensor(name: str, size: tuple[int, ...]) -> RandomTensor:
        key = zlib.crc32(f"{seed} {name}".encode())
        if len(size) == 1:
            return RandomTensor(key, size, _SPREAD, 0.0 if name.endswith(".bias") else 1.0)
        scale = float(size[1] ** -0.5)  # keeps the scale of activations near 1
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            # The outputs of o and down add up over the layers, so that they are made smaller.
            scale *= float((2 * config.shape.num_layers) ** -0.5)
        return RandomTensor(key, size, scale)

    by_name = {name: tensor(name, size) for name, size in tensors(config)}
    if config.tied:
        by_name[HEAD] = tensor(EMBEDDING, (config.head_vocab, config.shape.hidden))
    return Checkpoint(config, by_name)


def replaced(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of the tensors that a newly trained version of this model contains: all
    except the embeddings of tokens and mask tokens, and except an LM head that its target lends."""
    lent = {EMBEDDING, MASKS, HEAD} if checkpoint.shares_head else {EMBEDDING, MASKS}
    return {name: size for name, size in tensors(checkpoint.config) if name not in lent}


def new_version(base: Checkpoint, arrays: Arrays) -> Checkpoint:
    """Returns `base` with these arrays in place of the tensors that `replaced` names. arrays:
    vectors, and matrices "X.weight" in a float type, or in int8 with float16 scales "X.scale" for
    each 32 inputs. Raises ProtocolError if one is missing, not finite, or of another shape."""
    where = f"version of {base.name}"
    sizes = replaced(base)
    by_name = dict(base.by_name)
    for name, values in arrays.items():
        if values.dtype != np.int8 and not np.isfinite(values).all():
            raise ProtocolError(f"{where}: {name}: a number is not finite")
        scales = None
        wanted = sizes.get(name)
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
    """Returns these arrays as bytes in the format safetensors."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(values) for name, values in arrays.items()}))


def unpacked(data: bytes | bytearray | memoryview) -> Arrays:
    """Returns the arrays in bytes of the format safetensors; raises ProtocolError otherwise."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: Arrays = load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError(f"a version of {len(data)} bytes: {error}") from error
    return arrays


def digest(paths: Sequence[Path]) -> tuple[str, str]:
    """Returns the SHA-256 of one file, or of the lines "digest name" of several files; and the
    constant that says how much of the files it covers, WHOLE or SAMPLED."""
    stats = [(path, path.stat()) for path in paths]
    digests = [(_digest_of(path, at.st_mtime_ns, at.st_size), path.name) for path, at in stats]
    covers = SAMPLED if any(at.st_size > LARGEST for _, at in stats) else WHOLE
    if len(digests) == 1:
        return digests[0][0], covers
    lines = "".join(f"{sha256}  {name}\n" for sha256, name in digests)
    return hashlib.sha256(lines.encode()).hexdigest(), covers


@lru_cache(maxsize=256)
def _digest_of(path: Path, mtime_ns: int, size: int) -> str:
    """Returns a file's SHA-256. Of a file of more than LARGEST bytes, the SHA-256 covers only the
    size in decimal, the first bytes and sampled blocks. mtime_ns: makes a cached digest invalid."""
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
