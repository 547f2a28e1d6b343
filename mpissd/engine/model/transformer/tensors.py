"""Names and shapes of a transformer's tensors, as in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.engine.model.transformer.config import TransformerConfig

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# What joins a token's embedding and a hidden state in a draft that reads its target's.
JOINED = ("model.embed_norm.weight", "model.state_norm.weight")
JOINS = ("model.embed_proj.weight", "model.state_proj.weight")
HEAD_NORM = "norm.weight"  # of one Medusa head, behind its residual block


def tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor; matrices are [outputs, inputs].

    The LM head is left out where it is the embedding.
    """
    shape = config.shape
    yield EMBEDDING, (shape.vocab_size, shape.hidden)
    for layer in range(shape.num_layers):
        for name, size in layer_tensors(config):
            yield f"model.layers.{layer}.{name}", size
    if config.kind in ("mlp", "eagle"):
        yield from ((name, (shape.hidden,)) for name in JOINED)
        yield from ((name, (shape.hidden, shape.hidden)) for name in JOINS)
    if config.kind != "medusa":
        yield LAST_NORM, (shape.hidden,)
    if not config.tied:
        yield HEAD, (config.head_vocab, shape.hidden)


def layer_tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name within the layer, shape) of the tensors of one layer, or of one Medusa head."""
    hidden, ffn = config.shape.hidden, config.shape.ffn
    if config.kind in ("", "eagle"):
        yield from _attention_tensors(config)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (ffn, hidden)
    yield "mlp.up_proj.weight", (ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)
    if config.kind == "medusa":
        yield HEAD_NORM, (hidden,)


def _attention_tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    shape = config.shape
    widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
    yield "input_layernorm.weight", (shape.hidden,)
    for name, width in widths.items():
        yield f"self_attn.{name}_proj.weight", (width, shape.hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (width,)
        if config.qk_norm and name != "v":
            yield f"self_attn.{name}_norm.weight", (shape.head_dim,)
    yield "self_attn.o_proj.weight", (shape.hidden, shape.q_width)
