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

from mpissd.common.errors import ConfigError
from mpissd.common.rng import Purpose, stream, uniforms
from mpissd.common.rounds import Request

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


@dataclass(frozen=True)
class MarkovLaws:
    """Target and draft model of a markov job, and how tokens are sampled from them.

    Raises ConfigError if the two vocabularies differ.

    saguaro_c: C of σ_{F,C} (1: plain sampling). prompt_tokens: length of each sequence's prompt.
    """

    target: MarkovModel
    draft: MarkovModel
    temperature: float
    seed: int
    saguaro_c: float = 1.0
    prompt_tokens: int = 1

    def __post_init__(self) -> None:
        if self.target.vocab != self.draft.vocab:
            raise ConfigError(
                f"vocabularies of {self.target.vocab} and {self.draft.vocab} tokens: allowed: one"
            )

    @property
    def vocab(self) -> int:
        """Size V of the vocabulary."""
        return self.target.vocab

    def prompt(self, request_id: int) -> list[int]:
        """Returns the prompt of a sequence, drawn uniformly from the vocabulary."""
        u = uniforms(self.seed, Purpose.PROMPT, request_id, 0, self.prompt_tokens)
        return [int(x) for x in u * self.vocab]

    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns `count` requests, numbered from first_id, with their prompts' last tokens."""
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=self.prompt(n)[-1]) for n in ids]
