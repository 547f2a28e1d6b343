"""Reads the tensors of a .gguf file by their Hugging Face names; the library gguf dequantises."""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ConfigError
from mpissd.common.gguf import read_gguf
from mpissd.engine.model.transformer.checkpoint import ALL, Floats
from mpissd.engine.model.transformer.libraries import library
from mpissd.engine.model.transformer.tensors import EMBEDDING, HEAD, LAST_NORM

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
