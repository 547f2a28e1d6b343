"""A language model whose every distribution is known exactly: rows made by hashing the context.

The logits behind a context are those of a Zipf-like law, in an order that the hash of the context's
last `order` tokens decides: z = sharpness · E with E exponential, so that the n-th likeliest token
has about n^(−sharpness/temperature) of the likeliest one's probability, at any vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rng import Purpose, stream

Logits = NDArray[np.float32]

SHARPNESS = 1.5
_CACHED_BYTES = 1 << 26
_NOBODY = -1  # before the first token


@dataclass(frozen=True)
class MarkovModel:
    """p(next | last `order` tokens) for every context.

    divergence: 0 is the model itself, 1 one that has nothing in common with it; between them the
    logits are mixed, (1 − d)·z + d·z′.
    """

    vocab: int
    order: int
    seed: int
    divergence: float = 0.0

    def context(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """What the model sees of a sequence: its last `order` tokens."""
        seen = tuple(tokens[-self.order :])
        return (_NOBODY,) * (self.order - len(seen)) + seen

    def logits(self, context: tuple[int, ...], start: int = 0, stop: int | None = None) -> Logits:
        """float32 [stop − start] of tokens start … stop−1 (default: all) behind a context.

        Read-only, and equal whichever slice it is asked in.
        """
        found: Logits = _rows(self)(context, start, self.vocab if stop is None else stop)
        return found

    @property
    def likeliest(self) -> int:
        """The token of the largest unigram probability: the mean of softmax over 64 contexts."""
        return _likeliest(self)


@lru_cache(maxsize=16)
def _likeliest(model: MarkovModel) -> int:
    mean = np.zeros(model.vocab)
    for n in range(64):
        row = np.exp(model.logits((n % model.vocab,) * model.order).astype(np.float64))
        mean += row / row.sum()
    return int(mean.argmax())


@lru_cache(maxsize=16)
def _rows(model: MarkovModel):  # type: ignore[no-untyped-def]
    """The rows of one model, the latest kept."""

    @lru_cache(maxsize=max(64, _CACHED_BYTES // (4 * model.vocab)))
    def rows(context: tuple[int, ...], start: int, stop: int) -> Logits:
        mixed = np.zeros(stop - start)
        for purpose, share in (
            (Purpose.TARGET_ROW, 1 - model.divergence),
            (Purpose.DRAFT_ROW, model.divergence),
        ):
            if share:
                u = stream(model.seed, _word(purpose, context), start, stop - start)
                mixed += share * -np.log1p(-u)
        found: Logits = (SHARPNESS * mixed).astype(np.float32)
        found.setflags(write=False)
        return found

    return rows


def _word(purpose: Purpose, context: tuple[int, ...]) -> int:
    """64 bits of a hash of the purpose and the context."""
    told = np.array([int(purpose), *context], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
