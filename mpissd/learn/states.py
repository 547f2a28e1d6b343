"""Drafts that read their target's last hidden state, in PyTorch (model/transformer/stack.py).

Row p of a sequence holds its token at position p and the state before it (zeros before the first).
A step t = 1, 2, … drafts the token at p + t; the tokens between are the text's own, as after
accepted tokens they are.

Each step is judged by the target's distribution there: divergence first, then mostly total
variation, as for other drafts (train.py). The relative error of the states themselves is added
(2401.15077, section 4.2, regresses them too), which costs no LM head, so that only some rows need
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    HEAD,
    HEAD_NORM,
    JOINED,
    JOINS,
    LAST_NORM,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.learn.llama import Blocks, Layer, Llama, Tensor
from mpissd.learn.muon import optimizer_for
from mpissd.learn.pair import distance
from mpissd.learn.sample import Samples, States

INITIAL = 0.02  # standard deviation of fresh weights


@dataclass(frozen=True, eq=False)
class StateDraft:
    """A draft's weights by their names in files, and the tensors that it reads of its target.

    head: the target's rows of `head_ids` [rows, hidden]. table: cosines and sines by position.
    """

    config: TransformerConfig
    weights: Mapping[str, Tensor]
    target: Llama
    head: Tensor
    head_ids: Tensor
    blocks: Blocks
    table: tuple[Tensor, Tensor]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StateDraft:
        """Returns the draft with `change` applied to each of its own weights."""
        return replace(self, weights={name: change(w) for name, w in self.weights.items()})

    def named(self) -> dict[str, Tensor]:
        """Returns the draft's own weights by their names in files."""
        return dict(self.weights)

    def steps(self, tokens: Tensor, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yields, for t = 1 … count, the states s_t [b, n − count, hidden] that the head reads.

        tokens: int64 [b, n]. hidden: the target's states after them, [b, n, hidden].
        """
        before = F.pad(hidden, (0, 0, 1, 0))[:, : tokens.shape[1] - count].float()
        if self.config.kind == "medusa":
            yield from (self._head(number, before) for number in range(count))
            return
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(count):
            part = slice(step, step + before.shape[1])
            before = self._joined(tokens[:, part], before)
            if self.config.kind == "eagle":
                before = self._attention(before, part, past)
            before = self._norm(self._feed_forward("model.layers.0.", before), LAST_NORM)
            yield before

    def logits(self, states: Tensor) -> Tensor:
        """Returns the LM head's logits of rows of states."""
        return self.blocks.product(states, self.head)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return self.blocks.norm(x, self.weights[name])

    def _product(self, x: Tensor, name: str) -> Tensor:
        return self.blocks.product(x, self.weights[name]).float()

    def _head(self, number: int, before: Tensor) -> Tensor:
        prefix = f"model.layers.{number}."
        return self._norm(self._feed_forward(prefix, before), prefix + HEAD_NORM)

    def _feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        normed = self._norm(x, f"{prefix}post_attention_layernorm.weight")
        gate, up = (self._product(normed, f"{prefix}mlp.{n}_proj.weight") for n in ("gate", "up"))
        return x + self._product(F.silu(gate) * up, f"{prefix}mlp.down_proj.weight")

    def _joined(self, tokens: Tensor, before: Tensor) -> Tensor:
        parts = (self.target.embedding[tokens].float(), before)
        own = (self._norm(x, name) for x, name in zip(parts, JOINED, strict=True))
        embedded, state = (self._product(x, name) for x, name in zip(own, JOINS, strict=True))
        return before + embedded + state

    def _attention(self, x: Tensor, part: slice, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns the residual stream after the attention of one step; adds its keys to `past`.

        A row attends the first step's rows up to its own, whose states are the target's, and its
        own rows of the steps since then.
        """
        blocks, prefix = self.blocks, "model.layers.0."
        cos, sin = (each[part] for each in self.table)
        q, k, v = (each.transpose(1, 2) for each in blocks.front(x, self._layer, cos, sin))
        groups = blocks.heads // blocks.kv_heads
        past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        (keys, values), later = past[0], past[1:]
        scores = q @ keys.mT
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
        own = [(q * own_keys).sum(-1, keepdim=True) for own_keys, _ in later]
        shares = (torch.cat([scores, *own], -1) * blocks.head_dim**-0.5).float().softmax(-1)
        shares, width = shares.to(values.dtype), scores.shape[-1]
        found = shares[..., :width] @ values
        for number, (_, own_values) in enumerate(later):
            found = found + shares[..., width + number, None] * own_values
        attended = found.transpose(1, 2).flatten(-2)
        return x + self._product(attended, f"{prefix}self_attn.o_proj.weight")

    @property
    def _layer(self) -> Layer:
        """The layer's tensors that Blocks.front reads."""
        prefix, weights = "model.layers.0.", self.weights
        qkv = torch.cat([weights[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv"])
        norm = weights[f"{prefix}input_layernorm.weight"]
        return Layer(qkv, qkv, qkv, qkv, norm, norm)


def own_tensors(config: TransformerConfig) -> list[tuple[str, tuple[int, ...]]]:
    """Returns (name, shape) of the weights that are the draft's own, and not its target's."""
    return [told for told in tensors(config) if told[0] not in (EMBEDDING, HEAD)]


def fresh(config: TransformerConfig, seed: int, scale: float) -> dict[str, Tensor]:
    """Returns weights to start from; scale: root mean square of the target's states.

    Products that are added to the state start near 0, so that the first states are those in front.
    """
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name, size in own_tensors(config):
        if len(size) == 1:
            is_last = name == LAST_NORM or name.endswith(f".{HEAD_NORM}")
            found[name] = torch.full(size, scale if is_last else 1.0)
        else:
            found[name] = torch.randn(size, generator=generator) * INITIAL
    return found


FADING = 0.8  # weight of a step, of the one before it (2401.10774, section 2.2.1)
ROWS = {"cpu": 256, "cuda": 8192}  # of a step's LM head


class StateLosses:
    """Divergence, total variation, agreement and regression of a draft on batches of samples."""

    def __init__(self, draft: StateDraft, steps: int, compiled: bool) -> None:
        """Takes the draft in training and how many steps it looks ahead."""
        self.draft, self.count = draft, steps
        self.distance: Any = torch.compile(distance, dynamic=False) if compiled else distance

    @property
    def trained(self) -> list[Tensor]:
        """The draft's own weights."""
        return list(self.draft.weights.values())

    def optimizer(self, name: str) -> Any:
        """Returns their optimiser; "muon" is for matrices."""
        return optimizer_for(name, self.trained)

    def batch(self, samples: Samples, num_rows: int) -> Samples:
        """Returns the sequences as they are: the losses choose their rows."""
        return samples

    def copy(self) -> StateDraft:
        """Returns the draft so far, without gradients."""
        return self.draft.mapped(lambda tensor: tensor.detach())

    def of(self, batch: Samples) -> tuple[Tensor, ...]:
        """Returns means over the steps, earlier ones weighing more: divergence, total variation,
        agreement, and the states' relative error."""
        assert batch.states is not None, "samples without states"
        tokens, hidden = batch.tokens.long(), batch.states.hidden
        parts = []
        for step, states in enumerate(self.draft.steps(tokens, hidden, self.count)):
            parts.append(torch.stack(self._step(batch, batch.states, states, step)))
        weights = torch.tensor([FADING**n for n in range(len(parts))], device=tokens.device)
        means = (torch.stack(parts) * weights[:, None]).sum(0) / weights.sum()
        return tuple(means.unbind())

    def _step(self, batch: Samples, found: States, states: Tensor, step: int) -> list[Tensor]:
        """Returns the losses of one step; row p is judged by the target at p + step."""
        draft, width = self.draft, states.shape[1]
        part = slice(step, step + width)
        answered = batch.answered[:, step + 1 : step + 1 + width].flatten().float()
        wanted = found.hidden[:, part].flatten(0, 1).float()
        mine = states.flatten(0, 1)
        error = ((mine - wanted) ** 2).sum(-1) / (wanted**2).sum(-1).clamp(min=1e-6)
        error = (error * answered).sum() / answered.sum().clamp(min=1)
        most = min(ROWS[answered.device.type], len(answered))
        rows = (answered + 0.5 * torch.rand_like(answered)).topk(most).indices
        p_logits = draft.logits(wanted[rows])
        total, best = (each[:, part].flatten()[rows] for each in (found.total, found.best))
        told = p_logits, total, best.long(), draft.logits(mine[rows]), draft.head_ids
        return [*self.distance(*told, answered[rows]), error]
