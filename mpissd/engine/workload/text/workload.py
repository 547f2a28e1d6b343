"""The `text` workload: two transformers' own logits decide, and prompts are answered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from mpissd.common.errors import ConfigError
from mpissd.common.presets import has_weights
from mpissd.common.rounds import Ints, Request
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.transformer.shard import StateShard, TransformerShard
from mpissd.engine.model.transformer.sources import config_of, known_ids, open_checkpoint
from mpissd.engine.workload.base import WARM_TOKENS, Resolved, RowFields, Workload, laws_label
from mpissd.engine.workload.oracle import OpenGather
from mpissd.engine.workload.text.oracles import LogitsDraft, LogitsTarget
from mpissd.engine.workload.text.prompts import Prompt, digest_of, read_prompts
from mpissd.engine.workload.text.stops import TextEndings
from mpissd.engine.workload.text.tokenizer import Tokenizer, load_tokenizer


class TextWorkload(Workload):
    """Prompts are answered greedily, or sampled at --temperature and --top_p."""

    reports_outcomes = True

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer; None for --prompt_ids."""
        if self.job.config.prompt_ids is not None:
            return None
        return load_tokenizer(self.job.target_where)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The prompts, read only on the lead; raises ConfigError for an unreadable one."""
        job = self.job
        return read_prompts(job.config, self.tokenizer, context=job.longest, vocab=self.vocab)

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        own = frozenset[int]() if self.tokenizer is None else self.tokenizer.stop_ids
        token = self.job.config.stop_token
        return own if token is None else own | {token}

    @property
    def vocab(self) -> int:
        return config_of(self.job.target_where).shape.vocab_size

    @cached_property
    def draft_ids(self) -> Ints | None:
        """The tokens that the draft knows, rising; None for all."""
        if not self.job.drafts_by_transformer:
            return None
        draft = open_checkpoint(self.job.draft_where, target=self.job.target_where)
        return known_ids(draft, self.vocab)

    @property
    def proposal_width(self) -> int:
        return self.vocab if self.draft_ids is None else len(self.draft_ids)

    @property
    def prompt_tokens(self) -> int:
        return self.job.longest

    @property
    def samples(self) -> bool:
        serving = self.job.serving
        return self.job.config.temperature > 0 or (serving is not None and serving.samples)

    @property
    def law(self) -> str:
        config, where = self.job.config, self.job.target_where
        weights = "" if has_weights(where) else " of random weights"
        sampled = f"temperature {config.temperature:g}, top_p {config.top_p:g}"
        how = sampled if self.samples else "greedy"
        return f"text by {self.job.target.name}{weights}, {how}"

    def check(self) -> None:
        """Refuses an invalid stop token, and a context without room for an answer."""
        super().check()
        token, longest = self.job.config.stop_token, self.job.longest
        if token is not None and token >= self.vocab:
            raise ConfigError(f"stop_token={token}: allowed: 0..{self.vocab - 1}")
        if self.job.reads_states and self.job.config.learners:
            asked = f"learners=1 with draft={self.job.draft_where}, which reads hidden states"
            raise ConfigError(f"{asked}: allowed: a draft model of its own")
        if longest < 2:
            raise ConfigError(f"context={longest} with workload=text: allowed: 2 or more tokens")

    def target_oracle(
        self, stepper: Forwards, open_gather: OpenGather | None = None
    ) -> LogitsTarget:
        job = self.job
        shard = job.target_shard
        assert isinstance(shard, TransformerShard), "text without a transformer"
        ranks = [TransformerShard(shard.config, job.tp, n) for n in range(job.tp)]
        teaches = job.config.learners > 0
        # A request of a server may ask for log-probabilities.
        reads = self.samples or job.serving is not None or teaches
        gathers = reads and open_gather is not None and job.tp > 1
        return LogitsTarget(
            stepper,
            job.config.seed,
            samples=self.samples,
            draft_ids=self.draft_ids if self.samples and job.draft is not None else None,
            widths=[part.vocab for part in ranks],
            gather=open_gather() if gathers and open_gather is not None else None,
            teaches=teaches,
        )

    def draft_oracle(self, stepper: Forwards) -> LogitsDraft:
        job, config, shard = self.job, self.job.config, self.job.draft_shard
        return LogitsDraft(
            stepper,
            config.seed,
            job.lookahead,
            job.fan_outs,
            samples=self.samples,
            saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
            ids=self.draft_ids,
            lookup=config.lookup,
            heads=shard.num_heads_used if isinstance(shard, StateShard) else None,
        )

    def request(self, request_id: int, tokens: Sequence[int]) -> Request:
        """Returns the request that continues these tokens, sampled according to the flags."""
        config = self.job.config
        sampled = config.temperature, config.top_p
        return Request(request_id, tokens[-1], 0, tuple(tokens), *sampled)

    def requests(self, first_id: int, count: int) -> list[Request]:
        """Returns prompts first_id …; beyond their number, short ones to warm the job up."""
        requests, every = [], self.prompts
        for n in range(first_id, first_id + count):
            tokens = every[n % len(every)].tokens
            requests.append(self.request(n, tokens if n < len(every) else tokens[:WARM_TOKENS]))
        return requests

    def tabulated(self, group: int = 0) -> list[Request]:
        return []

    @property
    def num_sequences(self) -> int:
        return len(self.prompts)

    def endings(self) -> TextEndings:
        job = self.job
        room = {n: job.longest - len(prompt.tokens) for n, prompt in enumerate(self.prompts)}
        return TextEndings(self.tokenizer, job.config.stop_strings, self.stop_ids, room)

    def row_fields(self) -> RowFields:
        config = self.job.config
        return RowFields(
            temperature=config.temperature,
            vocab=self.vocab,
            saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
            lookup=config.fast_lookup,
            laws=laws_label(config),
            top_p=config.top_p,
            stop=list(config.stop_strings),
            num_prompts=len(self.prompts),
            prompts_sha256=digest_of(self.prompts),
        )


def check_prompts(job: Resolved) -> None:
    """Raises ConfigError if a job of text has a prompt that cannot be answered.

    For the lead, since only the lead must reach the file of prompts.
    """
    if not job.config.is_text:
        return
    count, groups = len(TextWorkload(job).prompts), job.config.groups
    if count < groups:
        raise ConfigError(f"groups={groups} with {count} prompts: allowed: at most {count}")
