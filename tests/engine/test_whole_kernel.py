"""The whole forward's kernel on a processor (tests/emulator): each operation against its twin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.forwards import Places
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops import whole_plan
from mpissd.engine.model.transformer.cupy_ops.prefill import CupyChunks
from mpissd.engine.model.transformer.cupy_ops.whole import Whole
from mpissd.engine.model.transformer.cupy_ops.whole_ops import WholeOps, chosen
from mpissd.engine.model.transformer.cupy_ops.whole_plan import (
    OPERATION,
    Form,
    Step,
    geometry,
    table,
)
from mpissd.engine.model.transformer.ops import Part
from mpissd.engine.model.transformer.random_weights import RandomCheckpoint
from tests.emulator.launcher import EmulatedGpu
from tests.gpu.transformer_rig import HEADS, Rig, joined, prompt, tiny
from tests.whole_twin import differences

ROOM = 227 << 10


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets few rows of models of any width be one kernel."""
    monkeypatch.setattr(WholeOps, "is_on", True)
    monkeypatch.setattr(Whole, "least_hidden", 0)


FORMS = ["", "arrive=2", "arrive=1", "arrive=1,piece=8,flying=5,teams=1,ahead=3", "piece=8,holds=0"]


@pytest.mark.slow
@pytest.mark.parametrize("family, rows", [("llama", 3), ("qwen2", 9)])
def test_each_operation_is_its_twins(gpu: Any, family: str, rows: int) -> None:
    """125 tokens before the rows, so that they stand in two splits and pages."""
    rig = Rig(gpu, tiny(family), max_rows=16)
    found = dict(differences(rig, 125, rows))
    assert len(found) == 2 * (3 + 1 + 4 + 1 + 4) + 1
    assert max(found.values()) < 2e-3, {
        name: error for name, error in found.items() if error > 1e-3
    }


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_one_kernel_has_the_bits_of_many(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(Whole, "form", Form.parse(form))
    found = []
    for whole in (False, True):
        monkeypatch.setattr(Whole, "most_rows", 32 if whole else 0)
        rig = Rig(gpu, tiny("smollm2", layers=3 if form else 1), max_rows=12)
        found.append(rig.fill(prompt(rig, 60 if form else 130), 12))
    assert np.array_equal(*found)
    assert "whole" in gpu.launcher(early=False).launches


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS[:2])
def test_rows_of_one_lane_and_of_its_trunk_see_each_other(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Values that one forward stores and reads: two rows of a lane beside rows of its trunk."""
    monkeypatch.setattr(Whole, "form", Form.parse(form))
    found = []
    for whole in (False, True):
        monkeypatch.setattr(Whole, "most_rows", 32 if whole else 0)
        rig = Rig(gpu, tiny("llama", layers=2), max_rows=8)
        tokens = prompt(rig, 132)
        rig.fill(tokens[:124], 8)
        for first in (126, 128):  # behind two new tokens of the trunk, then across a page
            place = np.arange(first, first + 2, dtype=np.int32)
            of = np.zeros(2, np.int32)
            lane = Places(of, place, of, np.full(2, 126, np.int32))
            trunk = trunk_rows(0, 124, 126)
            rows = [*tokens[first : first + 2], *tokens[124:126]]
            found.append(rig.forward(rows, joined(lane, trunk), bucket=5)[:4])
    assert np.array_equal(found[0], found[2]) and np.array_equal(found[1], found[3])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["", "arrive=2"])
def test_padding_and_forwards_of_more_rows(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A forward of padding alone ends; behind it one of two rows and padding, and one of 40 rows,
    which separate kernels compute, have the bits of separate kernels."""
    monkeypatch.setattr(Whole, "form", Form.parse(form))
    found = []
    for most_rows in (32, 0):
        monkeypatch.setattr(Whole, "most_rows", most_rows)
        rig = Rig(gpu, tiny("llama"), max_rows=40)
        tokens = prompt(rig, 49)
        every = [rig.fill(tokens[:7], 7)]
        rig.stack.place(None)
        rig._programs[7].launch()
        every.append(rig.forward(tokens[7:9], trunk_rows(0, 7, 9), bucket=7))
        found.append([*every, rig.fill(tokens[9:], 40, start=9)])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("head", [32, 64])
def test_rotated_pairs_share_a_tile_and_are_unpacked_in_their_own_order(
    gpu: Any, head: int
) -> None:
    config = tiny("llama" if head == 32 else "smollm2", layers=1)
    ops = chosen(gpu, config, heads=HEADS[config.family][0], kv_heads=1, max_rows=8, page=128)
    checkpoint, name = RandomCheckpoint(config, 4), "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(ops, WholeOps)
    packed = ops.qkv_matrix(checkpoint, [Part(name)])
    expected = checkpoint.matrix(name).astype(np.float16)
    assert packed.head == head and packed.columns == len(expected)
    chunks = CupyChunks.__new__(CupyChunks)
    chunks._launcher, chunks._attention = gpu.launcher(early=False), ops._attention
    rows = gpu.launcher(early=False).zeros((expected.size,), np.float16)
    chunks._unpack(packed, rows)
    assert np.array_equal(rows.reshape(expected.shape), expected)


@pytest.mark.parametrize("rows", [1, 8, 9, 24, 32])
@pytest.mark.parametrize("head", [32, 64, 128])
def test_a_geometry_fills_a_multiprocessor(head: int, rows: int) -> None:
    found = geometry(rows, head, 256, ROOM)
    assert found.slots >= 8 and found.shared_bytes <= ROOM
    assert found.row_tiles == -(-rows // 8)
    assert found.slots == 12 or found.shared_bytes > ROOM - (17 << 10)


def test_a_table_says_where_operations_read_and_write() -> None:
    steps = [
        Step(whole_plan.QKV, 3, weight=64, x=128, out=256, depth=96, tiles=5, columns=80),
        Step(whole_plan.ATTEND, 3),
    ]
    made = table(iter(steps), rows=7)
    assert made.dtype == OPERATION and OPERATION.itemsize % 16 == 0
    first, second = made
    assert (first["pairs"], first["tiles"], first["group_tiles"], first["rows"]) == (3, 5, 5, 7)
    assert (first["x_step"], first["out_step"], first["columns"], first["layer"]) == (96, 80, 80, 3)
    assert (second["tiles"], second["weight"], second["kind"]) == (0, 0, whole_plan.ATTEND)
