"""The `markov` workload: a synthetic language model that is known exactly drafts and verifies.

Its distributions are computed by hashing the context.

The logits after a context are Zipf-like, in an order given by the hash of the context's last
`order` tokens: z = sharpness · E with E exponential, so that the n-th likeliest token has about
n^(−sharpness/temperature) of the likeliest one's probability, at any vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from mpissd.common.config import DEFAULT_VOCAB
from mpissd.common.errors import ConfigError
from mpissd.common.rng import Purpose, stream, uniforms
from mpissd.common.rounds import Batch, Ints, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.spec import sampling
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.base import RowFields, Workload
from mpissd.engine.workload.history import Histories
from mpissd.engine.workload.rollout import Branches, Lanes, Rollout
from mpissd.engine.workload.sampled import (
    Lane,
    OwnLogits,
    SampledRollout,
    SamplingDraftWorker,
    SamplingTargetWorker,
    gathered,
)
from mpissd.engine.workload.workers import LogitsGather, OpenGather, Proposals

Logits = NDArray[np.float32]

SHARPNESS = 1.5
_CACHED_BYTES = 1 << 26
_NOBODY = -1  # fills the places before the first token


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
        """Returns the logits of tokens start … stop−1 (default: all) after a context.

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
    """Returns the model's contexts after 0, 1, … len(served) served tokens."""
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


class MarkovDraftWorker(SamplingDraftWorker):
    """Samples drafted tokens from the draft model, and predicts bonus tokens with it."""

    def __init__(
        self, stepper: Forwards, laws: MarkovLaws, lookahead: int, fan_outs: FanOuts
    ) -> None:
        """Makes a worker; Saguaro sampling uses `fan_outs` until `branches` is given others."""
        self.stepper, self._laws, self.lookahead = stepper, laws, lookahead
        self._seed, self._fan_outs = laws.seed, fan_outs
        self._histories = Histories(lambda request: laws.prompt(request.request_id))
        self._copies = "prompt", laws.draft.order + 1, laws.draft.likeliest

    def branches(self, batch: Batch, speculation: Speculation, fan_outs: FanOuts) -> Branches:
        """Returns a lane for each of the draft's likeliest tokens after each row of the trunk."""
        self._fan_outs = fan_outs
        model = self._laws.draft
        found: list[tuple[int, int, int, int]] = []  # row, k, place, token
        lanes: list[Lane] = []
        sources = speculation.source.tolist()
        for row, history in enumerate(self._histories.rows(batch)):
            fan_out = fan_outs.behind(sources[row])
            for k, context in enumerate(trunk(model, history.tokens, history.served)):
                served = history.served[k] if k < len(history.served) else None
                ids = sampling.largest(model.logits(context), fan_out[k], served).tolist()
                for place, token in enumerate(ids):
                    found.append((row, k, place, token))
                    behind = model.context((*context, token))
                    sequence, draws = history.request.request_id, history.first_draw(1)
                    lanes.append(Lane(sequence, draws, behind, fan_outs.after_hit))
        table = np.array(found, np.int64).reshape(-1, 4)
        first = table[:, 3].astype(np.int32)
        rollout = SampledRollout(np.zeros(0, np.int64), first, lanes, self.lookahead)
        k_of, place_of = table[:, 1].astype(np.int32), table[:, 2].astype(np.int32)
        return Branches(Lanes(table[:, 0], k_of, place_of), rollout)

    def restart(self, batch: Batch, rows: Sequence[int], source: Source) -> Rollout:
        """Returns new lanes that continue batch rows `rows` from their last committed token.

        FAST lanes get all K tokens at once, with q = 1: by prompt lookup in the sequence, and the
        model's likeliest token for the rest. JIT lanes are grown step by step.
        """
        histories = self._histories.rows(batch)
        lanes = [
            Lane(
                histories[row].request.request_id,
                histories[row].first_draw(),
                self._laws.draft.context(histories[row].tokens),
                self._fan_outs.after_miss,
            )
            for row in rows
        ]
        chosen = np.asarray(rows, np.int64)
        rollout = SampledRollout(chosen, batch.last_tokens[chosen], lanes, self.lookahead)
        if source == Source.FAST:
            for lane, row in enumerate(rows):
                rollout.tokens[lane] = histories[row].copied(self.lookahead, *self._copies)
        return rollout

    def _propose(self, lane: Lane, place: int, u: float) -> tuple[int, float, sampling.Row]:
        """Draws the lane's next token with u: returns (token, its probability, the whole row)."""
        laws = self._laws
        top = lane.fan_out[place] if lane.fan_out else 0
        logits = laws.draft.logits(lane.context)
        probs = sampling.probabilities(logits, laws.temperature, top, laws.saguaro_c)
        token, q, row = sampling.propose(probs, u)
        lane.context = laws.draft.context((*lane.context, token))
        return token, q, row


class MarkovTargetWorker(SamplingTargetWorker):
    """Verifies by rejection sampling against the target model (greedily at temperature 0)."""

    def __init__(
        self,
        stepper: Forwards,
        laws: MarkovLaws,
        *,
        tp: int = 1,
        rank: int = 0,
        gather: LogitsGather | None = None,
    ) -> None:
        """Makes the worker of target rank `rank` of `tp`; needs `gather` if tp ≥ 2."""
        self.stepper, self._laws, self._seed = stepper, laws, laws.seed
        self._tp, self._rank = tp, rank
        self._gather = gather or OwnLogits()
        self._histories = Histories(lambda request: laws.prompt(request.request_id))
        self._contexts: list[tuple[int, ...]] = []
        self._logits: Logits

    def upload(self, batch: Batch, speculation: Speculation, fill: int = 0) -> None:
        self._histories.serve(batch, speculation)
        self._contexts = [
            context
            for history in self._histories.rows(batch)
            for context in trunk(self._laws.target, history.tokens, history.served)
        ]
        super().upload(batch, speculation)

    def launch(self) -> None:
        super().launch()
        self._gather.start(self._local_logits())

    def _local_logits(self) -> Logits:
        """Returns this rank's share of the logits, float32 [rows, ceil(V/T)].

        Columns beyond the vocabulary are −inf.
        """
        share = -(-self._laws.vocab // self._tp)
        start = min(self._rank * share, self._laws.vocab)
        stop = min(start + share, self._laws.vocab)
        local = np.full((len(self._contexts), share), -np.inf, np.float32)
        for row, context in enumerate(self._contexts):
            local[row, : stop - start] = self._laws.target.logits(context, start, stop)
        return local

    def done(self) -> bool:
        return super().done() and self._gather.done()

    def wait(self, waiter: Waiter) -> None:
        super().wait(waiter)
        waiter.until(self._gather.done, "logits of the target ranks")

    def judge(
        self, batch: Batch, speculation: Speculation, proposals: Proposals
    ) -> tuple[Ints, Ints]:
        self._logits = gathered(self._gather)[:, : self._laws.vocab]
        return super().judge(batch, speculation, proposals)

    def _target_row(self, request: Request, start: int, i: int) -> sampling.Floats:
        return sampling.probabilities(self._logits[start + i], self._laws.temperature)


_MOST_ROW_BYTES = 1 << 30
_FLOAT32 = 4


class MarkovWorkload(Workload):
    """Tokens are sampled from a target and a draft model that the flags describe."""

    reports_outcomes = True

    @cached_property
    def laws(self) -> MarkovLaws:
        """The two models and their sampling parameters, from the flags and their defaults."""
        config = self.job.config
        vocab, order = config.vocab or DEFAULT_VOCAB, config.order or 2
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
        return self.laws.vocab

    @property
    def samples(self) -> bool:
        return self.laws.temperature > 0

    @property
    def law(self) -> str:
        laws = self.laws
        return (
            f"markov models of {laws.vocab} tokens, order {laws.target.order}, "
            f"divergence {laws.draft.divergence:g}; "
            f"temperature {laws.temperature:g}, Saguaro C {laws.saguaro_c:g}"
        )

    def check(self) -> None:
        """Raises ConfigError if a round's sampled rows [b, K, V] do not fit one message."""
        super().check()
        job, batch = self.job, self.job.config.batch_size
        size = _FLOAT32 * batch * job.lookahead * self.vocab
        if self.samples and size > _MOST_ROW_BYTES:
            raise ConfigError(
                f"batch_size={batch}, lookahead={job.lookahead}, vocab={self.vocab}: "
                f"{size / 1e9:.1f} GB of sampled rows a round: allowed: "
                f"{_MOST_ROW_BYTES / 1e9:.1f} GB"
            )

    def target_worker(
        self, stepper: Forwards, rank: int = 0, open_gather: OpenGather | None = None
    ) -> MarkovTargetWorker:
        tp = self.job.tp
        gather = None if open_gather is None or tp == 1 else open_gather()
        return MarkovTargetWorker(stepper, self.laws, tp=tp, rank=rank, gather=gather)

    def draft_worker(self, stepper: Forwards) -> MarkovDraftWorker:
        return MarkovDraftWorker(stepper, self.laws, self.job.lookahead, self.job.fan_outs)

    def requests(self, first_id: int, count: int) -> list[Request]:
        return self.laws.requests(first_id, count)

    def row_fields(self) -> RowFields:
        laws = self.laws
        return RowFields(
            temperature=laws.temperature,
            vocab=laws.vocab,
            order=laws.target.order,
            divergence=laws.draft.divergence,
            saguaro_c=laws.saguaro_c,
            prompt_tokens=laws.prompt_tokens,
        )
