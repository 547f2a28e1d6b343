"""Random weights of any architecture: every element is a hash of its tensor's name and place.

A part therefore holds the values of the whole, whatever T is, and a device may make its part by
itself (`random_part`). The scales keep activations near 1 at any depth.
"""

from __future__ import annotations

import zlib

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend import weights
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.model.transformer.checkpoint import ALL, EMBEDDING, HEAD, Floats, tensors
from mpissd.engine.model.transformer.config import TransformerConfig

_SPREAD = 0.1  # standard deviation of norms' weights around 1, and of biases around 0


class RandomCheckpoint:
    """Random weights of one architecture (a Checkpoint)."""

    def __init__(self, config: TransformerConfig, seed: int = 0) -> None:
        """Makes nothing yet; equal seeds give equal weights, also at another depth."""
        self.config, self.name = config, config.shape.name
        self._seed, self._sizes = seed, dict(tensors(config))

    @property
    def sha256(self) -> str | None:
        """None, because there is no file."""
        return None

    @property
    def sha256_of(self) -> str | None:
        """None, as sha256."""
        return None

    def random_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> WeightPart:
        """Describes a part of a matrix, whose rows are the outputs of the WeightPart."""
        outputs, inputs = self._sizes[EMBEDDING if name == HEAD else name]
        if name == HEAD:
            outputs, name = self.config.head_vocab, EMBEDDING if self.config.tied else HEAD
        out_start, out_stop, _ = rows.indices(outputs)
        in_start, in_stop, _ = columns.indices(inputs)
        return WeightPart(
            self._key(name), in_start, in_stop, out_start, out_stop, self._scale(name, inputs)
        )

    def int8_part(self, name: str, rows: slice = ALL, columns: slice = ALL) -> None:
        """None, because random weights are no int8."""
        return None

    def matrix(self, name: str, rows: slice = ALL, columns: slice = ALL) -> Floats:
        """Returns a part of a matrix, float32 [outputs, inputs]."""
        return np.asarray(weights.part(self.random_part(name, rows, columns)).T)

    def vector(self, name: str, part: slice = ALL) -> Floats:
        """Returns a part of a norm's weight (around 1) or of a bias (around 0)."""
        start, stop, _ = part.indices(self._sizes[name][0])
        values = weights.part(WeightPart(self._key(name), 0, 1, start, stop, _SPREAD))[0]
        return np.asarray(values if name.endswith(".bias") else values + np.float32(1))

    def head_ids(self) -> Ints | None:
        """None, because row i of the head is token i."""
        return None

    def _key(self, name: str) -> int:
        return zlib.crc32(f"{self._seed} {name}".encode())

    def _scale(self, name: str, inputs: int) -> float:
        """Returns the standard deviation of a matrix's elements.

        What o and down add to the residual stream over all layers has variance 1 together.
        """
        scale = float(inputs**-0.5)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            scale *= float((2 * self.config.shape.num_layers) ** -0.5)
        return scale
