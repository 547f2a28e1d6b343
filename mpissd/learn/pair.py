"""A target, its draft, and how far the draft is from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.learn.llama import Blocks, Llama, Tensor, blocks_of, compiled, mapped, named
from mpissd.learn.muon import optimizer_for, parameters
from mpissd.learn.sample import Samples, States


@dataclass(frozen=True)
class Batch:
    """tokens: [b, n]. rows: positions in the flattened tokens. weights: [rows], 0 for one that does
    not count. states: the target's results at these rows ([rows, …] each)."""

    tokens: Tensor
    rows: Tensor
    weights: Tensor
    states: States | None


def batch_of(samples: Samples, num_rows: int) -> Batch:
    """Returns a batch of all these sequences with `num_rows` rows, drawn among the answered."""
    counts = samples.answered[:, 1:].flatten().float()
    rows = (counts + 0.5 * torch.rand_like(counts)).topk(min(num_rows, len(counts))).indices
    states = samples.states
    if states is not None:
        states = States(
            states.hidden[:, :-1].flatten(0, 1)[rows],
            states.total[:, :-1].flatten()[rows],
            states.best[:, :-1].flatten()[rows].long(),
        )
    return Batch(samples.tokens[:, :-1].long(), rows, counts[rows], states)


@dataclass(frozen=True)
class Pair:
    """The target, the draft, the token ids of the draft's head, and the draft's architecture.

    blocks: the target's arithmetic. table: cosines and sines by position.
    """

    target: Llama
    draft: Llama
    head_ids: Tensor
    blocks: Blocks
    config: TransformerConfig
    table: tuple[Tensor, Tensor]

    @property
    def draft_blocks(self) -> Blocks:
        """The draft's arithmetic."""
        return blocks_of(self.config, self.blocks.dtype)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Pair:
        """Returns the pair with `change` applied to each of the draft's own tensors."""
        return replace(self, draft=mapped(self.draft, change))

    def named(self) -> dict[str, Tensor]:
        """Returns the draft's own weights by their names in files."""
        return named(self.draft, self.config)

    def angles(self, length: int) -> list[Tensor]:
        """Returns cos and sin of the first positions."""
        return [part[:length] for part in self.table]


class Losses:
    """Divergence, total variation and greedy agreement of a pair on batches."""

    def __init__(self, pair: Pair, is_compiled: bool) -> None:
        self.pair = pair
        self.blocks, self.draft_blocks = pair.blocks, pair.draft_blocks
        self.distance: Any = distance
        if is_compiled:
            self.blocks, self.draft_blocks = compiled(pair.blocks), compiled(pair.draft_blocks)
            self.distance = torch.compile(distance, dynamic=False)
        self.known_rows = pair.target.head[pair.head_ids]  # of the target's head

    @property
    def trained(self) -> list[Tensor]:
        """The draft's tensors that are trained."""
        return parameters(self.pair.draft)

    def optimizer(self, name: str) -> Any:
        """Returns their optimiser."""
        return optimizer_for(name, self.trained, [self.pair.draft.head])

    def batch(self, samples: Samples, num_rows: int) -> Batch:
        """Returns a batch of all these sequences with num_rows rows."""
        return batch_of(samples, num_rows)

    def copy(self) -> Pair:
        """Returns the pair with the draft so far, without gradients."""
        return self.pair.mapped(lambda tensor: tensor.detach())

    def of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns mean divergence, total variation and greedy agreement over a batch's rows.

        The target's probability outside the draft's vocabulary counts as lost.
        """
        pair, angles = self.pair, self.pair.angles(batch.tokens.shape[1])
        states = batch.states or self._states(batch)
        hidden = self.draft_blocks.hidden(pair.draft, batch.tokens, *angles)
        p_logits = pair.blocks.product(states.hidden, self.known_rows)
        q_logits = pair.draft_blocks.product(hidden.flatten(0, 1)[batch.rows], pair.draft.head)
        return tuple(
            self.distance(
                p_logits, states.total, states.best, q_logits, pair.head_ids, batch.weights
            )
        )

    def _states(self, batch: Batch) -> States:
        """Returns the target's results at a batch's rows."""
        pair, angles = self.pair, self.pair.angles(batch.tokens.shape[1])
        with torch.no_grad():
            hidden = self.blocks.hidden(pair.target, batch.tokens, *angles)
            hidden = hidden.flatten(0, 1)[batch.rows]
            logits = pair.blocks.product(hidden, pair.target.head)
            return States(hidden, logits.float().logsumexp(-1), logits.argmax(-1))


def distance(
    p_logits: Tensor, total: Tensor, best: Tensor, q_logits: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weighted means of cross-entropy, total variation and greedy agreement over rows.

    p_logits, q_logits: the target's and the draft's logits of the tokens `ids`. total: logsumexp of
    all logits of the target; best: its likeliest token of all.
    """
    p = (p_logits.float() - total[:, None]).exp()
    log_q = q_logits.float().log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1)
    variation = 1 - torch.minimum(p, log_q.exp()).sum(-1)
    agrees = (ids[log_q.argmax(-1)] == best).float()
    size = weights.sum().clamp(min=1)
    means = [(part * weights).sum() / size for part in (cross_entropy, variation, agrees)]
    return means[0], means[1], means[2]
