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
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.model.forwards import merged
from mpissd.engine.model.transformer import numba_ops
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.ops import ops_of
from tests import transformer_reference as reference
from tests.thread_group import ThreadGroup, on_ranks
from tests.transformer_rig import FAMILIES, TINY, Rig, dice_tokens, joined, lane_rows

LLAMA = FAMILIES["llama"]
RIG = Rig(LLAMA)  # for tests that do not change it
COUNT = 70  # more than a page of 64 and four of 16


@pytest.mark.parametrize("family", FAMILIES)
def test_it_computes_what_plain_numpy_does(family: str) -> None:
    rig, tokens = Rig(FAMILIES[family]), dice_tokens(1, 40)
    want = reference.logits(rig.checkpoint, tokens.tolist())
    found = rig.trunk(0, 0, tokens)
    assert np.abs(want).max() > 0.5 and np.std(want, axis=0).max() > 0.1
    # Products with int8 round their inputs to 16 bits; test_packed.py has their exact values.
    allowed = 5e-4 if family == "int8" else 2e-5
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=allowed)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [2, 7, 32])
def test_a_row_is_itself_alone_among_any_others(family: str, rows: int) -> None:
    """Bit by bit, in forwards of any size: prompts in chunks, verifications, single tokens."""
    rig, tokens = Rig(FAMILIES[family]), dice_tokens(2, COUNT)
    alone = rig.one_by_one(0, tokens)
    parts = [rig.trunk(1, n, tokens[n : n + rows]) for n in range(0, COUNT, rows)]
    assert np.array_equal(np.concatenate(parts), alone)
    for mine, other in zip(rig.kept(0, COUNT), rig.kept(1, COUNT), strict=True):
        assert np.array_equal(mine, other)


TEXTS = [dice_tokens(10 + slot, 40) for slot in range(4)]


@cache
def alone(slot: int) -> Any:
    return Rig(LLAMA).one_by_one(0, TEXTS[slot])


@settings(max_examples=20)
@given(data=st.data())
def test_ragged_forwards_of_many_sequences(data: st.DataObject) -> None:
    rig, lengths = Rig(LLAMA, slots=4), [0] * 4
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
    """A lane after any trunk, over page borders too, has the bits of the same text as a trunk."""
    rig, steps = Rig(FAMILIES[family]), 20
    text = dice_tokens(4, trunk)
    grown = [dice_tokens(5 + lane, steps) for lane in range(3)]
    cuts = [trunk, max(1, trunk - 1), max(1, trunk - 5)]
    rig.trunk(0, 0, text)
    found = [
        rig.forward([lane[step] for lane in grown], lane_rows(0, [4, 0, 2], cuts, step))
        for step in range(steps)
    ]
    for lane, cut in enumerate(cuts):
        whole = np.concatenate([text[:cut], grown[lane]])
        want = Rig(FAMILIES[family]).one_by_one(0, whole)[cut:]
        assert np.array_equal(np.stack([step[lane] for step in found]), want)


@settings(max_examples=50)
@given(data=st.data())
def test_equal_logits_go_to_the_lower_token(data: st.DataObject) -> None:
    rows, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 300))
    k = data.draw(st.integers(1, min(width, 30)))
    dice = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    ops = RIG.stack.weights.ops
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
    config, tokens = replace(LLAMA, shape=shape, head_vocab=149), dice_tokens(13, 40)

    def play(group: ThreadGroup) -> Any:
        rig = Rig(config, group=group, top_k=5)
        together = [rig.trunk(0, n, tokens[n : n + 7]) for n in range(0, 40, 7)]
        best = merged(*rig.stack.read(rig.max_rows))
        return np.concatenate(together), rig.one_by_one(1, tokens), best

    found = on_ranks(tp, play)
    want = Rig(config).one_by_one(0, tokens)
    for together, alone, _ in found:
        assert np.array_equal(together, alone)
    np.testing.assert_allclose(np.concatenate([f[1] for f in found], 1), want, rtol=1e-4, atol=1e-5)
    whole = np.concatenate([f[1] for f in found], 1)[-5:]
    order = np.argsort(-whole, axis=1, kind="stable")[:, :5]
    for _, _, best in found:
        assert np.array_equal(best.ids[0], order) and best.values is not None
        assert np.array_equal(best.values[0], np.take_along_axis(whole, order, 1))


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
