"""The forward of a Llama, a Qwen2.5 or a Qwen3 in PyTorch, for sampling and for training.

Functions over plain tensors rather than modules: the same layer serves whole sequences (training)
and one position at a time (sampling), and each part can be compiled by itself.
"""

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mpissd.engine.model.transformer.checkpoint import EMBEDDING, HEAD, LAST_NORM, Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig

Tensor = Any


class LlamaLayer(NamedTuple):
    """A decoder layer's weights; None where the architecture has none. qkv, gate_up: joined
    matrices. bias: that of q, k and v (Qwen2.5). norm_q, norm_k: of RMSNorm, [head_dim] (Qwen3)."""

    qkv: Tensor
    o: Tensor
    gate_up: Tensor
    down: Tensor
    norm_attention: Tensor
    norm_ffn: Tensor
    bias: Tensor = None
    norm_q: Tensor = None
    norm_k: Tensor = None


class Llama(NamedTuple):
    """A model's weights: the embedding [vocab, hidden], the layers, the final norm, the LM head."""

    embedding: Tensor
    layers: tuple[LlamaLayer, ...]
    norm: Tensor
    head: Tensor


class MaskRows(NamedTuple):
    """Rows of r mask tokens, which a forward computes after n real tokens. x: embeddings [b, r,
    hidden]. cos, sin: RoPE's values by position, [b, r, 1, d]. seen: which of the n + r rows each
    mask row attends, bool [b, 1, g · r, n + r], repeated for the g query heads of a KV head."""

    x: Tensor
    cos: Tensor
    sin: Tensor
    seen: Tensor


@dataclass(frozen=True, eq=False)
class Blocks:
    """Computes one architecture's layers: products in `dtype`, norms and the residual in float32,
    or the residual in the embedding's type if that is narrower."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    dtype: Any

    def product(self, x: Tensor, w: Tensor, bias: Tensor = None) -> Tensor:
        """Returns x [.., inputs] times w [outputs, inputs] plus the bias, in `dtype`."""
        added = None if bias is None else bias.to(self.dtype)
        return F.linear(x.to(self.dtype), w.to(self.dtype), added)

    def norm(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns RMSNorm (1910.07467) of x in float32."""
        return F.rms_norm(x.float(), (x.shape[-1],), w.float(), self.eps)

    def front(
        self, x: Tensor, w: LlamaLayer, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes a layer up to its attention. Returns rotated q [.., heads, d], rotated k [..,
        kv_heads, d] and v of x [.., hidden]. cos, sin: [.., 1, d], by position."""
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        joined = self.product(self.norm(x, w.norm_attention), w.qkv, w.bias)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in joined.split(widths, -1))
        if w.norm_q is not None:
            q = self.norm(q, w.norm_q)
            k = self.norm(k, w.norm_k)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin), v

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns x after RoPE (2104.09864), which rotates the pairs of elements (i, i + d / 2)."""
        first, second = x.float().chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (x.float() * cos + turned * sin).to(self.dtype)

    def back(self, x: Tensor, attended: Tensor, w: LlamaLayer) -> Tensor:
        """Computes the part of a layer after attention. Returns the residual x, to which the output
        projection of `attended` and then the feed-forward block's result are added."""
        x = x + self.product(attended, w.o).to(x.dtype)
        gate, up = self.product(self.norm(x, w.norm_ffn), w.gate_up).chunk(2, -1)
        return x + self.product(F.silu(gate) * up, w.down).to(x.dtype)

    def hidden(
        self, model: Llama, tokens: Tensor, cos: Tensor, sin: Tensor, masks: MaskRows | None = None
    ) -> Tensor:
        """Runs the model's layers over `tokens` [b, n], and over r mask tokens if `masks` is given.
        Returns the normalised last hidden states, those of mask tokens last, [b, n + r, hidden].
        cos, sin: RoPE's values by position."""
        x = model.embedding[tokens]
        if masks is not None:
            x = torch.cat([x, masks.x.to(x.dtype)], 1)
            cos = torch.cat([cos.expand(len(x), -1, -1, -1), masks.cos], 1)
            sin = torch.cat([sin.expand(len(x), -1, -1, -1), masks.sin], 1)
        real = slice(tokens.shape[1])
        for w in model.layers:
            q, k, v = (part.transpose(1, 2) for part in self.front(x, w, cos, sin))
            a = F.scaled_dot_product_attention(
                q[:, :, real], k[:, :, real], v[:, :, real], is_causal=True, enable_gqa=True
            )
            if masks is not None:
                a = torch.cat([a, _attend_seen(q[:, :, real.stop :], k, v, masks.seen)], 2)
            x = self.back(x, a.transpose(1, 2).flatten(-2), w)
        return self.norm(x, model.norm)


def _attend_seen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Returns the attention [b, heads, r, d] of q over those rows of k and v [b, kv, n, d] that the
    mask `seen` allows.
    The query heads of a KV head are rows of one product, so that keys and values are not repeated.
    Other kernels than the memory-efficient one, or its plain fallback, may not take the mask."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        attended = F.scaled_dot_product_attention(rows, k, v, attn_mask=seen)
    return attended.unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def blocks_of(config: TransformerConfig, dtype: Any) -> Blocks:
    shape = config.shape
    return Blocks(shape.num_heads, shape.num_kv_heads, shape.head_dim, config.norm_eps, dtype)


def compiled(blocks: Blocks) -> Blocks:
    """Returns a copy whose `front` and `back` torch.compile compiles once for all layers."""
    made = copy.copy(blocks)
    for name in ("front", "back"):
        object.__setattr__(made, name, torch.compile(getattr(blocks, name), dynamic=False))
    return made


def angles(config: TransformerConfig, length: int, device: Any) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [length, 1, head_dim] of RoPE's angles by position, in float32."""
    frequencies = torch.tensor(config.frequencies(), device=device)
    turns = torch.arange(length, device=device)[:, None] * frequencies
    both = torch.cat([turns, turns], -1)[:, None]
    return both.cos().float(), both.sin().float()


# {field of LlamaLayer: the names of the tensors in files that are joined in it}
_FIELDS = {
    "qkv": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "o": ["self_attn.o_proj.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
    "norm_attention": ["input_layernorm.weight"],
    "norm_ffn": ["post_attention_layernorm.weight"],
    "bias": [f"self_attn.{part}_proj.bias" for part in "qkv"],
    "norm_q": ["self_attn.q_norm.weight"],
    "norm_k": ["self_attn.k_norm.weight"],
}


def load(checkpoint: Checkpoint, device: Any, dtype: Any) -> Llama:
    embedding, *head = (
        torch.tensor(checkpoint.read(name), dtype=dtype, device=device)
        for name in (EMBEDDING, HEAD)[: 1 if checkpoint.config.tied else 2]
    )
    return load_trunk(checkpoint, Llama(embedding, (), None, head[0] if head else embedding), dtype)


def load_trunk(checkpoint: Checkpoint, model: Llama, dtype: Any) -> Llama:
    """Returns `model` with the layers and final norm of a checkpoint, on the device that holds the
    model's embedding. dtype: the type of the loaded matrices."""
    config = checkpoint.config
    device = model.embedding.device

    def get(name: str) -> Tensor:
        kind = dtype if name.endswith("_proj.weight") else torch.float32
        return torch.tensor(checkpoint.read(name), dtype=kind, device=device)

    lacking = {"bias"} if not config.qkv_bias else set()
    lacking |= {"norm_q", "norm_k"} if not config.qk_norm else set()
    layers = []
    for number in range(config.shape.num_layers):
        fields = {
            field: torch.cat([get(f"model.layers.{number}.{name}") for name in names])
            for field, names in _FIELDS.items()
            if field not in lacking
        }
        layers.append(LlamaLayer(**fields))
    return model._replace(layers=tuple(layers), norm=get(LAST_NORM))


def named(model: Llama, config: TransformerConfig) -> dict[str, Tensor]:
    """Returns a model's weights by their Hugging Face names, without the embedding."""
    shape = config.shape
    qkv = [shape.q_width, shape.kv_width, shape.kv_width]
    widths = {"qkv": qkv, "bias": qkv, "gate_up": [shape.ffn, shape.ffn]}
    weights = {HEAD: model.head, LAST_NORM: model.norm}
    for number, layer in enumerate(model.layers):
        for field, names in _FIELDS.items():
            if (joined := getattr(layer, field)) is not None:
                parts = joined.split(widths.get(field, len(joined)))
                full = [f"model.layers.{number}.{name}" for name in names]
                weights |= dict(zip(full, parts, strict=True))
    return weights


def mapped(model: Llama, change: Any) -> Llama:
    """Returns the model with `change` applied to every tensor but the embedding."""
    layers = tuple(LlamaLayer(*(t if t is None else change(t) for t in w)) for w in model.layers)
    return model._replace(layers=layers, norm=change(model.norm), head=change(model.head))


def parameters(model: Llama) -> list[Tensor]:
    """Returns the tensors of a model that have gradients."""
    tensors = [model.norm, model.head, *(t for w in model.layers for t in w)]
    return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]


def trained(tensor: Tensor) -> Tensor:
    """Returns a trainable float32 copy of a tensor."""
    made = tensor.detach().float().clone(memory_format=torch.contiguous_format)
    return made.requires_grad_(True)
