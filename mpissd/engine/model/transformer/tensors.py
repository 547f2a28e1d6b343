"""Names and shapes of a transformer's tensors, as in Hugging Face's files."""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.engine.model.transformer.config import TransformerConfig

EMBEDDING, HEAD, LAST_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


def tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name, shape) of every tensor; matrices are [outputs, inputs].

    The LM head is left out where it is the embedding.
    """
    shape = config.shape
    yield EMBEDDING, (shape.vocab_size, shape.hidden)
    for layer in range(shape.num_layers):
        for name, size in layer_tensors(config):
            yield f"model.layers.{layer}.{name}", size
    yield LAST_NORM, (shape.hidden,)
    if not config.tied:
        yield HEAD, (config.head_vocab, shape.hidden)


def layer_tensors(config: TransformerConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields (name within the layer, shape) of the tensors of one layer."""
    shape = config.shape
    hidden, ffn = shape.hidden, shape.ffn
    widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
    yield "input_layernorm.weight", (hidden,)
    for name, width in widths.items():
        yield f"self_attn.{name}_proj.weight", (width, hidden)
        if config.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (width,)
        if config.qk_norm and name != "v":
            yield f"self_attn.{name}_norm.weight", (shape.head_dim,)
    yield "self_attn.o_proj.weight", (hidden, shape.q_width)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "mlp.gate_proj.weight", (ffn, hidden)
    yield "mlp.up_proj.weight", (ffn, hidden)
    yield "mlp.down_proj.weight", (hidden, ffn)
