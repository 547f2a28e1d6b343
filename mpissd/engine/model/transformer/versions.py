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
from mpissd.engine.model.transformer.checkpoint import (
    BLOCK,
    EMBEDDING,
    HEAD,
    ArrayTensor,
    Checkpoint,
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
        arrays: Arrays = load(bytes(data))
    except SafetensorError as error:
        raise ProtocolError(f"a version of {len(data)} bytes: {error}") from error
    return arrays


def replaced(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Returns (name: shape) of the tensors that a version of this model replaces: all but the
    embedding, and the LM head where the target lends it."""
    lent = {EMBEDDING, HEAD} if checkpoint.shares_head else {EMBEDDING}
    return {name: size for name, size in tensors(checkpoint.config) if name not in lent}


class Version(Checkpoint):
    """A checkpoint with some of its tensors replaced."""

    def __init__(self, base: Checkpoint, arrays: Arrays) -> None:
        """Raises ProtocolError unless each array replaces a tensor of `base`, in its shape, and
        is finite, and none is missing (`replaced`)."""
        sizes = replaced(base)
        by_name = dict(base.by_name)
        for name, values in arrays.items():
            if values.dtype != np.int8 and not np.isfinite(values).all():
                raise ProtocolError(f"version of {base.name}: {name}: a number is not finite")
            wanted = _size(name, arrays, sizes)
            if values.shape != wanted:
                shapes = f"{name} is {list(values.shape)}, expected {wanted and list(wanted)}"
                raise ProtocolError(f"version of {base.name}: {shapes}")
            if not name.endswith(".scale"):
                scales = arrays[_scale(name)] if values.dtype == np.int8 else None
                by_name[name] = ArrayTensor(values, scales)
        if missing := [name for name in sizes if name not in arrays]:
            which = f"{missing[0]} is missing, one of {len(missing)}"
            raise ProtocolError(f"version of {base.name}: {which}")
        head = base.head_ids()
        super().__init__(base.config, by_name, head_ids=head, shares_head=base.shares_head)


def _size(
    name: str, arrays: Arrays, sizes: Mapping[str, tuple[int, ...]]
) -> tuple[int, ...] | None:
    """Returns the shape that an array must have; None for a tensor that the model lacks."""
    if not name.endswith(".scale"):
        is_whole = arrays[name].dtype != np.int8
        return sizes.get(name) if is_whole or _scale(name) in arrays else None
    outputs, inputs = sizes.get(name.removesuffix("scale") + "weight", (0, 0))
    return outputs, inputs // BLOCK


def _scale(name: str) -> str:
    return name.removesuffix("weight") + "scale"
