"""The `replay` workload as one object: its recording, workers, requests, checks and row fields."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Request
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.workload.base import Endings, RowFields, Workload, laws_label
from mpissd.engine.workload.gemm import ImposedDraft, ImposedTarget
from mpissd.engine.workload.oracle import OpenGather
from mpissd.engine.workload.replay.recording import Recording, load
from mpissd.engine.workload.replay.stream import RecordedDraft, RecordedStream


class RecordedEndings(Endings):
    """Ends each sequence at the end of its recorded answer."""

    def __init__(self, ends: Sequence[int]) -> None:
        super().__init__()
        self._ends = ends

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        left = self._ends[request_id % len(self._ends)] - before
        return left if len(tokens) >= left else None


class ReplayWorkload(Workload):
    """A recording of a real pair at temperature 0 decides tokens, acceptance and hits."""

    reports_outcomes = True

    @cached_property
    def recording(self) -> Recording:
        """The recording that --recording names."""
        path = self.job.config.recording
        if path is None:
            raise ConfigError(
                "recording: needed with workload=replay: allowed: a file of `mpissd pair`"
            )
        return load(path)

    @property
    def vocab(self) -> int:
        return self.recording.vocab

    @property
    def num_sequences(self) -> int:
        return len(self.recording.sequences)

    @property
    def law(self) -> str:
        about = self.recording.about
        pair = "/".join(str(about.get(model, "?")) for model in ("target", "draft"))
        return f"recording {self.recording.label}: {self.num_sequences} prompts by {pair}"

    def check(self) -> None:
        """Refuses a job that needs more than was recorded (K, candidates a row, prompts), and a
        transformer that lacks recorded tokens."""
        super().check()
        job, recording = self.job, self.recording
        wanted = [
            (f"lookahead={job.lookahead}", job.lookahead, recording.lookahead),
            (f"batch_size={job.config.batch_size}", job.config.batch_size, len(self.share(0))),
        ]
        if job.fan_out:
            fan_out = f"fan_out={job.config.fan_out}: {job.widest} candidates a row"
            wanted.append((fan_out, job.widest, recording.widest))
        if job.config.is_transformer and self.vocab > job.target.vocab_size:
            raise ConfigError(
                f"recording={job.config.recording} has {self.vocab} tokens, {job.target.name} "
                f"{job.target.vocab_size}: allowed: forward=gemm, or a target that has as many"
            )
        for name, value, most in wanted:
            if value > most:
                raise ConfigError(
                    f"{name} with recording={job.config.recording}: allowed: at most {most}, as "
                    "recorded"
                )

    def longest_answer(self, request_id: int) -> int:
        parts, limit = self.recording.sequences, super().longest_answer(request_id)
        end = parts[request_id % len(parts)].end
        return end if limit is None else min(end, limit)

    def endings(self) -> RecordedEndings:
        return RecordedEndings([part.end for part in self.recording.sequences])

    def target_oracle(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> ImposedTarget:
        job = self.job
        return ImposedTarget(RecordedStream(self.recording, job.config.batch_size, job.lookahead))

    def draft_oracle(self, stepper: Forwards) -> ImposedDraft:
        job, batch = self.job, self.job.config.batch_size
        widest = min(job.widest, self.recording.widest)  # without branches none is read
        lookup = job.config.fast_lookup
        return ImposedDraft(RecordedDraft(self.recording, batch, job.lookahead, widest, lookup))

    def requests(self, first_id: int, count: int) -> list[Request]:
        parts = self.recording.sequences
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=int(parts[n % len(parts)].prompt[-1])) for n in ids]

    def row_fields(self) -> RowFields:
        config = self.job.config
        return RowFields(
            recording=self.recording.label, lookup=config.fast_lookup, laws=laws_label(config)
        )
