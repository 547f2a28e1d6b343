"""Drafts of `mpissd draft` for Hugging Face's `generate`: assisted generation of one sequence.

    with drafted(model, "--pair=smollm2", lookahead=3) as client:
        model.generate(**inputs, prompt_lookup_num_tokens=3)

The argument asks for assisted generation; what assists is then the draft process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpissd.engine.features.draft_client import DraftClient


@dataclass
class Candidates:
    """A CandidateGenerator of transformers 5.19: greedy candidates, without logits."""

    client: DraftClient
    longest: int  # tokens of the prompt and the answer
    seen: int = 0  # tokens at the last call
    requires_model_outputs: ClassVar[bool] = False

    def get_candidates(self, input_ids: Any, **_: object) -> tuple[Any, None]:
        """Returns input_ids [1, n] with up to K drafted tokens after them."""
        (tokens,) = input_ids.tolist()
        added = len(tokens) - self.seen if self.seen else 1
        self.seen = len(tokens)
        ((*drafted,),) = self.client.drafts([(np.array(tokens, np.int32), added)])
        room = max(0, self.longest - len(tokens) - 1)
        return input_ids.new_tensor([[*tokens, *drafted[:room]]]), None

    def update_candidate_strategy(self, *_: object) -> None:
        """Does nothing: the next input_ids tell what was accepted."""


@contextmanager
def drafted(
    model: Any, where: str, lookahead: int, patience_s: float = 0.2, longest: int = 4096
) -> Iterator[DraftClient]:
    """Lets a model's `generate` ask a draft inside the block; arguments: as in DraftClient."""
    client = DraftClient(where, lookahead, patience_s, 1, longest)

    def generator(generation_config: Any, **_: object) -> Candidates:
        return Candidates(client, generation_config.max_length)

    model._get_candidate_generator = generator
    try:
        yield client
    finally:
        del model._get_candidate_generator
        client.close()
