"""Drafts in training: an independent small model, or a draft on its target's last hidden state.

The losses of both compare the draft's distributions with the target's over the target's own
answers. A draft may have a reduced LM head; the target's probability of tokens without a row counts
as lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Ints
from mpissd.engine.model.transformer.checkpoint import (
    BLOCK,
    EMBEDDING,
    HEAD,
    HEAD_NORM,
    JOINED,
    JOINS,
    LAST_NORM,
    MASKS,
    Checkpoint,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.learn.config import DistillConfig, Form
from mpissd.learn.llama import (
    Blocks,
    Llama,
    LlamaLayer,
    MaskRows,
    Tensor,
    blocks_of,
    compiled,
    load_trunk,
    mapped,
    named,
    parameters,
    trained,
)
from mpissd.learn.sample import Samples

INITIAL = 0.02  # standard deviation of randomly initialized weights
PLAIN: dict[str, Any] = {"family": "llama", "qkv_bias": False, "qk_norm": False}
FADING = 0.8  # weight of a step's loss, relative to the step before (2401.10774, section 2.2.1)
MASK_FADING = 0.85  # weight of a mask token's loss, relative to the mask token before
MASK_SHARE = 0.8  # share of mask tokens with a loss; the rest mostly follows an answer's end
ROWS = {"cpu": 256, "cuda": 8192}  # rows that a step's LM head computes, by device, in a StateDraft
DECAY = 0.01  # weight decay of AdamW and of Muon


class Losses(NamedTuple):
    """A training step's losses, means over rows. tv: total variation. agreement: the share of rows
    at which draft and target have the same likeliest token. state_error: the relative error of
    predicted hidden states (StateDraft). by_depth: tv and agreement at the tokens of the sequence,
    then at each of the J mask tokens of a parallel draft, [2, J + 1]."""

    cross_entropy: Tensor
    tv: Tensor
    agreement: Tensor
    state_error: Tensor = None
    by_depth: Tensor = None

    def told(self) -> dict[str, Any]:
        """Returns {name: rounded value} of the losses, for a point of the training curves."""
        means = zip(self._fields[:4], self, strict=False)
        told: dict[str, Any] = {n: round(float(v.detach()), 5) for n, v in means if v is not None}
        if self.by_depth is not None:
            for name, values in zip(("tv", "agreement"), self.by_depth.tolist(), strict=True):
                told[f"{name}_by_depth"] = [round(value, 4) for value in values]
        return told


@dataclass(frozen=True, eq=False)
class _Draft:
    """The base of ModelDraft and StateDraft. weights: the draft's own weights. target: the target's
    weights, of which the draft reads some. head_ids: token ids of the rows of the draft's LM head,
    rising. blocks: computes the target's layers. table: cosines and sines of RoPE by position.
    compiled: whether torch.compile compiles the losses."""

    config: TransformerConfig
    weights: Any
    target: Llama
    head_ids: Tensor
    blocks: Blocks
    table: tuple[Tensor, Tensor]
    compiled: bool = False

    @cached_property
    def head_rows(self) -> Tensor:
        """The rows of the target's LM head for the tokens that the draft's head has."""
        return self.target.head[self.head_ids]

    @cached_property
    def _distance(self) -> Any:
        return torch.compile(distance, dynamic=False) if self.compiled else distance

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of the first `length` positions."""
        return self.table[0][:length], self.table[1][:length]


@dataclass(frozen=True, eq=False)
class ModelDraft(_Draft):
    """A draft in training that is an independent model. weights: a Llama that has the target's
    embedding. masks: the embeddings of the J mask tokens of a parallel draft (one forward drafts
    J + 1 tokens), [J, hidden] (PARD, 2504.18583), or None. anchors: the number of positions of a
    sequence that mask tokens follow in training."""

    weights: Llama
    masks: Tensor = None
    anchors: int = 1

    @cached_property
    def own_blocks(self) -> Blocks:
        """The object that computes the draft's layers."""
        return blocks_of(self.config, self.blocks.dtype)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> ModelDraft:
        """Returns the draft with `change` applied to each of its own weights."""
        masks = None if self.masks is None else change(self.masks)
        return replace(self, weights=mapped(self.weights, change), masks=masks)

    def named(self) -> dict[str, Tensor]:
        """Returns the draft's own weights by their names in Hugging Face files."""
        masks = {} if self.masks is None else {MASKS: self.masks}
        return named(self.weights, self.config) | masks

    @property
    def trained(self) -> list[Tensor]:
        return parameters(self.weights) + ([] if self.masks is None else [self.masks])

    def optimizer(self, name: str) -> Optimizer:
        """Returns the optimiser of the trained tensors; name: "adamw" or "muon"."""
        return Optimizer(name, self.trained, [self.weights.head, self.masks])

    def mask_rows(self, anchors: Tensor, length: int) -> MaskRows:
        """Returns the rows of the draft's mask tokens that a forward computes after a sequence's
        `length` real rows. anchors: int64 [b, a], positions of real tokens, each of which all mask
        tokens follow. The j-th mask token has the j-th position after its anchor; it attends the
        real rows up to the anchor, and the first j mask tokens of the same anchor."""
        num = len(self.masks)
        device = anchors.device
        row = torch.arange(num * anchors.shape[1], device=device)
        own = (row // num == row[:, None] // num) & (row <= row[:, None])
        last = anchors.repeat_interleave(num, 1)[..., None]
        before = torch.arange(length, device=device) <= last
        seen = torch.cat([before, own.expand(len(anchors), -1, -1)], -1)
        seen = seen.repeat(1, self.own_blocks.heads // self.own_blocks.kv_heads, 1)
        places = (anchors[..., None] + 1 + torch.arange(num, device=device)).flatten(1)
        x = self.masks.repeat(anchors.shape[1], 1).expand(len(anchors), -1, -1)
        cos, sin = self.table
        return MaskRows(x, cos[places], sin[places], seen[:, None])

    @cached_property
    def _loss_blocks(self) -> tuple[Blocks, Blocks]:
        """The objects that compute the target's and the draft's layers in the loss."""
        if not self.compiled:
            return self.blocks, self.own_blocks
        return compiled(self.blocks), compiled(self.own_blocks)

    def losses(self, samples: Samples, num_rows: int) -> Losses:
        """Returns mean losses over about `num_rows` random positions, answers' first; of a parallel
        draft also over mask tokens after some positions, which weigh less the deeper they are."""
        tokens = samples.tokens[:, :-1].long()
        length = tokens.shape[1]
        is_asked = samples.answered[:, 1:].float()
        rows, counts = _chosen(is_asked.flatten(), num_rows)
        depths = torch.zeros_like(rows)
        angles = self.angles(length)
        target_blocks, own_blocks = self._loss_blocks
        masks = None
        if self.masks is not None:
            order = is_asked + 0.5 * torch.rand_like(is_asked)
            anchors = order.topk(min(self.anchors, length)).indices
            masks = self.mask_rows(anchors, length)
            after, lasts = following(samples.answered, anchors, len(self.masks) + 1)
            wanted = lasts[..., 1:].float().flatten()
            places, weights = _chosen(wanted, int(MASK_SHARE * len(wanted)) or 1)
            first = length * torch.arange(len(tokens), device=tokens.device)[:, None, None]
            labels = (first + after[..., 1:] - 1).clamp(max=tokens.numel() - 1).flatten()[places]
            counts = torch.cat([counts, weights])
            depths = torch.cat([depths, places % len(self.masks) + 1])
        hidden = own_blocks.hidden(self.weights, tokens, *angles, masks=masks)
        mine = hidden[:, :length].flatten(0, 1)[rows]
        if masks is not None:
            mine = torch.cat([mine, hidden[:, length:].flatten(0, 1)[places]])
            rows = torch.cat([rows, labels])
        if samples.hidden is None:
            with torch.no_grad():
                states = target_blocks.hidden(self.target, tokens, *angles).flatten(0, 1)[rows]
                logits = self.blocks.product(states, self.target.head)
                total = logits.float().logsumexp(-1)
                best = logits.argmax(-1)
        else:
            states = samples.hidden[:, :-1].flatten(0, 1)[rows]
            total = samples.total[:, :-1].flatten()[rows]
            best = samples.best[:, :-1].flatten()[rows].long()
        p_logits = self.blocks.product(states, self.head_rows)
        q_logits = self.own_blocks.product(mine, self.weights.head)
        depth = torch.arange(self.config.masks + 1, device=tokens.device)
        weights = (depths == depth[:, None]) * counts
        parts = self._distance(p_logits, total, best, q_logits, self.head_ids, weights)
        shares = weights.sum(-1) * MASK_FADING**depth
        shares = shares / shares.sum().clamp(min=1)
        by_depth = None if masks is None else torch.stack(parts[1:]).detach()
        means = Losses(*((part * shares).sum() for part in parts))
        return means._replace(by_depth=by_depth)


@dataclass(frozen=True, eq=False)
class StateDraft(_Draft):
    """A draft that reads the target's last hidden state; weights: its tensors by name.

    Row p of its input has a sequence's token at position p and the target's hidden state at p − 1
    (zeros for p = 0). From there step t = 1, 2, … drafts the token at p + t, as if the tokens in
    between were accepted. The loss includes the relative error of the predicted hidden states,
    without the LM head (2401.15077, section 4.2).
    """

    weights: Mapping[str, Tensor]
    ahead: int = 1  # the number of steps that the draft is trained for

    def mapped(self, change: Callable[[Tensor], Tensor]) -> StateDraft:
        return replace(self, weights={name: change(w) for name, w in self.weights.items()})

    def named(self) -> dict[str, Tensor]:
        return dict(self.weights)

    @property
    def trained(self) -> list[Tensor]:
        return list(self.weights.values())

    def optimizer(self, name: str) -> Optimizer:
        return Optimizer(name, self.trained)

    def steps(self, tokens: Tensor, hidden: Tensor, count: int) -> Iterator[Tensor]:
        """Yields, for t = 1 … count, the states [b, n − count, hidden] from which the LM head
        drafts. tokens: int64 [b, n]. hidden: the target's states there, [b, n, hidden]."""
        norm = self.blocks.norm
        weights = self.weights
        before = F.pad(hidden, (0, 0, 1, 0))[:, : tokens.shape[1] - count].float()
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(count):
            if self.config.kind == "medusa":
                prefix = f"model.layers.{step}."
                yield norm(self._feed_forward(prefix, before), weights[prefix + HEAD_NORM])
                continue
            part = slice(step, step + before.shape[1])
            read = self.target.embedding[tokens[:, part]].float(), before
            for x, name, join in zip(read, JOINED, JOINS, strict=True):
                before = before + self._product(norm(x, weights[name]), join)
            if self.config.kind == "eagle":
                before = self._attention(before, part, past)
            before = norm(self._feed_forward("model.layers.0.", before), weights[LAST_NORM])
            yield before

    def logits(self, states: Tensor) -> Tensor:
        return self.blocks.product(states, self.head_rows)

    def _product(self, x: Tensor, name: str) -> Tensor:
        return self.blocks.product(x, self.weights[name]).float()

    def _feed_forward(self, prefix: str, x: Tensor) -> Tensor:
        normed = self.blocks.norm(x, self.weights[f"{prefix}post_attention_layernorm.weight"])
        gate, up = (self._product(normed, f"{prefix}mlp.{n}_proj.weight") for n in ("gate", "up"))
        return x + self._product(F.silu(gate) * up, f"{prefix}mlp.down_proj.weight")

    def _attention(self, x: Tensor, part: slice, past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Returns `x` with one step's attention added; appends the step's keys and values to
        `past`. A row attends to the first step's rows up to its own position, which read the
        target's states, and to the row at the same place in each later step."""
        blocks = self.blocks
        prefix = "model.layers.0."
        qkv = torch.cat([self.weights[f"{prefix}self_attn.{n}_proj.weight"] for n in "qkv"])
        norm = self.weights[f"{prefix}input_layernorm.weight"]
        layer = LlamaLayer(qkv, None, None, None, norm, None)
        cos, sin = (table[part] for table in self.table)
        q, k, v = (heads.transpose(1, 2) for heads in blocks.front(x, layer, cos, sin))
        groups = blocks.heads // blocks.kv_heads
        past.append((k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)))
        keys, values = past[0]
        later = past[1:]
        scores = q @ keys.mT
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
        same_row = [(q * own_keys).sum(-1, keepdim=True) for own_keys, _ in later]
        shares = (torch.cat([scores, *same_row], -1) * blocks.head_dim**-0.5).float().softmax(-1)
        shares = shares.to(values.dtype)
        width = scores.shape[-1]
        attended = shares[..., :width] @ values
        for number, (_, own_values) in enumerate(later):
            attended = attended + shares[..., width + number, None] * own_values
        joined = attended.transpose(1, 2).flatten(-2)
        return x + self._product(joined, f"{prefix}self_attn.o_proj.weight")

    def losses(self, samples: Samples, num_rows: int) -> Losses:
        """Returns mean losses over the drafting steps, of which earlier ones weigh more. num_rows:
        ignored, because the constant ROWS says how many rows a step computes."""
        assert samples.hidden is not None, "samples without states"
        tokens = samples.tokens.long()
        parts = []
        for step, states in enumerate(self.steps(tokens, samples.hidden, self.ahead)):
            part = slice(step, step + states.shape[1])
            answered = samples.answered[:, step + 1 : part.stop + 1].flatten().float()
            wanted = samples.hidden[:, part].flatten(0, 1).float()
            mine = states.flatten(0, 1)
            error = ((mine - wanted) ** 2).sum(-1) / (wanted**2).sum(-1).clamp(min=1e-6)
            error = (error * answered).sum() / answered.sum().clamp(min=1)
            count = min(ROWS[answered.device.type], len(answered))
            rows = (answered + 0.5 * torch.rand_like(answered)).topk(count).indices
            total, best = (t[:, part].flatten()[rows] for t in (samples.total, samples.best))
            means = self._distance(
                self.logits(wanted[rows]),
                total,
                best.long(),
                self.logits(mine[rows]),
                self.head_ids,
                answered[rows],
            )
            parts.append(torch.stack([*means, error]))
        fading = torch.tensor([FADING**n for n in range(len(parts))], device=tokens.device)
        return Losses(*((torch.stack(parts) * fading[:, None]).sum(0) / fading.sum()).unbind())


Draft = ModelDraft | StateDraft


def _chosen(wanted: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draws `count` indices into `wanted` [n], a tensor of ones and zeros. Indices of ones come
    first, in random order; zeros follow if ones are too few. Returns (indices, values there)."""
    order = wanted + 0.5 * torch.rand_like(wanted)
    places = order.topk(min(count, len(wanted))).indices
    return places, wanted[places]


def following(answered: Tensor, anchors: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` positions after each anchor, and whether the answer goes on up to each
    of them, both [b, a, count]. answered: bool [b, length]. anchors: positions, int64 [b, a]."""
    after = anchors[..., None] + torch.arange(1, count + 1, device=anchors.device)
    inside = F.pad(answered, (0, count)).gather(1, after.flatten(1)).view_as(after)
    return after, inside.int().cumprod(-1).bool()


def distance(
    p_logits: Tensor, total: Tensor, best: Tensor, q_logits: Tensor, ids: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weighted means over rows of cross-entropy, total variation and greedy agreement.
    weights: [rows], or [m, rows] for m means of each. p_logits, q_logits: logits of target and
    draft for the tokens `ids`. total, best: logsumexp and argmax of all the target's logits."""
    p = (p_logits.float() - total[:, None]).exp()
    log_q = q_logits.float().log_softmax(-1)
    cross_entropy = -(p * log_q).sum(-1)
    variation = 1 - torch.minimum(p, log_q.exp()).sum(-1)
    agrees = (ids[log_q.argmax(-1)] == best).float()
    size = weights.sum(-1).clamp(min=1)
    means = [(part * weights).sum(-1) / size for part in (cross_entropy, variation, agrees)]
    return means[0], means[1], means[2]


class Optimizer:
    """Updates weights from their gradients, by AdamW alone, or by Muon (Jordan 2024) for matrices
    and AdamW for the rest. Both use one learning rate: Muon's updates are scaled so that the rate
    suits both (arXiv 2502.16982)."""

    def __init__(self, name: str, tensors: Sequence[Tensor], heads: Sequence[Tensor] = ()) -> None:
        """Prepares updates of `tensors`. name: "adamw", or "muon", which leaves vectors and the
        matrices in `heads` to AdamW."""
        left = {id(tensor) for tensor in tensors if name == "adamw" or tensor.ndim == 1}
        left |= set(map(id, heads))
        rest = [tensor for tensor in tensors if id(tensor) in left]
        matrices = [tensor for tensor in tensors if id(tensor) not in left]
        settings: dict[str, Any] = {"betas": (0.9, 0.95), "fused": rest[0].is_cuda or None}
        self._parts: list[Any] = [torch.optim.AdamW(rest, weight_decay=DECAY, **settings)]
        if matrices:
            settings = {"weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
            self._parts.append(torch.optim.Muon(matrices, **settings))

    def step(self, rate: float) -> None:
        """Updates the tensors from their gradients. rate: the learning rate."""
        for part in self._parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()


def draft_config(target: TransformerConfig, form: Form | int, head_vocab: int) -> TransformerConfig:
    """Returns a draft's architecture with `head_vocab` rows in its LM head; raises ConfigError for
    heads whose outputs cannot be quantised in blocks. form: how many of the target's layers are
    copied, or the sizes of random layers, which are Llama's (no bias, no norms of q and k)."""
    shape = replace(target.shape, name=f"{target.shape.name}-draft")
    if isinstance(form, int):
        shape = replace(shape, num_layers=form)
    else:
        layers, heads, kv_heads, ffn = form
        shape = replace(shape, num_layers=layers, num_heads=heads, num_kv_heads=kv_heads, ffn=ffn)
        target = replace(target, **PLAIN)
    if shape.q_width % BLOCK:
        sizes = f"{shape.num_heads} heads of {shape.head_dim}"
        raise ConfigError(
            f"shapes: {sizes}: allowed: heads that are {BLOCK} wide together, or 64, …"
        )
    return replace(target, shape=shape, tied=False, head_vocab=head_vocab)


def state_config(
    target: TransformerConfig, kind: str, heads: int, head_vocab: int
) -> TransformerConfig:
    """Returns the architecture of a draft on hidden states, with the target's widths; kind: one of
    shapes.STATE_KINDS. Raises ConfigError for widths that cannot be quantised. Medusa's `heads`
    share the FFN width of one target layer, in multiples of BLOCK. Eagle's attention is Llama's."""
    shape = replace(target.shape, name=f"{target.shape.name}-{kind}", num_layers=1)
    if shape.hidden % BLOCK or shape.ffn % BLOCK:
        widths = f"a hidden state of {shape.hidden} and an FFN of {shape.ffn}"
        raise ConfigError(f"kinds={kind}: {widths}: allowed: multiples of {BLOCK}")
    if kind == "medusa":
        ffn = max(BLOCK, shape.ffn // heads // BLOCK * BLOCK)
        shape = replace(shape, num_layers=heads, ffn=ffn)
    fields = {**PLAIN, "tied": False, "head_vocab": head_vocab, "kind": kind}
    return replace(target, shape=shape, **fields)


def architectures(
    config: DistillConfig, target: TransformerConfig, head_vocab: int
) -> dict[str, TransformerConfig]:
    """Returns {name: architecture} of the drafts that are to be made; the name is a kind, a form,
    or "" for layers of the target. Raises ConfigError if a draft cannot have such sizes."""
    if config.kind_names:
        return {
            kind: state_config(target, kind, config.heads, head_vocab) for kind in config.kind_names
        }
    forms: dict[str, Form | int] = {**config.forms} or {"": len(config.layer_numbers)}
    made = {name: draft_config(target, form, head_vocab) for name, form in forms.items()}
    return {name: replace(each, masks=config.parallel) for name, each in made.items()}


def frequent_tokens(counts: Ints, num_tokens: int, always: Sequence[int]) -> Ints:
    """Returns the ids of the most frequent tokens, rising, int32 [num_tokens]. counts: [vocab].
    always: stop tokens, which are kept whatever their count. Of tokens with equal counts the lower
    id is kept: byte-pair merges are numbered from the most frequent on."""
    weights = np.asarray(counts, np.int64).copy()
    weights[list(always)] = np.iinfo(np.int64).max
    order = np.argsort(-weights, kind="stable")
    return np.sort(order[:num_tokens]).astype(np.int32)


def started(target: Llama, layers: Sequence[LlamaLayer], head_ids: Tensor) -> Llama:
    """Returns a trainable float32 draft of the given layers. Its norm and LM head start as the
    target's; its embedding is the target's own and is not trained."""
    return mapped(target._replace(layers=tuple(layers), head=target.head[head_ids]), trained)


def continued(target: Llama, draft: Checkpoint) -> Llama:
    """Returns a trainable copy of an earlier draft, which reads the target's embedding."""
    head = torch.tensor(draft.read(HEAD), device=target.head.device)
    return mapped(load_trunk(draft, target._replace(head=head), torch.float32), trained)


def first_masks(embedding: Tensor, count: int, seed: int, kept: Any = ()) -> Tensor:
    """Returns the trainable embeddings of `count` mask tokens, [count, hidden]. The first are those
    `kept` of an earlier draft; the rest start at the mean of the target's embedding, with noise."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, embedding.shape[1], generator=generator).to(embedding.device)
    masks = embedding.float().mean(0) + INITIAL * noise
    for row, values in zip(masks, kept, strict=False):
        row.copy_(torch.tensor(values))
    return trained(masks)


def fresh_layers(config: TransformerConfig, device: Any, seed: int) -> list[LlamaLayer]:
    """Returns the randomly initialized layers of a draft with the architecture `config`."""
    generator = torch.Generator().manual_seed(seed)
    shape = config.shape
    hidden = shape.hidden
    residual = INITIAL / (2 * shape.num_layers) ** 0.5  # INITIAL, for residual branches
    sizes = [
        (shape.q_width + 2 * shape.kv_width, hidden, INITIAL),
        (hidden, shape.q_width, residual),
        (2 * shape.ffn, hidden, INITIAL),
        (hidden, shape.ffn, residual),
    ]
    layers = []
    for _ in range(shape.num_layers):
        matrices = (torch.randn(n, m, generator=generator) * scale for n, m, scale in sizes)
        norms = (torch.ones(hidden) for _ in range(2))
        layers.append(LlamaLayer(*(tensor.to(device) for tensor in (*matrices, *norms))))
    return layers


def fresh_states(config: TransformerConfig, seed: int, scale: float) -> dict[str, Tensor]:
    """Returns the float32 weights that a draft on hidden states starts from. scale: root mean
    square of the target's states. Products that are added to the state start near 0, so that the
    first step returns nearly the state that it read."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, size in tensors(config):
        if len(size) == 1:
            is_last = name == LAST_NORM or name.endswith(f".{HEAD_NORM}")
            weights[name] = torch.full(size, scale if is_last else 1.0)
        elif name not in (EMBEDDING, HEAD):  # those are the target's
            weights[name] = torch.randn(size, generator=generator) * INITIAL
    return weights
