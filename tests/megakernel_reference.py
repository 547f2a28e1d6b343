"""Each operation of kernels/whole.cu in NumPy, and the device's tensors by name.

An operation reads the tensors that the device had before it, so that differences do not add up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops.megakernel import ADD, ATTEND, GATED, QKV
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import Rig, prompt
from tests.transformer_reference import Kept, rotated

KINDS = (QKV, ATTEND, ADD, GATED, ADD)  # of a layer
NAMES = "q,k,v", "attention", "o", "gate,up", "down"
Tensors = dict[str, Any]


class Reference:
    """The operations over the weights of a rig's checkpoint, rounded as the device's are."""

    def __init__(self, rig: Rig, positions: Any) -> None:
        self.weights: Any = Kept(rig.checkpoint, np.float16)
        self.config, self.shape = self.weights.config, self.weights.config.shape
        self.positions = positions

    def qkv(self, before: Tensors, layer: int) -> Tensors:
        """q (scaled for powers of two), and k and v of the new positions."""
        attention, shape = f"model.layers.{layer}.self_attn.", self.shape
        x, out = self.normed(before, 0), []
        for name in "qkv":
            y = x @ self.weights.matrix(f"{attention}{name}_proj.weight").T
            if self.config.qkv_bias:
                y = y + self.weights.vector(f"{attention}{name}_proj.bias")
            out.append(y.reshape(len(x), -1, shape.head_dim))
        angles = self.positions[:, None] * self.config.frequencies()
        scale = shape.head_dim**-0.5 / np.log(2)
        keys, values = rotated(out[1], angles), out[2]
        return {"queries": rotated(out[0], angles) * scale, "new keys": keys, "new values": values}

    def attention(self, before: Tensors, layer: int) -> Tensors:
        """Softmax over the positions up to each row's own."""
        group = self.shape.num_heads // self.shape.num_kv_heads
        k, v = (np.repeat(before[name], group, 0) for name in ("keys", "values"))
        scores = np.einsum("rhd,hpd->hrp", before["queries"], k)
        scores[:, np.arange(k.shape[1]) > self.positions[:, None]] = -np.inf
        shares = np.exp2(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return {"attended": np.einsum("hrp,hpd->rhd", shares, v).reshape(len(self.positions), -1)}

    def add(self, before: Tensors, layer: int, norm: int) -> Tensors:
        """The residual stream, and what the next norm needs of it."""
        prefix = f"model.layers.{layer}."
        last = layer + 1 == self.shape.num_layers
        if norm == 0:
            inner, weight = before["attended"], f"{prefix}self_attn.o_proj.weight"
            following = f"{prefix}post_attention_layernorm.weight"
        else:
            inner, weight = before["inner"], f"{prefix}mlp.down_proj.weight"
            following = "model.norm" if last else f"model.layers.{layer + 1}.input_layernorm"
            following += ".weight"
        hidden = before["hidden"] + inner @ self.weights.matrix(weight).T
        power = np.exp2(np.floor(np.log2(self.scale(before, norm))) - 4)
        x = hidden * self.weights.vector(following) * power[:, None]
        squares = (hidden.reshape(len(hidden), -1, 16) ** 2).sum(-1)
        other = 1 - norm
        return {"hidden": hidden, "x": x, f"squares {other}": squares, f"powers {other}": power}

    def gated(self, before: Tensors, layer: int) -> Tensors:
        """SwiGLU."""
        prefix, x = f"model.layers.{layer}.mlp.", self.normed(before, 1)
        gate, up = (x @ self.weights.matrix(f"{prefix}{n}_proj.weight").T for n in ("gate", "up"))
        return {"inner": gate / (1 + np.exp(-gate)) * up}

    def head(self, before: Tensors) -> Tensors:
        """Logits."""
        return {"logits": self.normed(before, 0) @ self.weights.matrix("lm_head.weight").T}

    def scale(self, before: Tensors, norm: int) -> Any:
        mean = before[f"squares {norm}"].sum(-1) / self.shape.hidden
        return 1 / np.sqrt(mean + self.config.norm_eps)

    def normed(self, before: Tensors, norm: int) -> Any:
        return before["x"] * (self.scale(before, norm) / before[f"powers {norm}"])[:, None]


def differences(rig: Rig, context: int, rows: int) -> Iterator[tuple[str, float]]:
    """Yields (operation and tensor, relative error) of every operation of a forward of `rows` rows
    after `context` tokens."""
    stack, ops = rig.stack, rig.stack.weights.ops
    assert ops is not None
    tokens = prompt(rig, context + rows)
    rig.fill(tokens[:context], 8)
    reference = Reference(rig, np.arange(context, context + rows))
    stack.buffers.tokens[:rows] = tokens[context:]
    stack.place(trunk_rows(0, context, context + rows))
    megakernel: Any = ops._megakernel  # type: ignore[attr-defined]
    assert megakernel.suits(rows)

    def state(count: int, layer: int) -> Tensors:
        """The tensors after the first `count` operations."""
        ops.begin(stack.cache, rows)
        ops.embed(stack.weights.table, stack.buffers.tokens, stack.buffers.hidden, rows)
        first = stack.weights.layers[0].attention_norm
        ops.norm(stack.buffers.hidden, None, first, stack.buffers.x, rows, stack.cache.counters)
        if count:
            megakernel.launch(stack.weights, stack.buffers, stack.cache, rows, count)
        return tensors(rig, layer, context, rows)

    layers = rig.checkpoint.config.shape.num_layers
    for number in range(5 * layers + 1):
        layer, which = divmod(number, 5)
        in_cache = min(layer, layers - 1)
        before, after = state(number, in_cache), state(number + 1, in_cache)
        if layer == layers:
            name, expected = "head", reference.head(before)
        else:
            name, expected = f"{layer} {NAMES[which]}", operation(reference, which, before, layer)
        for tensor, values in expected.items():
            yield f"{name}: {tensor}", relative_error(after[tensor], values)


def operation(reference: Reference, which: int, before: Tensors, layer: int) -> Tensors:
    """What a layer's operation gives."""
    kind = KINDS[which]
    if kind == ADD:
        return reference.add(before, layer, norm=0 if which == 2 else 1)
    return {QKV: reference.qkv, ATTEND: reference.attention, GATED: reference.gated}[kind](
        before, layer
    )


def tensors(rig: Rig, layer: int, context: int, rows: int) -> Tensors:
    """The device's tensors by name; of the cache those of one layer and slot 0."""
    stack, memory, host = rig.stack, rig.stack.buffers, rig.backend.to_host
    cache: Any = stack.cache
    pages = stack.pages.seats.pages[0]
    found = {name: host(getattr(memory, name))[:rows] for name in ("hidden", "attended", "inner")}
    found["logits"], found["x"] = host(memory.logits)[:rows], host(memory.x.values)[:rows]
    found["queries"] = host(memory.q)[:rows].reshape(rows, -1, cache.sizes.head_dim)
    for norm in range(2):
        found[f"squares {norm}"] = host(memory.x.squares)[norm, :rows]
        found[f"powers {norm}"] = host(memory.x.powers)[norm, :rows]
    for name in ("keys", "values"):
        every = host(getattr(cache, name))[layer][pages]  # [page, head, position, dimension]
        flat = np.concatenate(list(every), axis=1)[:, : context + rows]
        found[name], found[f"new {name}"] = flat, flat[:, context:].transpose(1, 0, 2)
    return found
