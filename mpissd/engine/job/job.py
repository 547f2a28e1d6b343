"""The resolved job: all that a rank computes from its configuration before opening a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from mpissd.common.rounds import Source
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.workload.base import Workload, workload_kind
from mpissd.engine.workload.resolved import Resolved

_FLOAT32 = 4  # bytes of an entry of a distribution


@dataclass(frozen=True)
class Job(Resolved):
    """A resolved configuration with its workload, the options of its forwards and their rows."""

    @cached_property
    def workload(self) -> Workload:
        """The workload that the job decodes."""
        return workload_kind(self.config.workload)(self)

    @property
    def options(self) -> ForwardOptions:
        """Options of the target's forward."""
        config = self.config
        if config.is_transformer:
            return ForwardOptions(
                fuse=True,
                lm_head=True,
                context=self._read_context,
                values=True,
                capacity=self.capacity,
                pool=0 if self.serving is None else self.serving.kv_tokens,
                states=self.reads_states,
            )
        return ForwardOptions(config.fuse, config.lm_head, config.context)

    @property
    def draft_options(self) -> ForwardOptions:
        """Options of the draft's forward.

        With an LM head it reads out as many candidates as a row may need. A lane also reads the KV
        of the 1 … K tokens that it has grown; their mean, rounded up, is counted.
        """
        config, context = self.config, self.options.context
        has_head = config.lm_head or self.drafts_by_transformer
        top_k = self.widest + 1 if has_head and self.fan_out else 1
        own = self.lookahead // 2 + 1 if context else 1
        if not self.drafts_by_transformer:
            return ForwardOptions(config.fuse, config.lm_head, config.context, top_k, own)
        lanes = config.groups * self.group_lanes if self.fan_out else 0
        return replace(
            self.options,
            top_k=top_k,
            own_tokens=own,
            lanes=lanes,
            steps=self.lookahead if lanes else 0,
        )

    @property
    def _read_context(self) -> int:
        """Tokens of KV cache that a sequence's rows read on average, without its prompt.

        In a run limited by rounds, a round counts as many tokens as the imposed acceptance gives,
        rounded so that similar runs share programs; one if nothing is imposed.
        """
        limits = [n for n in (self.config.token_limit, self.config.max_rounds) if n is not None]
        if self.lookahead and self.config.max_rounds is not None and self.workload.is_imposed:
            accepted = round(self.acceptance[Source.CACHE].mean_accepted)
            limits[-1] *= 1 + accepted
        given = 0 if self.config.is_text else self.config.context
        return given + min([*limits, self.longest - given]) // 2

    def target_buckets(self) -> list[int]:
        """Returns the row counts to compile for verifications of up to b(K+1) rows."""
        exact = self.config.batch_size, self.verify_rows, *self._prefill
        return buckets(*exact) if self.serving is None else fine_buckets(*exact)

    def draft_buckets(self) -> list[int]:
        """Returns the row counts to compile for the draft: glue, growth and backup steps."""
        batch, groups = self.config.batch_size, self.config.groups
        exact = [self.verify_rows, self.group_lanes, *self._prefill]
        if groups > 1:  # one forward may carry the rows of all groups
            exact += [groups * rows for rows in (batch, *exact)]
        return buckets(batch, *exact)

    @property
    def _prefill(self) -> list[int]:
        """The row count of a forward over a part of a prompt, if there is one."""
        return [self.prefill_rows] * (self.prefill_rows > 0)

    def rank_bytes(self, itemsize: int) -> tuple[int, int]:
        """Returns the weight and KV bytes of a (target rank, draft rank).

        itemsize: bytes of a weight. An inline draft counts for the target rank.
        """
        batch = self.config.batch_size
        parts = [(self.target_shard, self.target_buckets(), self.options, batch)]
        if (shard := self.draft_shard) is not None:
            rows, sequences = self.draft_buckets(), self.draft_sequences
            parts.append((shard, rows, self.draft_options, sequences))
        draws = self.config.is_text and self.workload.samples and itemsize < _FLOAT32
        kept = self._kept_rows if draws else (0, 0)
        needed = [
            shard.weight_bytes(options, itemsize)
            + shard.cache_bytes(rows[-1], sequences, options, itemsize)
            + shard.scratch_bytes(rows[-1], options, itemsize)
            + count * self.workload.proposal_width * _FLOAT32
            for (shard, rows, options, sequences), count in zip(parts, kept, strict=False)
        ]
        target, draft = [*needed, 0][:2]
        return (target + draft, 0) if self.inline else (target, draft)

    @property
    def _kept_rows(self) -> tuple[int, int]:
        """The most distributions that (a target, the draft) keeps on its GPU at a time.

        Of each drafted token that it draws there, as the verification may need it: of the last
        answer, and of the branches that grow. A target takes one for each sequence that rejects.
        """
        lanes = self.config.groups * self.group_lanes if self.fan_out else 0
        return self.config.batch_size, (self.draft_sequences + lanes) * self.lookahead


def fine_buckets(*exact: int) -> list[int]:
    """Returns row counts for batches that change with every request: four in each octave."""
    steps = {n << shift >> 2 for n in (4, 5, 6, 7) for shift in range(max(exact).bit_length())}
    return sorted({*exact, *(n for n in steps if n <= max(exact))})


def buckets(batch: int, *exact: int) -> list[int]:
    """Returns the row counts to compile: full rounds, and powers of two between."""
    largest = max(batch, *exact)
    powers = {1 << n for n in range(largest.bit_length()) if 1 << n < largest}
    return sorted({batch, *exact, *powers})
