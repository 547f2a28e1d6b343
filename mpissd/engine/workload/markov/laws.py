"""What a `markov` job decodes: two models, how they are sampled, and the prompts."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Request
from mpissd.engine.workload.markov.model import MarkovModel


@dataclass(frozen=True)
class MarkovLaws:
    """What a markov job decodes.

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
        """V."""
        return self.target.vocab

    def prompt(self, request_id: int) -> list[int]:
        """The prompt of a sequence, drawn uniformly."""
        u = uniforms(self.seed, Purpose.PROMPT, request_id, 0, self.prompt_tokens)
        return [int(x) for x in u * self.vocab]

    def requests(self, first_id: int, count: int) -> list[Request]:
        """`count` sequences numbered from first_id, behind their prompts."""
        ids = range(first_id, first_id + count)
        return [Request(n, first_token=self.prompt(n)[-1]) for n in ids]
