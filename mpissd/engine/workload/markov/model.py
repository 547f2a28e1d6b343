"""A synthetic language model whose distributions are computed by hashing the context.

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
_NOBODY = -1  # stands for the missing tokens before the first


@dataclass(frozen=True)
class MarkovModel:
    """Language model p(next | last `order` tokens), known for every context.

    divergence: 0 gives the model of the seed, 1 a model independent of it; a value d in between
    mixes their logits, (1 − d)·z + d·z′.
    """

    vocab: int
    order: int
    seed: int
    divergence: float = 0.0

    def context(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the last `order` tokens of a sequence, which are all that the model reads."""
        seen = tuple(tokens[-self.order :])
        return (_NOBODY,) * (self.order - len(seen)) + seen

    def logits(self, context: tuple[int, ...], start: int = 0, stop: int | None = None) -> Logits:
        """Returns the logits of tokens start … stop−1 (default: all) behind a context.

        float32 [stop − start], read-only. A token's logit does not depend on the slice.
        """
        logits: Logits = _rows(self)(context, start, self.vocab if stop is None else stop)
        return logits

    @property
    def likeliest(self) -> int:
        """Token with the largest mean probability over 64 contexts."""
        return _likeliest(self)


def trunk(
    model: MarkovModel, tokens: Sequence[int], served: Sequence[int]
) -> list[tuple[int, ...]]:
    """Returns the model's contexts behind 0, 1, … len(served) served tokens."""
    recent = [*tokens[-model.order :], *served]
    known = len(recent) - len(served)
    return [model.context(recent[: known + n]) for n in range(len(served) + 1)]


@lru_cache(maxsize=16)
def _likeliest(model: MarkovModel) -> int:
    mean = np.zeros(model.vocab)
    for n in range(64):
        row = np.exp(model.logits((n % model.vocab,) * model.order).astype(np.float64))
        mean += row / row.sum()
    return int(mean.argmax())


@lru_cache(maxsize=16)
def _rows(model: MarkovModel):  # type: ignore[no-untyped-def]
    """Returns a function that computes one model's logits, and caches the latest ones."""

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
        logits: Logits = (SHARPNESS * mixed).astype(np.float32)
        logits.setflags(write=False)
        return logits

    return rows


def _word(purpose: Purpose, context: tuple[int, ...]) -> int:
    """Returns a 64-bit hash of the purpose and the context."""
    words = np.array([int(purpose), *context], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")
