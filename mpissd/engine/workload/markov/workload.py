"""The `markov` workload as one object: its models, workers, requests, checks and row fields."""

from __future__ import annotations

from functools import cached_property

from mpissd.common.config import DEFAULT_VOCAB
from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Request
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.workload.base import Workload
from mpissd.engine.workload.markov.draft import MarkovDraftWorker
from mpissd.engine.workload.markov.laws import MarkovLaws
from mpissd.engine.workload.markov.model import MarkovModel
from mpissd.engine.workload.markov.target import MarkovTargetWorker
from mpissd.engine.workload.row_fields import RowFields
from mpissd.engine.workload.workers import OpenGather

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
