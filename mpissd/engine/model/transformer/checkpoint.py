"""The interface of a model's weights, wherever they come from."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.model.transformer.config import TransformerConfig

Floats = NDArray[np.float32]
Int8 = tuple[NDArray[np.int8], Floats]  # weights, and the scale of each 32 inputs of an output
ALL = slice(None)


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
