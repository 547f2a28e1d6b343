"""A model's weights as a table of tensors by their Hugging Face names.

Files, random weights, a draft that borrows tensors of its target, and a newer version of a draft
all give such a table, each with its own kind of Tensor. A Part of a tensor is the share that one
rank packs (Ops). Matrices may be stored in ggml's blocks; int8 with a float16 scale for each 32
inputs is ggml's Q8_0.

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

BLOCK = 32  # inputs that share a scale
Floats = NDArray[np.float32]
Blocks = tuple[int, NDArray[np.uint8]]  # ggml's type, and bytes [outputs, blocks, bytes of a block]
PACKED = Q4_0, Q4_1, Q8_0, Q4_K, Q6_K = 2, 3, 8, 12, 14  # ggml's types that a CPU reads as they are
INT8_BITS = 8.5  # of an int8 weight, with its share of a scale
Arrays = Mapping[str, NDArray[Any]]
ALL = slice(None)
EMBEDDING = "model.embed_tokens.weight"
MASKS = "mask_embedding.weight"  # one row for each mask token of a parallel draft
HEAD = "lm_head.weight"
LAST_NORM = "model.norm.weight"
# What joins a token's embedding and a hidden state in a draft that reads its target's.
JOINED = ("model.embed_norm.weight", "model.state_norm.weight")
JOINS = ("model.embed_proj.weight", "model.state_proj.weight")
HEAD_NORM = "norm.weight"  # norm of one Medusa head, after its residual block
HEAD_IDS = "head_ids"
WHOLE = "whole files"
SAMPLED = "sizes, first 16 MiB and 64 blocks of 64 KiB of files above 512 MiB; others whole"
LARGEST = 1 << 29  # bytes of a file that is read whole
_HEAD = 1 << 24
_SAMPLE = 1 << 16
_SAMPLES = 64
_PIECE = 1 << 24  # bytes read at once
_SPREAD = 0.1  # standard deviation of random norms' weights around 1, and of biases around 0


def tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of all tensors; matrices are [outputs, inputs], Medusa heads layers."""
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
    """Returns int8 [outputs, inputs] and its scales, float16 [outputs, inputs / 32]. A weight is
    its integer times its block's scale, which makes the largest of the block ±127. dither: float32
    [outputs, inputs], uniform in [0, 1), for stochastic rounding (1502.02551, section 3): x is
    rounded up where the dither is less than x − ⌊x⌋. None: to the nearest."""
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
    """A vector [n], or a matrix [outputs, inputs]; only the part that is asked for is read. rows,
    columns: of the part, slices with a start and a stop; a vector has rows only. bits: of a weight
    in a CPU's memory."""

    shape: tuple[int, ...]
    bits = 16.0

    def part(self, rows: slice = ALL, columns: slice = ALL) -> Part:
        """Returns these rows and columns; nothing is read yet."""
        sizes = zip((rows, columns), (*self.shape, 1)[:2], strict=True)
        return Part(self, *(slice(*part.indices(size)[:2]) for part, size in sizes))

    def read(self, rows: slice, columns: slice) -> Floats:
        """Returns the part's values, float32."""
        raise NotImplementedError

    def blocks(self, rows: slice, columns: slice) -> Blocks | None:
        """Returns a matrix's part in ggml's blocks; None if it is not stored so, or if its columns
        are not whole blocks."""
        return None

    def recipe(self, rows: slice, columns: slice) -> WeightPart | None:
        """Describes a part of random weights, so that a device can make it; None: not random."""
        return None


@dataclass(frozen=True)
class Part:
    """Rows (outputs) and columns (inputs) of a tensor, slices with a start and a stop."""

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
        """Returns the values, float32."""
        return self.tensor.read(self.rows, self.columns)

    def blocks(self) -> Blocks | None:
        """Returns the part in ggml's blocks, or None, as Tensor.blocks."""
        return self.tensor.blocks(self.rows, self.columns)

    def recipe(self) -> WeightPart | None:
        """Describes random weights, or returns None, as Tensor.recipe."""
        return self.tensor.recipe(self.rows, self.columns)


class ArrayTensor(Tensor):
    """A tensor in memory, or in a file that is mapped into it."""

    def __init__(self, values: NDArray[Any], scales: NDArray[Any] | None = None) -> None:
        """Takes values of any type, uint16 for the bits of bfloat16; scales: of int8 values,
        float16 [outputs, ⌈inputs / 32⌉]."""
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
    """Rows of a target's LM head that its draft shares, in its blocks or else quantised as int8."""

    def __init__(self, head: Tensor, ids: Ints) -> None:
        """Takes the target's head, and the tokens of the draft's rows, rising."""
        self.shape = len(ids), head.shape[1]
        self.bits = head.bits if head.bits < Tensor.bits else INT8_BITS
        self._head = head
        self._ids = ids

    def _parts(self, rows: slice, columns: slice) -> tuple[Part, Ints | slice]:
        """Returns a part that holds these rows, in blocks, and their places in it."""
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
    """A matrix cut to its first rows, or continued by those of `more` or by zeros."""

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
    """A tensor whose elements are hashes of `key` and their places, so that each rank makes its own
    part; uniform around `mean` with standard deviation `scale`."""

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
    """One model's weights: its configuration, and a tensor for each name of `tensors`.

    The LM head is the embedding where config.tied. The rotated pairs of q and k are (i, i +
    head_dim / 2), as in Hugging Face's layout. paths: the files that the digest covers; () for
    random or replaced weights. head_ids: int32, the token of each row of the LM head, rising; None
    where row i is token i. shares_head: whether the target lends the head.
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
        """Digest of one file, or of the list that sha256sum prints of several; None without."""
        return self._digest[0]

    @property
    def sha256_of(self) -> str | None:
        """What the digest covers of the files, WHOLE or SAMPLED; None without files."""
        return self._digest[1]

    def part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Part:
        """Returns a part of a tensor; nothing is read yet."""
        return self.by_name[name].part(rows, columns)

    def table(self) -> Part:
        """Returns the embedding [vocab + masks, hidden]: mask token j has row vocab + j."""
        if not self.config.masks:
            return self.part(EMBEDDING)
        count = self.config.shape.vocab_size + self.config.masks
        return Resized(self.by_name[EMBEDDING], count, self.by_name[MASKS]).part()

    def read(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix [outputs, inputs], or of a vector, float32."""
        return self.part(name, rows, columns).read()


def random_checkpoint(config: TransformerConfig, seed: int = 0) -> Checkpoint:
    """Returns random weights; equal seeds give a layer equal weights at any number of layers."""

    def tensor(name: str, size: tuple[int, ...]) -> RandomTensor:
        key = zlib.crc32(f"{seed} {name}".encode())
        if len(size) == 1:
            return RandomTensor(key, size, _SPREAD, 0.0 if name.endswith(".bias") else 1.0)
        scale = float(size[1] ** -0.5)  # keeps activations near 1, as o and down add up over layers
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= float((2 * config.shape.num_layers) ** -0.5)
        return RandomTensor(key, size, scale)

    by_name = {name: tensor(name, size) for name, size in tensors(config)}
    if config.tied:
        by_name[HEAD] = tensor(EMBEDDING, (config.head_vocab, config.shape.hidden))
    return Checkpoint(config, by_name)


def replaced(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns {name: shape} of the tensors that a version of this model replaces: all but the
    embedding and its mask tokens, and the LM head where the target lends it."""
    lent = {EMBEDDING, MASKS, HEAD} if checkpoint.shares_head else {EMBEDDING, MASKS}
    return {name: size for name, size in tensors(checkpoint.config) if name not in lent}


def new_version(base: Checkpoint, arrays: Arrays) -> Checkpoint:
    """Returns a checkpoint whose tensors of `replaced` are these arrays. arrays: matrices
    "X.weight" in a float type, or in int8 with float16 scales "X.scale" for each 32 inputs;
    vectors. Raises ProtocolError if one is missing, has another shape than its tensor in `base`, or
    is not finite."""
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
    """Returns arrays as bytes in the format safetensors."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(values) for name, values in arrays.items()}))


def unpacked(data: bytes | bytearray | memoryview) -> Arrays:
    """Returns the arrays in bytes of safetensors; raises ProtocolError for other bytes."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        arrays: Arrays = load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError(f"a version of {len(data)} bytes: {error}") from error
    return arrays


def digest(paths: Sequence[Path]) -> tuple[str, str]:
    """Returns the SHA-256 of one file, or of the lines "digest  name" of several; and what it
    covers, WHOLE or SAMPLED."""
    stats = [(path, path.stat()) for path in paths]
    digests = [(_digest_of(path, at.st_mtime_ns, at.st_size), path.name) for path, at in stats]
    covers = SAMPLED if any(at.st_size > LARGEST for _, at in stats) else WHOLE
    if len(digests) == 1:
        return digests[0][0], covers
    lines = "".join(f"{sha256}  {name}\n" for sha256, name in digests)
    return hashlib.sha256(lines.encode()).hexdigest(), covers


@lru_cache(maxsize=256)
def _digest_of(path: Path, mtime_ns: int, size: int) -> str:
    """Returns a file's digest, read again if its time or size has changed: of a large file that of
    its size in decimal, its beginning, and blocks up to its end."""
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
