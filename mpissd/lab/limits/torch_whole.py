"""The same model by PyTorch and Hugging Face transformers, over the same weights (see whole.py)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found,unused-ignore]
from torch.nn import functional as F  # type: ignore[import-not-found,unused-ignore]

from mpissd.engine.model.transformer.config import TransformerConfig

_LAUNCHES, _WARM_UP, _GENERATED = 40, 3, 24
_NAMES = (
    "input_layernorm",
    "self_attn.qkv",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_up",
    "mlp.down_proj",
)
Tensors = Mapping[str, Any]  # by Hugging Face's names; q, k, v and gate, up side by side


class Others:
    """Rivals over one model's weights: transformers, and compiled layers with a static cache."""

    def __init__(self, config: TransformerConfig, weights: Tensors, device: str = "cuda") -> None:
        """Takes the weights in float16, norms in float32."""
        self._config, self._weights, self._device = config, weights, device
        self._model: Any = None
        self._compiled: Any = torch.compile(_layer, dynamic=False)

    def logits(self, tokens: Any) -> Any:
        """Returns transformers' logits of every position, in float32: [tokens, vocabulary]."""
        model = self._library().float()
        self._load_norms(model)
        with torch.inference_mode():
            ids = torch.tensor(np.asarray(tokens)[None], device=self._device, dtype=torch.long)
            found = model(ids, use_cache=False).logits[0].float().cpu().numpy()
        self._model = None  # generate reads a model in float16
        return found

    def generate_seconds(self, context: int) -> list[float]:
        """Returns the seconds of a token that transformers' `generate` takes behind a prompt."""
        model = self._library()
        ids = torch.randint(0, self._config.shape.vocab_size, (1, context), device=self._device)
        taken = []
        for _ in range(2):
            seconds = [self._generate_s(model, ids, count) for count in (1, 1 + _GENERATED)]
            taken.append((seconds[1] - seconds[0]) / _GENERATED)
        return taken[1:]

    def _generate_s(self, model: Any, ids: Any, count: int) -> float:
        self._synchronize()
        start = time.perf_counter()
        told = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **told)
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()

    def _library(self) -> Any:
        """Returns transformers' model in float16, with these weights."""
        if self._model is None:
            from transformers import (  # type: ignore[import-not-found,unused-ignore]
                AutoConfig,
                AutoModelForCausalLM,
            )

            config = AutoConfig.for_model(**_told(self._config))
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float16)
            try:
                with torch.device(self._device):
                    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
            finally:
                torch.set_default_dtype(before)
            self._load(model.eval())
            self._model = model
        return self._model

    def _load(self, model: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self._part(name))

    def _load_norms(self, model: Any) -> None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim == 1:
                    parameter.copy_(self._part(name))

    def _part(self, name: str) -> Any:
        """Returns one of transformers' parameters out of the joined weights."""
        shape = self._config.shape
        widths = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
        widths |= {"gate": shape.ffn, "up": shape.ffn}
        for joined in ("qkv", "gate_up"):
            first = 0
            for part in ("q", "k", "v") if joined == "qkv" else ("gate", "up"):
                if f".{part}_proj." in name:
                    whole = self._weights[name.replace(f"{part}_proj", joined)]
                    return whole[first : first + widths[part]]
                first += widths[part]
        return self._weights[name]

    def compiled_seconds(self, rows: int, context: int) -> list[float]:
        """Returns the seconds of forwards of `rows` rows at the end of a context.

        The layers are compiled by torch.compile, the cache is static and exactly as long as the
        context, and a CUDA graph replays the whole forward, argmax included.
        """
        step = self._step(rows, context)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.inference_mode():
            for _ in range(_WARM_UP):
                step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.inference_mode():
            step()
        seconds = []
        for _ in range(_WARM_UP + _LAUNCHES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return seconds[_WARM_UP:]

    def _step(self, rows: int, context: int) -> Any:
        """Returns a function that computes one forward and returns its tokens."""
        shape, device = self._config.shape, self._device
        half = {"device": device, "dtype": torch.float16}
        caches = [
            torch.randn((2, 1, shape.num_kv_heads, context, shape.head_dim), **half)
            for _ in range(shape.num_layers)
        ]
        positions = torch.arange(context - rows, context, device=device)
        angles = positions[:, None].double() * torch.tensor(
            self._config.frequencies(), device=device
        )
        turns = torch.stack([angles.cos(), angles.sin()]).to(torch.float16)
        sees = torch.arange(context, device=device) <= positions[:, None] if rows > 1 else None
        tokens = torch.randint(0, shape.vocab_size, (rows,), device=device)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim, self._config.norm_eps
        layers = [self._layer_weights(n) for n in range(shape.num_layers)]
        last, head = (self._weights[n] for n in ("model.norm.weight", "lm_head.weight"))
        last = last.half()

        def step() -> Any:
            x = self._weights["model.embed_tokens.weight"][tokens]
            for layer, cache in zip(layers, caches, strict=True):
                x = self._compiled(x, layer, cache, positions, turns, sees, sizes)
            return F.linear(F.rms_norm(x, (shape.hidden,), last, sizes[3]), head).argmax(-1)

        return step

    def _layer_weights(self, number: int) -> tuple[Any, ...]:
        return tuple(self._weights[f"model.layers.{number}.{n}.weight"].half() for n in _NAMES)


def _layer(
    x: Any, weights: Any, cache: Any, positions: Any, turns: Any, sees: Any, sizes: Any
) -> Any:
    """Computes one layer of rows x [rows, hidden] behind a static cache."""
    (heads, kv_heads, width, eps), rows = sizes, x.shape[0]
    norm, qkv, o, ffn_norm, gate_up, down = weights
    found = F.linear(F.rms_norm(x, norm.shape, norm, eps), qkv).view(rows, -1, width)
    low, high = found[:, : heads + kv_heads].chunk(2, -1)
    cosine, sine = turns[0][:, None], turns[1][:, None]
    turned = torch.cat([low * cosine - high * sine, high * cosine + low * sine], -1)
    keys, values = turned[:, heads:], found[:, heads + kv_heads :]
    cache[0].index_copy_(2, positions, keys.transpose(0, 1)[None])
    cache[1].index_copy_(2, positions, values.transpose(0, 1)[None])
    y = F.scaled_dot_product_attention(
        turned[:, :heads].transpose(0, 1)[None], cache[0], cache[1], attn_mask=sees,
        enable_gqa=True,
    )  # fmt: skip
    x = x + F.linear(y[0].transpose(0, 1).reshape(rows, -1), o)
    gate, up = F.linear(F.rms_norm(x, ffn_norm.shape, ffn_norm, eps), gate_up).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, down)


def _told(config: TransformerConfig) -> dict[str, Any]:
    """Returns transformers' configuration of a Llama."""
    shape, scaling = config.shape, config.rope_scaling
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if scaling is not None:
        rope |= {"rope_type": "llama3", "factor": scaling.factor,
                 "low_freq_factor": scaling.low, "high_freq_factor": scaling.high,
                 "original_max_position_embeddings": scaling.original}  # fmt: skip
    return {
        "model_type": "llama", "hidden_size": shape.hidden, "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size, "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied,
        "rope_parameters": rope, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def others_of(model: Any) -> Others:
    """Returns the rivals of a WholeModel, over its own weights on the device."""
    stack = model.stack
    chunks, every = stack.chunks, stack.weights
    weights = {"model.embed_tokens.weight": every.table, "model.norm.weight": every.norm}
    weights["lm_head.weight"] = chunks.unpacked(every.head)
    for number, layer in enumerate(every.layers):
        packed = layer.qkv, layer.o, layer.gate_up, layer.down
        qkv, o, gate_up, down = map(chunks.unpacked, packed)
        found = layer.attention_norm, qkv, o, layer.ffn_norm, gate_up, down
        for name, array in zip(_NAMES, found, strict=True):
            weights[f"model.layers.{number}.{name}.weight"] = array
    model.backend.synchronize()
    tensors = {name: torch.from_dlpack(array) for name, array in weights.items()}
    return Others(every.config, tensors)
