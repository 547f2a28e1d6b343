"""What changes under the one kernel: weights that are swapped, and states that are kept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpissd.engine.comm.group import SoloGroup
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops.whole_ops import WholeOps
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint
from mpissd.engine.model.transformer.shard import TransformerShard
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.tensors import tensors
from mpissd.engine.model.transformer.weights import load_weights
from tests.emulator.launcher import EmulatedGpu
from tests.gpu.transformer_rig import Rig, tiny, use_whole

TABLE = "model.embed_tokens.weight"
TOKENS = [5, 9, 2]


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("kernels"))


class Swapped:
    """A checkpoint of one model's embedding and another's other weights, as of a file."""

    def __init__(self, old: RandomCheckpoint, new: RandomCheckpoint) -> None:
        self._old, self._new, self.config = old, new, old.config

    def _of(self, name: str) -> RandomCheckpoint:
        return self._old if name == TABLE else self._new

    def matrix(self, name: str, *part: Any) -> Any:
        return self._of(name).matrix(name, *part)

    def vector(self, name: str, *part: Any) -> Any:
        return self._of(name).vector(name, *part)

    def random_part(self, *_: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._old, name)


@pytest.mark.slow
def test_a_swap_of_weights_reaches_every_cache(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stacks over the same weights have the bits of a model that was loaded anew."""
    use_whole(monkeypatch, is_on=True)
    config = tiny("qwen2", 1)
    old, new = RandomCheckpoint(config, 3), RandomCheckpoint(config, 9)
    weights = load_weights(gpu, old, TransformerShard(config), max_rows=8, page=128)
    assert isinstance(weights.ops, WholeOps)
    rigs = [
        Rig(gpu, config, weights=weights, checkpoint=old, max_rows=8, **more)
        for more in ({}, {"capacity": 512, "slots": 1})
    ]
    before = [rig.forward(TOKENS, trunk_rows(0, 0, 3)) for rig in rigs]
    arrays = {
        name: new.matrix(name) if len(shape) == 2 else new.vector(name)
        for name, shape in tensors(config)
        if name != TABLE
    }
    for _ in rigs[0].stack.reload(arrays):
        pass
    behind = [rig.forward(TOKENS, trunk_rows(0, 0, 3)) for rig in rigs]
    anew: Any = Swapped(old, new)
    expected = Rig(gpu, config, checkpoint=anew, max_rows=8).forward(TOKENS, trunk_rows(0, 0, 3))
    assert np.array_equal(*before) and not np.array_equal(before[0], expected)
    assert all(np.array_equal(found, expected) for found in behind)


@pytest.mark.slow
def test_kept_states_are_those_of_separate_kernels(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, found = tiny("llama"), []
    options = ForwardOptions(lm_head=True, top_k=3, values=True, capacity=64, states=True)
    for is_on in (False, True):
        use_whole(monkeypatch, is_on=is_on)
        shard = TransformerShard(config)
        weights = load_weights(gpu, RandomCheckpoint(config, 3), shard, max_rows=8, page=128)
        assert isinstance(weights.ops, WholeOps) == is_on
        stack = TransformerStack(
            gpu, SoloGroup(), shard, options, weights, max_rows=8, max_sequences=2
        )
        stack.buffers.tokens[:5] = [3, 7, 1, 9, 50]
        stack.place(trunk_rows(0, 0, 5))
        stack.body(8)()
        found.append((np.array(stack.states, np.float32)[0, :7], stack.logits(range(5))))
    (states, logits), (own_states, own_logits) = found
    assert np.array_equal(states.any(-1), own_states.any(-1)) and states.any()
    assert np.abs(own_states - states).max() < 2e-3 * np.abs(states).max()
    assert np.abs(own_logits - logits).max() < 5e-3 * np.abs(logits).max()
