"""A target, its draft, and how far the draft is from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mpissd.learn.batches import Batch, batch_of
from mpissd.learn.llama import Blocks, Llama, Tensor, compiled, mapped
from mpissd.learn.muon import optimizer_of, parameters
from mpissd.learn.sample import Samples, States

SWAPPED = 0.2  # of the answered tokens are the draft's own in a batch of proposed states


@dataclass(frozen=True)
class Pair:
    """The target, the draft, the draft's token ids, and what each of them computes with."""

    target: Llama
    draft: Llama
    head_ids: Tensor
    blocks: Blocks
    draft_blocks: Blocks
    table: tuple[Tensor, Tensor]

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
        return optimizer_of(name, self.pair.draft)

    def batch(self, samples: Samples, num_rows: int) -> Batch:
        """Returns a batch of all these sequences with num_rows rows."""
        return batch_of(samples, num_rows)

    def copy(self) -> Llama:
        """Returns the draft so far, without gradients."""
        return mapped(self.pair.draft, lambda tensor: tensor.detach())

    def of(self, batch: Batch) -> tuple[Tensor, ...]:
        """Returns mean divergence, total variation and greedy agreement over a batch's rows.

        The target's probability outside the draft's vocabulary counts as lost.
        """
        pair = self.pair
        states = batch.states or self._states(batch)
        p_logits = pair.blocks.product(states.hidden, self.known_rows)
        q_logits = pair.draft_blocks.product(self._mine(batch, self.draft_blocks), pair.draft.head)
        return tuple(
            self.distance(
                p_logits, states.total, states.best, q_logits, pair.head_ids, batch.weights
            )
        )

    def _mine(self, batch: Batch, blocks: Blocks) -> Tensor:
        """Returns the draft's last hidden rows at a batch's rows."""
        angles = self.pair.angles(batch.tokens.shape[1])
        hidden = blocks.hidden(self.pair.draft, batch.tokens, *angles)
        return hidden.flatten(0, 1)[batch.rows]

    def _states(self, batch: Batch) -> States:
        """Returns what the target computes at a batch's rows."""
        pair, angles = self.pair, self.pair.angles(batch.tokens.shape[1])
        with torch.no_grad():
            hidden = self.blocks.hidden(pair.target, batch.tokens, *angles)
            hidden = hidden.flatten(0, 1)[batch.rows]
            logits = pair.blocks.product(hidden, pair.target.head)
            return States(hidden, logits.float().logsumexp(-1), logits.argmax(-1))

    def proposed(self, batch: Batch) -> Batch:
        """Returns a batch in which some answered tokens are those that the draft draws there.

        Behind them the states are ones that the draft itself proposes; the target's distributions
        there are computed anew.
        """
        with torch.no_grad():
            mine = self._mine(batch, self.pair.draft_blocks)
            logits = self.pair.draft_blocks.product(mine, self.pair.draft.head).float()
        noise = -torch.log(-torch.log(torch.rand_like(logits)))
        own = self.pair.head_ids[(logits + noise.clamp(max=1e4)).argmax(-1)]
        swapped = (torch.rand_like(batch.weights) < SWAPPED) & (batch.weights > 0)
        flat, length = batch.tokens.clone().flatten(), batch.tokens.shape[1]
        swapped &= batch.rows % length < length - 1  # the next token is in the batch
        flat[batch.rows[swapped] + 1] = own[swapped]
        return replace(batch, tokens=flat.view_as(batch.tokens), states=None)


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
