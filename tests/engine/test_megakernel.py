"""The megakernel of a forward on a processor (tests/emulator), and which models use it."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.shard import TransformerShard
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.checkpoint import (
    EMBEDDING,
    ArrayTensor,
    random_checkpoint,
    tensors,
)
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops import ops as cupy_ops
from mpissd.engine.model.transformer.cupy_ops.megakernel import MegakernelOps, chosen
from mpissd.engine.model.transformer.sources import config_of
from mpissd.engine.model.transformer.stack import load_weights
from tests.emulator.launcher import EmulatedGpu
from tests.gpu.transformer_rig import HEADS, Rig, check_tree, prompt, tiny, use_megakernel
from tests.transformer_reference import stored

ROOM, SMALL = 227 << 10, 99 << 10  # bytes of shared memory that a block may have
TOKENS = [5, 9, 2]


def num_whole(gpu: EmulatedGpu) -> int:
    """How many forwards have been one kernel so far."""
    return gpu.launcher(early=False).launches.count("whole")


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows of models of any width use the megakernel."""
    use_megakernel(monkeypatch, is_on=True)


@pytest.mark.slow
def test_one_kernel_has_the_bits_of_many(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One and two tiles of rows, and so one and two teams that attend."""
    found, before, most = [], num_whole(gpu), 12
    for whole in (False, True):
        monkeypatch.setattr(MegakernelOps, "most_rows", 32 if whole else 0)
        rig = Rig(gpu, tiny("smollm2", layers=1), max_rows=most)
        found.append(rig.fill(prompt(rig, 130), most))
    assert np.array_equal(*found)
    assert num_whole(gpu) - before == -(-130 // most)
    check_tree(Rig(gpu, tiny("smollm2", layers=1), num_lanes=8), 3)


def in_memory(name: str, matrix: Any) -> ArrayTensor:
    return ArrayTensor(matrix)


@pytest.mark.parametrize("head", [32, 64])
@pytest.mark.parametrize("is_random", [True, False])
def test_rotated_pairs_share_a_tile_and_are_unpacked_in_their_own_order(
    gpu: Any, head: int, is_random: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of a recipe, and of a file: two heads at a time."""
    monkeypatch.setattr(cupy_ops, "_STAGING_ELEMENTS", 2 * head * 64 + 1)
    config = tiny("llama" if head == 32 else "smollm2", layers=1)
    ops = chosen(gpu, config, heads=HEADS[config.family][0], kv_heads=1, page=128)
    checkpoint, name = random_checkpoint(config, 4), "model.layers.0.self_attn.q_proj.weight"
    assert isinstance(ops, MegakernelOps)
    given = checkpoint if is_random else stored(checkpoint, in_memory)
    packed = ops.qkv_matrix([given.part(name)])
    expected = checkpoint.read(name).astype(np.float16)
    assert packed.head == head and packed.columns == len(expected)
    # As skinny.cu reads it: [head, tile, 32 inputs, 2, column of 8, 4, 2, half of the head, 2].
    halves = np.asarray(packed.values).view(np.float16)
    halves = halves.reshape(len(expected) // head, head // 16, -1, 2, 8, 4, 2, 2, 2)
    rows = halves.transpose(0, 7, 1, 4, 2, 5, 3, 6, 8)
    assert np.array_equal(rows.reshape(expected.shape), expected)


@pytest.mark.slow
def test_a_swap_of_weights_reaches_every_cache(gpu: Any) -> None:
    """Two stacks over the same weights have the bits of a model that was loaded anew."""
    config = tiny("qwen2", 1)
    old, new = random_checkpoint(config, 3), random_checkpoint(config, 9)
    weights = load_weights(gpu, old, TransformerShard(config), max_rows=8, page=128)
    assert isinstance(weights.ops, MegakernelOps)
    rigs = [
        Rig(gpu, config, weights=weights, checkpoint=old, max_rows=8, **more)
        for more in ({}, {"capacity": 512, "slots": 1})
    ]
    before = [rig.forward(TOKENS, trunk_rows(0, 0, 3)) for rig in rigs]
    arrays = {name: new.read(name) for name, _ in tensors(config) if name != EMBEDDING}
    for _ in rigs[0].stack.reload(arrays):
        pass
    after = [rig.forward(TOKENS, trunk_rows(0, 0, 3)) for rig in rigs]
    anew = replace(
        new, by_name={**stored(new, in_memory).by_name, EMBEDDING: old.by_name[EMBEDDING]}
    )
    expected = Rig(gpu, config, checkpoint=anew, max_rows=8).forward(TOKENS, trunk_rows(0, 0, 3))
    assert np.array_equal(*before) and not np.array_equal(before[0], expected)
    assert all(np.array_equal(found, expected) for found in after)


def device(capability: str = "9.0", room: int = ROOM) -> Any:
    return SimpleNamespace(
        info=SimpleNamespace(compute_capability=capability),
        launcher=lambda *, early: SimpleNamespace(shared_bytes=room),
    )


def model(**changed: Any) -> TransformerConfig:
    """Llama-3.2-1B, with other sizes of its shape or other properties."""
    config = config_of("llama-3.2-1b")
    shape = {name: changed.pop(name) for name in set(changed) & set(vars(config.shape))}
    return replace(config, shape=replace(config.shape, **shape), **changed)


def test_the_gpu_and_the_model_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for capability, room, expected in (
        ("8.0", ROOM, False),
        ("9.0", ROOM, True),
        ("10.0", ROOM, True),
        ("12.0", SMALL, False),  # no room for a ring of weights
    ):
        assert MegakernelOps.suits(device(capability, room), model(), heads=32) == expected
    others: tuple[dict[str, Any], ...] = {"hidden": 2016}, {"qk_norm": True}, {"kind": "eagle"}
    for changed in others:
        assert not MegakernelOps.suits(device(), model(**changed), heads=32)


def test_a_gpu_under_mps_takes_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert MegakernelOps.suits(device(), model(), heads=32)
    (tmp_path / "control").touch()
    assert not MegakernelOps.suits(device(), model(), heads=32)
