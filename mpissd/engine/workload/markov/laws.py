"""The two models of a `markov` job, their sampling parameters, and its prompts."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common.errors import ConfigError
from mpissd.common.rng import Purpose, uniforms
from mpissd.common.rounds import Request
from mpissd.engine.workload.markov.model import MarkovModel


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
