"""The configuration of a transformer beyond its widths: positions, norms and biases.

All supported families (Llama, SmolLM2, Mistral, Qwen2.5, Qwen3) are one architecture: RMSNorm,
rotary positions, grouped-query attention and SwiGLU. They differ in the fields of
TransformerConfig.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.common.presets import ModelShape


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches the rotary wavelengths of Llama 3.1 and later (rope_type "llama3").

    factor: divides the frequencies whose wavelength exceeds original / low. low, high: the
    wavelengths between original / high and original / low are interpolated. original: the context
    length in tokens before the scaling.
    """

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class TransformerConfig:
    """Architecture of a supported transformer.

    qkv_bias: q, k and v have a bias (Qwen2.5). qk_norm: q and k are normalised by head (Qwen3).
    tied: the LM head is the embedding. max_positions: the longest context in tokens. head_vocab:
    rows of the LM head; fewer than shape.vocab_size for a draft with a reduced vocabulary. int8:
    the layers' matrices and the head are stored as int8 with a scale for each 32 inputs. kind: of a
    draft that reads its target's hidden state, one of heads.STATE_KINDS; "" for a model that reads
    only tokens. The layers of "medusa" are its heads.
    """

    shape: ModelShape
    family: str
    rope_theta: float = 10000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    max_positions: int = 2048
    head_vocab: int = 0
    int8: bool = False
    kind: str = ""

    def __post_init__(self) -> None:
        if not self.head_vocab:
            object.__setattr__(self, "head_vocab", self.shape.vocab_size)

    def frequencies(self) -> NDArray[np.float64]:
        """Returns the angle, in radians a position, of each rotated pair: float64 [head_dim / 2].

        Source: RoFormer (2104.09864), equation 15, and Llama 3.1's scaling of long wavelengths.
        """
        half = np.arange(0, self.shape.head_dim, 2) / self.shape.head_dim
        angles = self.rope_theta**-half
        scaling = self.rope_scaling
        if scaling is None:
            return angles
        turns = scaling.original * angles / (2 * math.pi)  # in the original context
        smooth = np.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
        return np.asarray((1 - smooth) * angles / scaling.factor + smooth * angles)
