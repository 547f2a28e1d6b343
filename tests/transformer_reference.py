"""A transformer over whole sequences in plain NumPy: the oracle of weights and kernels."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    HEAD,
    ArrayTensor,
    Checkpoint,
    Tensor,
    tensors,
)

Floats = NDArray[np.float32]

ROUNDING = 4e-3  # relative: what float16 activations may move a logit by, against the largest


def logits(checkpoint: Checkpoint, tokens: Sequence[int]) -> Floats:
    """Returns the logits after every token, float32 [n, head's rows]; float32 throughout."""
    config = checkpoint.config
    ids = np.asarray(tokens)
    first, last = int(ids.min()), int(ids.max()) + 1
    if config.masks:
        table = checkpoint.table().outputs(first, last).read()
    else:
        table = checkpoint.read(EMBEDDING, slice(first, last))
    x = table[ids - first]
    for layer in range(config.shape.num_layers):
        name = f"model.layers.{layer}."
        x = x + attention(checkpoint, name, norm(checkpoint, f"{name}input_layernorm", x))
        inner = norm(checkpoint, f"{name}post_attention_layernorm", x)
        gate = product(checkpoint, f"{name}mlp.gate_proj", inner)
        inner = gate / (1 + np.exp(-gate)) * product(checkpoint, f"{name}mlp.up_proj", inner)
        x = x + product(checkpoint, f"{name}mlp.down_proj", inner)
    return product(checkpoint, "lm_head", norm(checkpoint, "model.norm", x))


def product(checkpoint: Checkpoint, name: str, x: Floats) -> Floats:
    out = x @ checkpoint.read(f"{name}.weight").T
    has_bias = checkpoint.config.qkv_bias and name.endswith(("q_proj", "k_proj", "v_proj"))
    return out + checkpoint.read(f"{name}.bias") if has_bias else out


def norm(checkpoint: Checkpoint, name: str, x: Floats) -> Floats:
    mean = np.mean(x * x, -1, keepdims=True) + np.float32(checkpoint.config.norm_eps)
    return x / np.sqrt(mean) * checkpoint.read(f"{name}.weight")


def attention(checkpoint: Checkpoint, name: str, x: Floats) -> Floats:
    config, shape = checkpoint.config, checkpoint.config.shape
    q, k, v = (product(checkpoint, f"{name}self_attn.{one}_proj", x) for one in "qkv")
    q, k, v = (part.reshape(len(x), -1, shape.head_dim) for part in (q, k, v))
    if config.qk_norm:
        q = norm(checkpoint, f"{name}self_attn.q_norm", q)
        k = norm(checkpoint, f"{name}self_attn.k_norm", k)
    angles = np.arange(len(x))[:, None] * config.frequencies()
    q, k = rotated(q, angles), rotated(k, angles)
    group = shape.num_heads // shape.num_kv_heads
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("ihd,jhd->hij", q, k) / np.float32(shape.head_dim**0.5)
    scores[:, np.triu(np.ones((len(x), len(x)), bool), 1)] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", shares, v).reshape(len(x), -1)
    return product(checkpoint, f"{name}self_attn.o_proj", mixed)


def rotated(x: Floats, angles: NDArray[np.float64]) -> Floats:
    cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))
    low, high = np.split(x, 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


class Kept:
    """A checkpoint that keeps its matrices, rounded to a type."""

    def __init__(self, inner: Checkpoint, dtype: Any) -> None:
        self.inner, self.config = inner, inner.config
        self._dtype, self._kept = dtype, dict[Any, Any]()

    def read(self, name: str, rows: slice = slice(None)) -> Any:
        key = name, str(rows)
        if key not in self._kept:
            values = self.inner.read(name, rows)
            is_matrix = values.ndim == 2
            self._kept[key] = values.astype(self._dtype).astype("f4") if is_matrix else values
        return self._kept[key]


def stored(source: Checkpoint, kept: Callable[[str, Floats], Tensor]) -> Checkpoint:
    """Returns a checkpoint with another one's tensors in memory, as of files.

    kept: makes the tensor of each matrix from its name and values.
    """
    by_name: dict[str, Tensor] = {}
    for name, size in tensors(source.config):
        values = np.ascontiguousarray(source.read(name))
        by_name[name] = kept(name, values) if len(size) == 2 else ArrayTensor(values)
    if source.config.tied:
        by_name[HEAD] = by_name[EMBEDDING]
    return replace(source, by_name=by_name)


def margins(checkpoint: Any, prompt: Sequence[int], answer: Sequence[int]) -> Any:
    """Returns the margin of each token of an answer."""
    rows = logits(checkpoint, [*prompt, *answer])[len(prompt) - 1 : -1]
    chosen = rows[np.arange(len(answer)), np.array(answer)]
    return (rows.max(-1) - chosen) / np.abs(rows).max(-1)
