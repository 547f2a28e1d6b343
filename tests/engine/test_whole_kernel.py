"""The whole forward's kernel on a processor (tests/emulator): each operation against its twin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.forwards import Places
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.cupy_ops import packing, whole_plan
from mpissd.engine.model.transformer.cupy_ops.attention import Attention
from mpissd.engine.model.transformer.cupy_ops.prefill import CupyChunks
from mpissd.engine.model.transformer.cupy_ops.whole import Whole
from mpissd.engine.model.transformer.cupy_ops.whole_ops import WholeOps, chosen
from mpissd.engine.model.transformer.cupy_ops.whole_plan import (
    OPERATION,
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


def num_whole(gpu: EmulatedGpu) -> int:
    """How many forwards have been one kernel so far."""
    return gpu.launcher(early=False).launches.count("whole")


@pytest.fixture(scope="module")
def gpu(tmp_path_factory: pytest.TempPathFactory) -> EmulatedGpu:
    return EmulatedGpu(tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets few rows of models of any width be one kernel."""
    monkeypatch.setattr(Whole, "least_hidden", 0)
    monkeypatch.setattr(Whole, "wide", 0)


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
@pytest.mark.parametrize("most, layers", [(12, 1), (7, 3), (20, 1)])
def test_one_kernel_has_the_bits_of_many(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, most: int, layers: int
) -> None:
    """One, two and three tiles of rows, and so one and two teams that attend."""
    found, before = [], num_whole(gpu)
    for whole in (False, True):
        monkeypatch.setattr(Whole, "most_rows", 32 if whole else 0)
        rig = Rig(gpu, tiny("smollm2", layers=layers), max_rows=most)
        found.append(rig.fill(prompt(rig, 130), most))
    assert np.array_equal(*found)
    assert num_whole(gpu) - before == -(-130 // most)


@pytest.mark.slow
def test_rows_of_one_lane_and_of_its_trunk_see_each_other(
    gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values that one forward stores and reads: two rows of a lane beside rows of its trunk."""
    found, before = [], num_whole(gpu)
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
    assert num_whole(gpu) - before == 16 + 2


@pytest.mark.slow
def test_padding_and_forwards_of_more_rows(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of padding alone ends; behind it one of two rows and padding, and one of 40 rows,
    which separate kernels compute, have the bits of separate kernels."""
    found, before = [], num_whole(gpu)
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
    assert num_whole(gpu) - before == 3


class Stored:
    """A checkpoint that has no recipe of its values, as a file."""

    def __init__(self, inner: RandomCheckpoint) -> None:
        self.config, self.matrix = inner.config, inner.matrix

    def random_part(self, *_: Any) -> None:
        return None


@pytest.mark.parametrize("head", [32, 64])
@pytest.mark.parametrize("is_random", [True, False])
def test_rotated_pairs_share_a_tile_and_are_unpacked_in_their_own_order(
    gpu: Any, head: int, is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a recipe, and of a file: two heads at a time."""
    monkeypatch.setattr(packing, "_STAGING_ELEMENTS", 2 * head * 64 + 1)
    config = tiny("llama" if head == 32 else "smollm2", layers=1)
    ops = chosen(gpu, config, heads=HEADS[config.family][0], kv_heads=1, max_rows=8, page=128)
    checkpoint, name = RandomCheckpoint(config, 4), "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(ops, WholeOps)
    given: Any = checkpoint if is_random else Stored(checkpoint)
    packed = ops.qkv_matrix(given, [Part(name)])
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


@pytest.mark.parametrize("hidden, most", [(2048, 16), (4096, 32)])
def test_more_rows_of_narrow_models_take_separate_kernels(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, hidden: int, most: int
) -> None:
    monkeypatch.undo()
    config = tiny("llama", layers=1)
    config = replace(config, shape=replace(config.shape, hidden=hidden))
    whole = Whole(gpu.launcher(early=False), config, Attention.__new__(Attention), None)
    whole._attention.page = 128
    assert whole.suits(most) and not whole.suits(most + 1)
