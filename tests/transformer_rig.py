"""A transformer's stack on the CPU for tests: tiny models of all families, and forwards by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Ints
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions, TransformerShard
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    ArrayTensor,
    Tensor,
    quantize,
    random_checkpoint,
)
from mpissd.engine.model.transformer.config import Llama3Scaling, TransformerConfig
from mpissd.engine.model.transformer.stack import TransformerStack, TransformerWeights, load_weights
from tests.transformer_reference import stored

Floats = NDArray[np.float32]
TINY = ModelShape("tiny", 2, 48, 6, 3, 16, 80, True, 150)
FAMILIES = {
    "llama": TransformerConfig(TINY, "llama"),
    "llama3": TransformerConfig(
        TINY, "llama", rope_theta=100.0, rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 64), tied=True
    ),
    "qwen2": TransformerConfig(TINY, "qwen2", norm_eps=1e-6, qkv_bias=True, tied=True),
    "qwen3": TransformerConfig(replace(TINY, head_dim=32), "qwen3", qk_norm=True),
    "mistral": TransformerConfig(replace(TINY, num_heads=8, num_kv_heads=1), "mistral"),
    "odd": TransformerConfig(ModelShape("odd", 1, 37, 7, 7, 6, 33, True, 101), "llama"),
    "int8": TransformerConfig(ModelShape("int8", 2, 64, 4, 2, 16, 96, True, 150), "llama"),
    "wide": TransformerConfig(ModelShape("wide", 1, 130, 8, 1, 128, 66, True, 65), "llama"),
}


def rounded(name: str, matrix: Floats) -> Tensor:
    """Rounds a matrix to bfloat16."""
    bits = matrix.view(np.uint32)
    return ArrayTensor(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def quantized(name: str, matrix: Floats) -> Tensor:
    """Stores a matrix as int8, except for the embedding."""
    return rounded(name, matrix) if name == EMBEDDING else ArrayTensor(*quantize(matrix))


class Rig:
    """One rank's stack, and the calls that a test makes by hand."""

    def __init__(
        self,
        config: TransformerConfig,
        *,
        group: Group | None = None,
        weights: TransformerWeights | None = None,
        page: int = 16,
        slots: int = 2,
        capacity: int = 100,
        lanes: int = 6,
        steps: int = 20,
        top_k: int = 1,
        max_rows: int = 40,
    ) -> None:
        group = group or SoloGroup()
        shard, backend = TransformerShard(config, group.size, group.rank), NumpyBackend()
        options = ForwardOptions(
            lm_head=True, top_k=top_k, values=True, capacity=capacity, lanes=lanes, steps=steps
        )
        kind = quantized if config.shape.name == "int8" else rounded
        self.checkpoint = stored(random_checkpoint(config, 5), kind)
        weights = weights or load_weights(
            backend, self.checkpoint, shard, max_rows=max_rows, page=page
        )
        parts = backend, group, shard, options, weights
        self.stack = TransformerStack(*parts, max_rows=max_rows, max_sequences=slots)
        self.max_rows = max_rows

    def forward(self, tokens: Sequence[int] | Ints, places: Places | None) -> Floats:
        """Returns the logits of all rows."""
        self.stack.buffers.tokens[: len(tokens)] = tokens
        self.stack.place(places)
        self.stack.body(self.max_rows)()
        return self.stack.logits(range(len(tokens)))

    def trunk(self, slot: int, start: int, tokens: Sequence[int] | Ints) -> Floats:
        """Returns the logits of trunk rows from position `start`, in one forward."""
        return self.forward(tokens, trunk_rows(slot, start, start + len(tokens)))

    def one_by_one(self, slot: int, tokens: Sequence[int] | Ints, start: int = 0) -> Floats:
        """Returns the same logits, of a forward for each row."""
        rows = [self.trunk(slot, start + n, tokens[n : n + 1]) for n in range(len(tokens))]
        return np.concatenate(rows)

    def kept(self, slot: int, length: int) -> tuple[Floats, Floats]:
        """Returns copies of a slot's keys [layers, heads, n, width] and values, by position."""
        keys, values = self.stack.cache.arrays[:2]
        page = keys.shape[4]
        at = np.arange(length)
        holder = self.stack.pages.row_places.pages[slot, at // page]
        found = keys[:, holder, :, :, at % page], values[:, holder, :, at % page, :]
        return found[0].copy(), found[1].copy()


def dice_tokens(seed: int, count: int, vocab: int = 60) -> Ints:
    return np.random.default_rng(seed).integers(0, vocab, count).astype(np.int32)


def lane_rows(slot: int, lanes: Sequence[int], trunks: Sequence[int], step: int) -> Places:
    """Places of step `step` of some lanes of a slot, each after a trunk of its own length."""
    count = len(lanes)
    trunk = np.array(trunks, np.int32)
    slots = np.full(count, slot, np.int32)
    return Places(slots, trunk + np.int32(step), np.array(lanes, np.int32), trunk)


def joined(*parts: Places) -> Places:
    """The rows of several places, concatenated."""
    names = "slots", "positions", "lanes", "trunks"
    return Places(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
