"""The stack of products: T shards add up to one, by any way of issuing it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.presets import ModelShape, resolve_model
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.model.forwards import merged
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import GemmStack, GemmWeights
from tests.thread_group import on_ranks

ROWS, MOST = 5, 8
GATED = ModelShape("gated", 3, 24, 12, 12, 4, 36, True, 96)  # q is 48 wide, hidden is 24
PLAIN = ModelShape("plain", 2, 24, 12, 12, 2, 48, False, 96)
TOKENS = np.array([3, 1024, 128255, 0, 3], np.int32)


def build(
    shape: ModelShape, options: ForwardOptions, group: Group, sequences: int = 1
) -> GemmStack:
    shard = Shard(shape, group.size, group.rank)
    backend = NumpyBackend()
    weights = GemmWeights(backend, shard, options, max_rows=MOST, seed=7)
    parts = backend, group, shard, options, weights
    return GemmStack(*parts, max_rows=MOST, max_sequences=sequences)


def forward(stack: GemmStack, rows: int = ROWS) -> GemmStack:
    stack.buffers.tokens[:rows] = np.resize(TOKENS, rows)
    stack.body(rows)()
    return stack


def hidden(stack: GemmStack) -> NDArray[np.float32]:
    return np.array(stack.buffers.hidden[:ROWS])


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("shape", [GATED, PLAIN], ids=lambda shape: shape.name)
@pytest.mark.parametrize("tp", [2, 3])
def test_the_shards_add_up_to_the_whole(tp: int, shape: ModelShape, fuse: bool) -> None:
    options = ForwardOptions(fuse=fuse)
    whole = forward(build(shape, options, SoloGroup()))
    stacks = on_ranks(tp, lambda group: forward(build(shape, options, group)))
    for stack in stacks:
        np.testing.assert_allclose(hidden(stack), hidden(whole), rtol=2e-4, atol=2e-5)
        assert stack.group.num_reduces == 2 * shape.num_layers
        assert stack.candidates.ids[:ROWS].tolist() == whole.candidates.ids[:ROWS].tolist()
    # q of all ranks side by side is q of the whole.
    width = stacks[0].shard.q_width
    q = np.concatenate([stack.buffers.qkv[:ROWS, :width] for stack in stacks], axis=1)
    np.testing.assert_allclose(q, whole.buffers.qkv[:ROWS, : shape.q_width], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", range(5))
def test_equal_values_of_several_shards_go_to_the_lowest_id(seed: int) -> None:
    dice = np.random.default_rng(seed)
    heads, tp, rows, k = dice.integers(1, 5, 4)
    width = k + dice.integers(0, 4)
    logits = dice.integers(0, 3, (heads, tp, rows, width)).astype(np.float32)  # full of ties
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k].astype(np.int32)
    first = np.arange(tp, dtype=np.int32)[:, None, None] * np.int32(width)
    found = merged(ids + first, np.take_along_axis(logits, ids, -1))
    whole = logits.swapaxes(1, 2).reshape(heads, rows, tp * width)
    want = np.argsort(-whole, axis=-1, kind="stable")[..., :k]
    assert np.array_equal(found.ids, want)
    assert np.array_equal(found.values, np.take_along_axis(whole, want, -1))


@pytest.mark.parametrize("own_tokens", [1, 4])
def test_a_context_s_reads_are_counted(own_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer: the prefix of every sequence, and every row's own tokens, within the buffer."""
    reads: list[int] = []
    sizes: list[int] = []

    def read(self: NumpyBackend, num_bytes: int) -> Callable[[int], None]:
        sizes.append(num_bytes)
        return reads.append

    monkeypatch.setattr(NumpyBackend, "read", read)
    options = ForwardOptions(context=10, own_tokens=own_tokens)
    stack = build(GATED, options, SoloGroup(), sequences=3)
    forward(stack)
    rows = len(TOKENS)
    layer = (3 * 10 + rows * own_tokens) * 2 * GATED.kv_width * 2
    assert reads == [layer] * GATED.num_layers and max(reads) <= min(sizes)
    assert sum(reads) == stack.shard.cost(rows, 3, 4, options).kv_bytes
    stack.body(1)()
    assert reads[-1] == layer - (rows - 1) * own_tokens * 2 * GATED.kv_width * 2


SMALL = "gen:layers=3,hidden=24,ffn=36,heads=12,head_dim=4,vocab=96"  # q is 48 wide, as of GATED
HEADS = ("eagle", "mtp", "medusa3", "mlp16", "mlp")


@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("model", [SMALL, *(f"{kind}:{SMALL}" for kind in HEADS)])
def test_a_model_issues_the_products_that_it_is_charged_for(
    model: str, lm_head: bool, fuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight is read once."""
    options = ForwardOptions(fuse=fuse, lm_head=lm_head)
    stack, read = build(resolve_model(model), options, SoloGroup()), list[Any]()
    multiply = stack.backend.matmul

    def matmul(x: Any, weight: Any, out: Any) -> None:
        assert x.shape[1] == weight.shape[0] and np.isfinite(x).all()
        read.append(weight)
        multiply(x, weight, out)

    monkeypatch.setattr(stack.backend, "matmul", matmul)
    forward(stack)
    assert len(read) == len(set(map(id, read))) == stack.shard.num_products(options)
    assert sum(weight.size for weight in read) == stack.shard.num_params(options)
