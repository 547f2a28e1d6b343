"""Pairs of markov models, and what their definition says of the tokens that they emit."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mpissd.common.rounds import Request, Source
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.law.tree import CHAIN, Shape
from mpissd.engine.oracle.markov import MarkovLaws, MarkovModel
from mpissd.engine.round.draft import DraftPolicy


@dataclass(frozen=True)
class Pair:
    """Two models, and how they decode; is_inline: on the lead."""

    mode: str = "ssd"
    vocab: int = 4
    order: int = 1
    divergence: float = 0.5
    temperature: float = 1.0
    saguaro_c: float = 1.0
    prompt_tokens: int = 1
    seed: int = 0
    batch: int = 1
    lookahead: int = 2
    fan_out: tuple[int, ...] | None = None
    fan_out_miss: tuple[int, ...] | None = None
    backup: str = "jit"
    backup_lookahead: int | None = None
    is_inline: bool = False
    tree: Shape = CHAIN

    @property
    def K(self) -> int:
        return 0 if self.mode == "ar" else self.lookahead

    @property
    def fans(self) -> FanOuts:
        if self.mode != "ssd":
            return FanOuts()
        hit = self.fan_out or (2,) * (self.tree.ends[self.K] + 1)
        return FanOuts(hit, self.fan_out_miss or hit)

    @property
    def laws(self) -> MarkovLaws:
        return MarkovLaws(
            target=MarkovModel(self.vocab, self.order, self.seed),
            draft=MarkovModel(self.vocab, self.order, self.seed, self.divergence),
            temperature=self.temperature,
            seed=self.seed,
            saguaro_c=self.saguaro_c,
            prompt_tokens=self.prompt_tokens,
        )

    @property
    def shape(self) -> LinkShape:
        nodes = self.tree.ends[self.K]
        return LinkShape(3, self.batch, nodes, vocab=self.vocab if self.K else 0)

    @property
    def policy(self) -> DraftPolicy:
        return DraftPolicy(
            self.K,
            self.fans,
            Source[self.backup.upper()],
            self.backup_lookahead or self.K,
            sampled=True,
        )

    def requests(self) -> list[Request]:
        """The requests of the whole batch."""
        return [Request(n, first_token=self.laws.prompt(n)[-1]) for n in range(self.batch)]

    def forced(self, answer: list[int]) -> list[int]:
        """The tokens that a grammar forces after an answer."""
        return []


def conditionals(model: MarkovModel, temperature: float, context: Sequence[int]) -> Any:
    """p(· | context), [V], from the model's logits only, without the tested code."""
    z = model.logits(model.context(context)).astype(np.float64)
    weights = np.exp((z - z.max()) / temperature)
    return weights / weights.sum()


def joint_law(pair: Pair, prompt: Sequence[int], count: int) -> dict[tuple[int, ...], float]:
    """P(first `count` tokens) = Π p(token | the tokens before it)."""
    law = {}
    for tokens in product(range(pair.vocab), repeat=count):
        chance = 1.0
        for n, token in enumerate(tokens):
            after = [*prompt, *tokens[:n]]
            chance *= conditionals(pair.laws.target, pair.temperature, after)[token]
        law[tokens] = chance
    return law


def greedy(pair: Pair, count: int, stop_token: int | None = None) -> dict[int, list[int]]:
    """The target's likeliest token, again and again, from the models only."""
    found = {}
    for n in range(pair.batch):
        tokens = pair.laws.prompt(n)
        while len(tokens) < pair.prompt_tokens + count and (
            stop_token not in tokens[pair.prompt_tokens :]
        ):
            model = pair.laws.target
            tokens.append(int(np.argmax(model.logits(model.context(tokens)))))
        found[n] = tokens[pair.prompt_tokens :]
    return found


def deviation(law: Mapping[tuple[int, ...], float], texts: Iterable[Sequence[int]]) -> float:
    """χ² of these texts against a distribution, in standard deviations (Wilson and Hilferty).

    Above 5 is once in 3.5 million lossless runs. Texts of probability 0 give infinity.
    """
    seen = Counter(tuple(text[: len(next(iter(law)))]) for text in texts)
    count = sum(seen.values())
    if any(law.get(text, 0) <= 0 for text in seen):
        return float("inf")
    common = [text for text, chance in law.items() if chance * count >= 5]
    cells = [(seen[text], law[text] * count) for text in common]
    rare = (1 - sum(law[text] for text in common)) * count
    cells.append((count - sum(found for found, _ in cells), rare))
    cells = [(found, wanted) for found, wanted in cells if wanted > 0]
    chi, freedom = sum((a - b) ** 2 / b for a, b in cells), len(cells) - 1
    spread: float = 2 / (9 * freedom)
    return float(((chi / freedom) ** (1 / 3) - 1 + spread) / spread**0.5)
