"""The forward of a Llama, a Qwen2.5 or a Qwen3 in PyTorch, for sampling and for training.

Functions over plain tensors rather than modules: the same layer serves whole sequences (training)
and one position at a time (sampling), and each part can be compiled by itself.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from mpissd.engine.model.transformer.checkpoint import Checkpoint
from mpissd.engine.model.transformer.config import TransformerConfig

Tensor = Any


class Layer(NamedTuple):
    """A decoder layer's weights; q, k, v are one matrix and so are gate and up.

    bias: of q, k and v joined (Qwen2.5). norm_q, norm_k: [head_dim] (Qwen3). None if
    the architecture has none.
    """

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
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


@dataclass(frozen=True, eq=False)
class Blocks:
    """The arithmetic of one architecture: products in `dtype`, norms and the residual in float32.

    The residual keeps the embedding's type if that is narrower.
    """

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    dtype: Any

    def product(self, x: Tensor, w: Tensor, bias: Tensor = None) -> Tensor:
        """Returns x [.., inputs] times w [outputs, inputs], with a bias or without, in dtype."""
        added = None if bias is None else bias.to(self.dtype)
        return F.linear(x.to(self.dtype), w.to(self.dtype), added)

    def norm(self, x: Tensor, w: Tensor) -> Tensor:
        """Returns RMSNorm (1910.07467) of x in float32."""
        return F.rms_norm(x.float(), (x.shape[-1],), w.float(), self.eps)

    def front(self, x: Tensor, w: Layer, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated q [.., heads, d], rotated k [.., kv_heads, d] and v of x [.., hidden].

        cos, sin: [.., 1, d], by each row's position.
        """
        widths = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        every = self.product(self.norm(x, w.norm_attention), w.qkv, w.bias).split(widths, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in every)
        if w.norm_q is not None:
            q, k = self.norm(q, w.norm_q), self.norm(k, w.norm_k)
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin), v

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns x with its pairs (i, i + d / 2) turned (RoFormer, 2104.09864)."""
        first, second = x.float().chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return (x.float() * cos + turned * sin).to(self.dtype)

    def back(self, x: Tensor, attended: Tensor, w: Layer) -> Tensor:
        """Returns the residual x after the output product and the feed-forward block."""
        x = x + self.product(attended, w.o).to(x.dtype)
        gate, up = self.product(self.norm(x, w.norm_ffn), w.gate_up).chunk(2, -1)
        return x + self.product(F.silu(gate) * up, w.down).to(x.dtype)

    def hidden(self, model: Llama, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Returns the normalised last hidden rows [b, n, hidden] of whole sequences [b, n]."""
        x = model.embedding[tokens]
        for w in model.layers:
            q, k, v = (part.transpose(1, 2) for part in self.front(x, w, cos, sin))
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.back(x, a.transpose(1, 2).flatten(-2), w)
        return self.norm(x, model.norm)


def blocks_of(config: TransformerConfig, dtype: Any) -> Blocks:
    """Returns the arithmetic of an architecture."""
    shape = config.shape
    return Blocks(shape.num_heads, shape.num_kv_heads, shape.head_dim, config.norm_eps, dtype)


def compiled(blocks: Blocks) -> Blocks:
    """Returns the blocks with a layer's two halves compiled: one graph for all layers."""
    made = copy.copy(blocks)
    for name in ("front", "back"):
        object.__setattr__(made, name, torch.compile(getattr(blocks, name), dynamic=False))
    return made


def angles(config: TransformerConfig, length: int, device: Any) -> tuple[Tensor, Tensor]:
    """Returns cos and sin [length, 1, head_dim] of each position's angles, in float32."""
    frequencies = torch.tensor(config.frequencies(), device=device)
    turns = torch.arange(length, device=device)[:, None] * frequencies
    both = torch.cat([turns, turns], -1)[:, None]
    return both.cos().float(), both.sin().float()


def load(checkpoint: Checkpoint, device: Any, dtype: Any) -> Llama:
    """Returns a checkpoint's weights on a device."""
    embedding = _matrix(checkpoint, "model.embed_tokens.weight", device, dtype)
    head = embedding
    if not checkpoint.config.tied:
        head = _matrix(checkpoint, "lm_head.weight", device, dtype)
    return load_trunk(checkpoint, Llama(embedding, (), None, head), dtype)


def load_trunk(checkpoint: Checkpoint, model: Llama, dtype: Any) -> Llama:
    """Returns the model with a checkpoint's layers and final norm, on its embedding's device."""
    device = model.embedding.device

    def get(name: str) -> Tensor:
        return _matrix(checkpoint, name, device, dtype)

    def vector(name: str) -> Tensor:
        return torch.tensor(checkpoint.read(name), dtype=torch.float32, device=device)

    def layer(number: int) -> Layer:
        at = f"model.layers.{number}"
        attention = f"{at}.self_attn"
        norms = [f"{attention}.{p}_norm.weight" for p in "qk" if checkpoint.config.qk_norm]
        biases = [f"{attention}.{p}_proj.bias" for p in "qkv" if checkpoint.config.qkv_bias]
        return Layer(
            torch.cat([get(f"{at}.self_attn.{p}_proj.weight") for p in "qkv"]),
            get(f"{at}.self_attn.o_proj.weight"),
            torch.cat([get(f"{at}.mlp.{p}_proj.weight") for p in ("gate", "up")]),
            get(f"{at}.mlp.down_proj.weight"),
            vector(f"{at}.input_layernorm.weight"),
            vector(f"{at}.post_attention_layernorm.weight"),
            torch.cat([vector(name) for name in biases]) if biases else None,
            *map(vector, norms),
        )

    layers = tuple(layer(number) for number in range(checkpoint.config.shape.num_layers))
    return model._replace(layers=layers, norm=vector("model.norm.weight"))


def _matrix(checkpoint: Checkpoint, name: str, device: Any, dtype: Any) -> Tensor:
    return torch.tensor(checkpoint.read(name), dtype=dtype, device=device)


def named(model: Llama, config: TransformerConfig) -> dict[str, Tensor]:
    """Returns a model's weights by their Hugging Face names, without the embedding."""
    shape = config.shape
    widths = [shape.q_width, shape.kv_width, shape.kv_width]
    found = {"lm_head.weight": model.head, "model.norm.weight": model.norm}
    for number, w in enumerate(model.layers):
        at = f"model.layers.{number}"
        q, k, v = w.qkv.split(widths)
        gate, up = w.gate_up.chunk(2)
        parts = {"self_attn.q": q, "self_attn.k": k, "self_attn.v": v, "self_attn.o": w.o}
        parts |= {"mlp.gate": gate, "mlp.up": up, "mlp.down": w.down}
        found |= {f"{at}.{name}_proj.weight": part for name, part in parts.items()}
        found[f"{at}.input_layernorm.weight"] = w.norm_attention
        found[f"{at}.post_attention_layernorm.weight"] = w.norm_ffn
        if w.bias is not None:
            biases = zip("qkv", w.bias.split(widths), strict=True)
            found |= {f"{at}.self_attn.{name}_proj.bias": part for name, part in biases}
        if w.norm_q is not None:
            found[f"{at}.self_attn.q_norm.weight"] = w.norm_q
            found[f"{at}.self_attn.k_norm.weight"] = w.norm_k
    return found


def mapped(model: Llama, change: Any) -> Llama:
    """Returns the model with `change` applied to every tensor but the embedding."""
    layers = tuple(Layer(*(t if t is None else change(t) for t in w)) for w in model.layers)
    return model._replace(layers=layers, norm=change(model.norm), head=change(model.head))
