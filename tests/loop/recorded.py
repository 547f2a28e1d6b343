"""Recordings of markov pairs at temperature 0, computed from the definition and the models only."""

from collections.abc import Sequence

import numpy as np

from mpissd.engine.oracle.markov import MarkovLaws, MarkovModel
from mpissd.engine.oracle.replay import Recorded, Recording


def ranked(model: MarkovModel, tokens: Sequence[int]) -> list[int]:
    """All tokens by their logits after these, the likeliest first, of equal ones the smaller."""
    return np.argsort(-model.logits(model.context(tokens)), kind="stable").tolist()


def greedy(model: MarkovModel, tokens: Sequence[int], count: int) -> list[int]:
    found = list(tokens)
    for _ in range(count):
        found.append(ranked(model, found)[0])
    return found[len(tokens) :]


def recorded(
    laws: MarkovLaws, prompt: list[int], limit: int, K: int, F: int, stop: int | None
) -> Recorded:
    tokens = greedy(laws.target, prompt, limit)
    stopped = stop in tokens
    end = tokens.index(stop) + 1 if stop is not None and stopped else limit
    prefixes = [[*prompt, *tokens[:c]] for c in range(end)]
    return Recorded(
        np.array(prompt),
        np.array(greedy(laws.target, prompt, end + K)),
        end,
        stopped,
        np.array([greedy(laws.draft, prefix, K) for prefix in prefixes]),
        np.array([ranked(laws.draft, prefix)[: F + 1] for prefix in prefixes]),
    )


def recording_of(
    laws: MarkovLaws,
    count: int,
    *,
    limit: int = 24,
    K: int = 8,
    F: int = 10,
    stop: int | None = None,
) -> Recording:
    """The recording of the job's first `count` prompts, and of how its fast backup drafts."""
    parts = [recorded(laws, laws.prompt(n), limit, K, F, stop) for n in range(count)]
    vocab, longest, filler = laws.draft.vocab, laws.draft.order + 1, laws.draft.likeliest
    return Recording(vocab, parts, {"target": "table", "draft": "table"}, longest, filler)
