"""The `gemm` workload as one object: its workers, requests, checks and row fields."""

from __future__ import annotations

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Request, Source
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.workload.base import Workload
from mpissd.engine.workload.gemm.law import DraftStream, TokenStream
from mpissd.engine.workload.gemm.workers import GemmDraftWorker, GemmTargetWorker
from mpissd.engine.workload.row_fields import RowFields, laws_label
from mpissd.engine.workload.workers import OpenGather


class GemmWorkload(Workload):
    """Tokens, acceptance and cache hits follow the laws that the flags impose."""

    is_imposed = True
    drafts_in_parallel = True

    @property
    def vocab(self) -> int:
        return self.job.target.vocab_size

    @property
    def law(self) -> str:
        job = self.job
        if job.config.is_lookup:
            return f"acceptance {self._labels[1]} of looked-up tokens"
        hits = f", hits {job.hit_law.label}" if job.fan_out else ""
        return f"acceptance {self._labels[0]}{hits}"

    @property
    def _labels(self) -> tuple[str, str]:
        """The acceptance laws as text: of the draft, and of looked-up tokens.

        A file of laws is named by the numbers that it gives at this K.
        """
        job = self.job
        if job.config.laws is None:
            return job.config.acceptance_text, job.config.acceptance_fast
        return job.acceptance[Source.CACHE].label, job.acceptance[Source.FAST].label

    def check(self) -> None:
        """Raises ConfigError if a row needs more than V − 2 candidates.

        The vocabulary without Y and the served token has no more.
        """
        super().check()
        if self.job.fan_out and self.job.widest + 2 > self.vocab:
            raise ConfigError(
                f"fan_out {self.job.config.fan_out}: {self.job.widest} a row: allowed: at most "
                f"vocab_size - 2 = {self.vocab - 2}"
            )

    def target_worker(
        self, stepper: Forwards, rank: int = 0, open_gather: OpenGather | None = None
    ) -> GemmTargetWorker:
        job = self.job
        stream = TokenStream(job.config.seed, self.vocab, job.config.batch_size, job.lookahead)
        return GemmTargetWorker(stepper, stream)

    def draft_worker(self, stepper: Forwards) -> GemmDraftWorker:
        job, capacity = self.job, self.job.config.batch_size
        stream = DraftStream(
            job.config.seed, self.vocab, capacity, job.acceptance, job.hit_law, job.widest
        )
        return GemmDraftWorker(stepper, stream, job.tokens_a_forward)

    def requests(self, first_id: int, count: int) -> list[Request]:
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=n % self.vocab) for n in ids]

    def row_fields(self) -> RowFields:
        job, config = self.job, self.job.config
        if job.draft is None:
            return RowFields()
        return RowFields(
            acceptance=self._labels[0],
            acceptance_fast=self._labels[1] if config.backup == "fast" else None,
            hit_law=job.hit_law.label if job.fan_out else None,
            laws=laws_label(config),
        )
