"""Random weights of any architecture: every element is a hash of its tensor's name and place.

A part therefore holds the values of the whole, whatever T is, and a device may make its part by
itself (Tensor.recipe). The scales keep activations near 1 at any depth.
"""

from __future__ import annotations

import zlib

import numpy as np

from mpissd.engine.backend import weights
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.model.transformer.checkpoint import (
    ALL,
    EMBEDDING,
    HEAD,
    Checkpoint,
    Floats,
    Tensor,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig

_SPREAD = 0.1  # standard deviation of norms' weights around 1, and of biases around 0


class RandomTensor(Tensor):
    """A tensor of independent elements: uniform, of standard deviation `scale` around `mean`."""

    def __init__(self, key: int, shape: tuple[int, ...], scale: float, mean: float = 0.0) -> None:
        self.shape = shape
        self._key, self._scale, self._mean = key, scale, mean

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Floats:
        if len(self.shape) == 2:
            return np.asarray(weights.part(self.recipe(rows, columns)).T)
        start, stop, _ = rows.indices(self.shape[0])
        values = weights.part(WeightPart(self._key, 0, 1, start, stop, self._scale))[0]
        return np.asarray(values + np.float32(self._mean))

    def recipe(self, rows: slice = ALL, columns: slice = ALL) -> WeightPart:
        out_start, out_stop, _ = rows.indices(self.shape[0])
        in_start, in_stop, _ = columns.indices(self.shape[1])
        return WeightPart(self._key, in_start, in_stop, out_start, out_stop, self._scale)


class RandomCheckpoint(Checkpoint):
    """Random weights of one architecture."""

    def __init__(self, config: TransformerConfig, seed: int = 0) -> None:
        """Makes no number yet; equal seeds give equal weights, also at another depth."""
        depth = config.shape.num_layers

        def tensor(name: str, size: tuple[int, ...]) -> RandomTensor:
            key = zlib.crc32(f"{seed} {name}".encode())
            if len(size) == 1:
                return RandomTensor(key, size, _SPREAD, 0.0 if name.endswith(".bias") else 1.0)
            scale = float(size[1] ** -0.5)
            # What o and down add to the residual stream over all layers has variance 1 together.
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                scale *= float((2 * depth) ** -0.5)
            return RandomTensor(key, size, scale)

        by_name = {name: tensor(name, size) for name, size in tensors(config)}
        if config.tied:
            by_name[HEAD] = tensor(EMBEDDING, (config.head_vocab, config.shape.hidden))
        super().__init__(config, by_name)
