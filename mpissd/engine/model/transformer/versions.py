"""A newer version of a model's weights: some tensors of another checkpoint replaced by arrays.

A version travels as bytes of safetensors: matrices in float16, or in int8 with a float16 scale for
each 32 inputs ("X.weight" and "X.scale"), vectors in float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints
from mpissd.engine.model.transformer.checkpoint import (
    ALL,
    BLOCK,
    EMBEDDING,
    HEAD,
    Checkpoint,
    Floats,
    Int8,
    dequantize,
    tensors,
)

Arrays = Mapping[str, NDArray[Any]]


def packed(arrays: Arrays) -> bytes:
    """Returns the bytes of a version."""
    from safetensors.numpy import save

    return bytes(save({name: np.ascontiguousarray(values) for name, values in arrays.items()}))


def unpacked(data: bytes | bytearray | memoryview) -> Arrays:
    """Returns the arrays of a version; raises ProtocolError for bytes that are none."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        found: Arrays = load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError(f"a version of {len(data)} bytes: {error}") from error
    return found


def replaced(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns (name: shape) of the tensors that a version of this model replaces: all but the
    embedding, and the LM head where the target lends it."""
    lent = {EMBEDDING, HEAD} if getattr(checkpoint, "shares_head", False) else {EMBEDDING}
    return {name: size for name, size in tensors(checkpoint.config) if name not in lent}


class Version:
    """A checkpoint with some of its tensors replaced (a Checkpoint)."""

    sha256 = sha256_of = None

    def __init__(self, base: Checkpoint, arrays: Arrays) -> None:
        """Raises ProtocolError unless each array stands for a tensor of `base`, in its shape, and
        is finite, and none is missing (`replaced`)."""
        self.config, self.name = base.config, base.name
        self.shares_head: bool = getattr(base, "shares_head", False)
        self._base, self._arrays = base, arrays
        sizes = replaced(base)
        for name, values in arrays.items():
            if values.dtype != np.int8 and not np.isfinite(values).all():
                raise ProtocolError(f"version of {self.name}: {name}: a number is not finite")
            wanted = self._size(name, sizes)
            if values.shape != wanted:
                told = f"{name} is {list(values.shape)}, expected {wanted and list(wanted)}"
                raise ProtocolError(f"version of {self.name}: {told}")
        if missing := [name for name in sizes if name not in arrays]:
            told = f"{missing[0]} is missing, one of {len(missing)}"
            raise ProtocolError(f"version of {self.name}: {told}")

    def _size(self, name: str, sizes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...] | None:
        """Returns the shape that an array must have; None for a tensor that the model lacks."""
        if not name.endswith(".scale"):
            is_whole = name not in self._arrays or self._arrays[name].dtype != np.int8
            return sizes.get(name) if is_whole or _scale(name) in self._arrays else None
        outputs, inputs = sizes.get(name.removesuffix("scale") + "weight", (0, 0))
        return outputs, inputs // BLOCK

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix, float32 [outputs, inputs]."""
        if name not in self._arrays:
            return self._base.matrix(name, rows, columns)
        values = self._arrays[name]
        if values.dtype == np.int8:
            values = dequantize(values, self._arrays[_scale(name)])
        return np.ascontiguousarray(values[rows, columns], np.float32)

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Int8 | None:
        """Returns a part of a matrix as it is stored, if that is int8."""
        if name not in self._arrays:
            return self._base.int8_part(name, rows, columns)
        values = self._arrays[name]
        start, stop, _ = columns.indices(values.shape[1])
        if values.dtype != np.int8 or start % BLOCK or stop % BLOCK:
            return None
        scales = self._arrays[_scale(name)][rows, start // BLOCK : stop // BLOCK]
        return values[rows, columns], scales.astype(np.float32)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a vector, float32."""
        if name not in self._arrays:
            return self._base.vector(name, part)
        return np.ascontiguousarray(self._arrays[name][part], np.float32)

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Any:
        """Describes a part of random weights; None for one that was replaced."""
        return None if name in self._arrays else self._base.random_part(name, rows, columns)

    def head_ids(self) -> Ints | None:
        """Returns the token of each row of the LM head; None where row i is token i."""
        return self._base.head_ids()


def _scale(name: str) -> str:
    return name.removesuffix("weight") + "scale"
