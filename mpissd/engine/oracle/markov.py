"""The `markov` workload: the target and the draft are synthetic, exactly known language models.

A hash of a context's last `order` tokens seeds the logits after the context: z = sharpness · E,
where E is exponentially distributed. So the n-th likeliest token is about n^(sharpness/temperature)
times less likely than the likeliest one (Zipf's law), at any size of the vocabulary.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import DEFAULT_VOCAB
from mpissd.common.errors import ConfigError
from mpissd.common.rng import Purpose, stream, uniforms
from mpissd.common.rounds import Ints, Request, Sampling, Speculation
from mpissd.engine.law import sampling
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.oracle.sampled import DrawState, Proposal, SampledDraft, SampledTarget, weigh
from mpissd.engine.oracle.workload import Workload
from mpissd.engine.round.oracle import Proposals
from mpissd.engine.round.sequence import Batch, LiveSequence

Logits = NDArray[np.float32]

SHARPNESS = 1.5
_CACHED_BYTES = 1 << 26  # bytes of memory that cache the logits computed last
_NO_TOKEN = -1  # fills the places of a context before a sequence's first token


@dataclass(frozen=True)
class MarkovModel:
    """A synthetic language model p(next token | last `order` tokens), computed from `seed`.

    divergence: d in the logits (1 − d)·z + d·z′, where z depends only on the seed and the context,
    and z′ is independent of z. So a draft with d > 0 differs from a target with the same seed.
    """

    vocab: int
    order: int
    seed: int
    divergence: float = 0.0

    def context(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the last `order` tokens of a sequence, which are all that the model reads."""
        seen = tuple(tokens[-self.order :])
        return (_NO_TOKEN,) * (self.order - len(seen)) + seen

    def logits(self, context: tuple[int, ...]) -> Logits:
        """Returns the logits after a context, float32 [V], read-only."""
        logits: Logits = _rows(self)(context)
        return logits

    @cached_property
    def likeliest(self) -> int:
        """The token with the largest mean probability over 64 contexts."""
        mean = np.zeros(self.vocab)
        for n in range(64):
            row = np.exp(self.logits((n % self.vocab,) * self.order).astype(np.float64))
            mean += row / row.sum()
        return int(mean.argmax())


def trunk(
    model: MarkovModel, tokens: Sequence[int], served: Sequence[int], shape: Shape
) -> list[tuple[int, ...]]:
    """Returns the model's contexts (last tokens) after the sequence's `tokens`, then after each of
    the drafted tokens `served`, which follow `tokens` as a chain or tree of this shape."""
    contexts = [model.context(tokens)]
    for token, parent in zip(served, shape.parents, strict=False):
        contexts.append(model.context((*contexts[parent], token)))
    return contexts


@lru_cache(maxsize=16)
def _rows(model: MarkovModel):  # type: ignore[no-untyped-def]
    """Returns a function that maps a context to the model's logits, and caches the last results."""

    @lru_cache(maxsize=max(64, _CACHED_BYTES // (4 * model.vocab)))
    def rows(context: tuple[int, ...]) -> Logits:
        mixed = np.zeros(model.vocab)
        for purpose, share in (
            (Purpose.TARGET_ROW, 1 - model.divergence),
            (Purpose.DRAFT_ROW, model.divergence),
        ):
            if share:
                u = stream(model.seed, _word(purpose, context), 0, model.vocab)
                mixed += share * -np.log1p(-u)
        logits: Logits = (SHARPNESS * mixed).astype(np.float32)
        logits.setflags(write=False)
        return logits

    return rows


def _word(purpose: Purpose, context: tuple[int, ...]) -> int:
    words = np.array([int(purpose), *context], np.int64).tobytes()
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class MarkovLaws:
    """The target and draft models of a `markov` job, and how tokens are sampled from them.

    saguaro_c: C in 0..1, by which Saguaro's sampling multiplies the probabilities of the draft's
    likeliest tokens; 1 is plain sampling. prompt_tokens: the length of each sequence's prompt.
    """

    target: MarkovModel
    draft: MarkovModel
    temperature: float
    seed: int
    saguaro_c: float = 1.0
    prompt_tokens: int = 1

    def prompt(self, request_id: int) -> list[int]:
        """Returns a sequence's prompt, with tokens drawn uniformly from the vocabulary."""
        u = uniforms(self.seed, Purpose.PROMPT, request_id, 0, self.prompt_tokens)
        return [int(x) for x in u * self.target.vocab]


class MarkovDraft(SampledDraft):
    """Samples drafted tokens from the draft model, and predicts bonus tokens with it."""

    def __init__(
        self, laws: MarkovLaws, lookahead: int, fan_outs: FanOuts, shape: Shape = CHAIN
    ) -> None:
        super().__init__(laws.seed, lookahead, fan_outs, shape)
        self._laws = laws
        self._settings = Sampling(laws.temperature)
        self.copies = "prompt", laws.draft.order + 1, laws.draft.likeliest

    def prompt(self, request: Request) -> list[int]:
        return self._laws.prompt(request.request_id)

    def _likeliest(self, batch: Batch, count: int) -> Iterator[list[int]]:
        for sequence in batch.sequences:
            for context in trunk(self._laws.draft, sequence.tokens, sequence.served, self.shape):
                yield sampling.largest(self._laws.draft.logits(context), count).tolist()

    def _context(self, sequence: LiveSequence, ahead: list[int]) -> tuple[int, ...]:
        model = self._laws.draft
        return model.context([*sequence.tokens[-model.order :], *ahead])

    def _propose(self, state: DrawState, place: int, u: float) -> Proposal:
        laws = self._laws
        top = state.fan_out[place] if state.fan_out else 0
        logits = laws.draft.logits(state.context)
        weights = weigh(logits, self._settings, None, top, laws.saguaro_c)
        return Proposal(*sampling.propose(weights.probs, u))

    def _ranked(self, states: Sequence[DrawState], n: int) -> Sequence[int]:
        logits = self._laws.draft.logits(states[n].context)
        ranked: list[int] = sampling.largest(logits, self.shape.width).tolist()
        return ranked

    def _follow(self, state: DrawState, token: int) -> None:
        state.context = self._laws.draft.context((*state.context, token))


class MarkovTarget(SampledTarget):
    """Verifies drafts by rejection sampling with the target model, or greedily at temperature 0."""

    def __init__(self, laws: MarkovLaws, shape: Shape = CHAIN) -> None:
        super().__init__(laws.seed, shape)
        self._laws = laws
        self._settings = Sampling(laws.temperature)
        self._contexts: list[tuple[int, ...]] = []  # the context of each verified row

    def prompt(self, request: Request) -> list[int]:
        return self._laws.prompt(request.request_id)

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        model = self._laws.target
        self._contexts = [
            context
            for sequence in batch.sequences
            for context in trunk(model, sequence.tokens, sequence.served, self.shape)
        ]
        return super().judge(batch, speculation, proposals)

    def _target_row(self, sequence: LiveSequence, start: int, i: int) -> sampling.Weights:
        logits = self._laws.target.logits(self._contexts[start + i])
        return weigh(logits, self._settings, ())


_MOST_ROW_BYTES = 1 << 30  # the most bytes of the distributions of one round's drafted tokens


class MarkovWorkload(Workload):
    """The workload whose tokens are sampled from a synthetic target and draft, as flags say."""

    reports_outcomes = True

    @cached_property
    def laws(self) -> MarkovLaws:
        """The target model, the draft model and their sampling parameters, taken from the flags."""
        config = self.job.config
        vocab = config.vocab or DEFAULT_VOCAB
        order = config.order or 2
        divergence = 0.2 if config.divergence is None else config.divergence
        return MarkovLaws(
            target=MarkovModel(vocab, order, config.seed),
            draft=MarkovModel(vocab, order, config.seed, divergence),
            temperature=config.temperature,
            seed=config.seed,
            saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
            prompt_tokens=config.prompt_tokens or 1,
        )

    @property
    def vocab(self) -> int:
        return self.laws.target.vocab

    @property
    def samples(self) -> bool:
        return self.laws.temperature > 0

    @property
    def law(self) -> str:
        laws = self.laws
        return (
            f"markov models of {laws.target.vocab} tokens, order {laws.target.order}, "
            f"divergence {laws.draft.divergence:g}; "
            f"temperature {laws.temperature:g}, Saguaro C {laws.saguaro_c:g}"
        )

    def check(self) -> None:
        """Raises ConfigError if the distributions of a round's drafted tokens do not fit a message,
        or if a node of the draft tree has more children than the vocabulary has tokens."""
        super().check()
        job = self.job
        batch = job.config.batch_size
        if job.shape.width > self.vocab:
            asked = f"tree={job.config.tree}: {job.shape.width} children of a node"
            raise ConfigError(f"{asked}: allowed: at most vocab={self.vocab}")
        size = 4 * batch * job.num_nodes * self.vocab
        if self.samples and size > _MOST_ROW_BYTES:
            raise ConfigError(
                f"batch_size={batch}, {job.num_nodes} drafted tokens, vocab={self.vocab}: "
                f"{size / 1e9:.1f} GB of sampled rows a round: allowed: "
                f"{_MOST_ROW_BYTES / 1e9:.1f} GB"
            )

    def target_oracle(self, stepper: Forwards) -> MarkovTarget:
        return MarkovTarget(self.laws, self.job.shape)

    def draft_oracle(self, stepper: Forwards) -> MarkovDraft:
        return MarkovDraft(self.laws, self.job.lookahead, self.job.fan_outs, self.job.shape)

    def requests(self, first_id: int, count: int) -> list[Request]:
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=self.laws.prompt(n)[-1]) for n in ids]

    def row_fields(self) -> dict[str, Any]:
        laws = self.laws
        return {
            "temperature": laws.temperature,
            "vocab": laws.target.vocab,
            "order": laws.target.order,
            "divergence": laws.draft.divergence,
            "saguaro_c": laws.saguaro_c,
            "prompt_tokens": laws.prompt_tokens,
        }
