"""The transformer's forward on the CPU: against plain NumPy, and each row against a single one."""

import os
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ConfigError
from mpissd.common.presets import ModelShape
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.forwards import merged
from mpissd.engine.model.transformer import numba_ops
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    MASKS,
    ArrayTensor,
    Tensor,
    quantize,
    random_checkpoint,
)
from mpissd.engine.model.transformer.config import Llama3Scaling, TransformerConfig
from mpissd.engine.model.transformer.ops import ops_of
from tests.gpu.transformer_rig import Rig, check_lanes, check_rows_alone, joined, prompt
from tests.thread_group import ThreadGroup, on_ranks
from tests.transformer_reference import stored

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
LLAMA = FAMILIES["llama"]


def rounded(name: str, matrix: Any) -> Tensor:
    """Rounds a matrix to bfloat16."""
    bits = matrix.view(np.uint32)
    return ArrayTensor(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def quantized(name: str, matrix: Any) -> Tensor:
    """Stores a matrix as int8, except for the embedding."""
    return rounded(name, matrix) if name == EMBEDDING else ArrayTensor(*quantize(matrix))


def rig_of(config: TransformerConfig, *, slots: int = 2, group: Any = None) -> Rig:
    """A model on the CPU, of weights as files have them; its pages are short."""
    kind = quantized if config.shape.name == "int8" else rounded
    checkpoint = stored(random_checkpoint(config, 5), kind)
    sizes = {"max_rows": 40, "capacity": 100, "slots": slots, "num_lanes": 6, "steps": 20}
    return Rig(NumpyBackend(), config, page=16, checkpoint=checkpoint, group=group, **sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_plain_numpy_does(family: str) -> None:
    rig = rig_of(FAMILIES[family])
    tokens = prompt(rig, 40)
    want, found = rig.reference(tokens), rig.fill(tokens, 40)
    assert np.abs(want).max() > 0.5 and np.std(want, axis=0).max() > 0.1
    # Products with int8 round their inputs to 16 bits; test_packed.py has their exact values.
    allowed = 5e-4 if family == "int8" else 2e-5
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=allowed)


def test_mask_tokens_follow_the_vocabulary() -> None:
    rig = rig_of(replace(LLAMA, masks=3))
    table = rig.checkpoint.table()
    both = np.concatenate([rig.checkpoint.read(name) for name in (EMBEDDING, MASKS)])
    assert table.shape == both.shape and np.array_equal(table.read(), both)
    for first, last in ((147, 152), (150, 153), (151, 152), (3, 150)):
        assert np.array_equal(table.outputs(first, last).read(), both[first:last])
    hidden = rig.ops.hidden(4)
    rig.ops.embed(rig.ops.table(table), np.array([152, 7, 150, 149], np.int32), hidden, 4)
    assert np.array_equal(hidden[:, :48], both[[152, 7, 150, 149]])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_itself_alone_among_any_others(family: str) -> None:
    """In forwards of any size: prompts in chunks, verifications, single tokens. 70 tokens have more
    than a page of 64, and than four of 16."""
    check_rows_alone(rig_of(FAMILIES[family]), 70, [2, 7, 32])


RIG = rig_of(LLAMA)  # for tests that do not change it
TEXTS = [prompt(RIG, 40, seed=10 + slot) for slot in range(4)]


@cache
def alone(slot: int) -> Any:
    return rig_of(LLAMA).fill(TEXTS[slot], 1)


@settings(max_examples=20)
@given(data=st.data())
def test_ragged_forwards_of_many_sequences(data: st.DataObject) -> None:
    rig, lengths = rig_of(LLAMA, slots=4), [0] * 4
    while any(length < 40 for length in lengths):
        counts = [data.draw(st.integers(0, min(9, 40 - length))) for length in lengths]
        if not any(counts):
            counts[int(np.argmin(lengths))] = 1
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        spans = [(slot, lengths[slot], ends[slot]) for slot in range(4)]
        tokens = np.concatenate([TEXTS[slot][start:stop] for slot, start, stop in spans])
        found = rig.forward(tokens, joined(*(trunk_rows(*span) for span in spans)))
        want = np.concatenate([alone(slot)[start:stop] for slot, start, stop in spans])
        assert np.array_equal(found, want)
        lengths = ends


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "odd"])
@pytest.mark.parametrize("trunk", [1, 15, 40])
def test_lanes_are_what_the_trunk_would_be(family: str, trunk: int) -> None:
    """Over page borders, too."""
    check_lanes(rig_of(FAMILIES[family]), trunk, 20)


@settings(max_examples=50)
@given(data=st.data())
def test_equal_logits_go_to_the_lower_token(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, min(width, 30)))
    dice = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    ops = RIG.ops
    logits = ops.logits(rows, width)
    logits.scores[:, :width] = dice.integers(-3, data.draw(st.integers(-2, 90)), (rows, width))
    ids, values = np.zeros((rows, k), np.int32), np.zeros((rows, k), np.float32)
    ops.top_k(logits, k, ids, values, rows)
    want = np.argsort(-logits.scores[:, :width], axis=1, kind="stable")[:, :k]
    assert np.array_equal(ids, want)
    assert np.array_equal(values, np.take_along_axis(logits.scores, want, 1))


@pytest.mark.parametrize("tp, heads", [(2, (10, 5)), (3, (6, 3)), (3, (10, 5))], ids=str)
def test_uneven_shards_are_the_whole(tp: int, heads: tuple[int, int]) -> None:
    shape = replace(TINY, num_heads=heads[0], num_kv_heads=heads[1], ffn=70, vocab_size=149)
    config = replace(LLAMA, shape=shape, head_vocab=149)
    whole = rig_of(config)
    tokens = prompt(whole, 40)

    def play(group: ThreadGroup) -> Any:
        rig = rig_of(config, group=group)
        together = rig.fill(tokens, 7)  # 5 rows are left for the last forward
        best = merged(*rig.stack.read(5))
        return together, rig.fill(tokens, 1, slot=1), best

    found, want = on_ranks(tp, play), whole.fill(tokens, 1)
    for together, alone, _ in found:
        assert np.array_equal(together, alone)
    logits = np.concatenate([f[1] for f in found], 1)
    np.testing.assert_allclose(logits, want, rtol=1e-4, atol=1e-5)
    order = np.argsort(-logits[-5:], axis=1, kind="stable")[:, :3]
    for _, _, best in found:
        assert np.array_equal(best.ids[0], order) and best.values is not None
        assert np.array_equal(best.values[0], np.take_along_axis(logits[-5:], order, 1))


def test_a_read_only_checkout_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the user asked for no folder."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = Path(numba_ops._cache_folder())
    assert folder.parent == tmp_path / "cache" and folder.is_dir()


def test_without_numba_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match=r"on a CPU needs numba: pip install 'mpissd\[text\]'"):
        ops_of(NumpyBackend(), FAMILIES["llama"], heads=6, kv_heads=3)
