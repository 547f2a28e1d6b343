"""Lets Hugging Face's `generate` (assisted generation, one sequence) use drafts of `mpissd draft`.

    with drafted(model, "--pair=smollm2", lookahead=3) as client:
        model.generate(**inputs, prompt_lookup_num_tokens=3)

The argument prompt_lookup_num_tokens makes `generate` use assisted generation; inside the block its
candidates come from the draft process.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from mpissd.engine.features.draft_client import DraftClient


@dataclass
class Candidates:
    """A CandidateGenerator of transformers 5.19 for greedy draft tokens without logits."""

    client: DraftClient
    longest: int  # most tokens of the prompt and the answer together
    seen: int = 0  # number of tokens at the last call
    requires_model_outputs: ClassVar[bool] = False

    def get_candidates(self, input_ids: Any, **_: object) -> tuple[Any, None]:
        """Returns input_ids [1, n] with up to K draft tokens appended, and None for logits."""
        (tokens,) = input_ids.tolist()
        added = len(tokens) - self.seen if self.seen else 1
        self.seen = len(tokens)
        ((*drafted,),) = self.client.drafts([(np.array(tokens, np.int32), added)])
        room = max(0, self.longest - len(tokens) - 1)
        return input_ids.new_tensor([[*tokens, *drafted[:room]]]), None

    def update_candidate_strategy(self, *_: object) -> None:
        """Does nothing, since the next call's input_ids show which tokens were accepted."""


@contextmanager
def drafted(
    model: Any, where: str, lookahead: int, patience_s: float = 0.2, longest: int = 4096
) -> Iterator[DraftClient]:
    """Makes the model's `generate` use a draft process inside the block. where: the process's
    socket, or flags for a new process. lookahead: K, the most draft tokens of a step. patience_s:
    the longest wait for draft tokens. longest: the most tokens of a sequence."""
    client = DraftClient(where, lookahead, patience_s, 1, longest)

    def generator(generation_config: Any, **_: object) -> Candidates:
        return Candidates(client, generation_config.max_length)

    model._get_candidate_generator = generator
    try:
        yield client
    finally:
        del model._get_candidate_generator
        client.close()
