"""The transformer's CUDA kernels on a processor (tests/emulator), against NumPy; no GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.law.tree import Shape
from mpissd.engine.model.transformer.cupy_ops import ops as gpu_ops
from mpissd.engine.model.transformer.cupy_ops.ops import CupyOps
from mpissd.engine.model.transformer.trees import Size
from tests.emulator.launcher import EmulatedGpu
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import (
    COPIES,
    STAGES,
    Rig,
    check_growing,
    check_lanes,
    check_rows_alone,
    check_stages,
    check_tree,
    prompt,
    tiny,
    uneven,
)
from tests.thread_group import ThreadGroup, on_ranks

pytestmark = pytest.mark.slow  # builds the kernels


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_forward_is_the_references(gpu: Any, family: str) -> None:
    rig = Rig(gpu, tiny(family, layers=1))
    tokens = prompt(rig, 5)
    assert relative_error(rig.fill(tokens, 4), rig.reference(tokens)) < 5e-3


def test_two_ranks_that_split_heads_unevenly_are_the_references(tmp_path: Path) -> None:
    def play(group: ThreadGroup) -> Any:
        rig = Rig(EmulatedGpu(tmp_path / str(group.rank)), uneven("five"), group=group)
        tokens = prompt(rig, 4)
        return rig.fill(tokens, 4), rig.reference(tokens)

    parts = on_ranks(2, play, 300)
    joined = np.concatenate([logits for logits, _ in parts], axis=1)
    assert relative_error(joined, parts[0][1]) < 8e-3


def test_a_row_is_the_same_in_any_forward(gpu: Any) -> None:
    """17 rows are three tiles of rows, 33 two groups of 32."""
    check_rows_alone(Rig(gpu, tiny("llama", layers=1), max_rows=33), 33, [17, 33])


@pytest.mark.parametrize("kind", gpu_ops._LARGE)
def test_a_row_is_the_same_in_large_blocks(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, kind: tuple[int, int, int]
) -> None:
    """70 rows are 64 and 6; the head's 7 tiles of columns do not divide into these blocks."""
    monkeypatch.setattr(gpu_ops, "_MIN_BLOCKS", 1)
    monkeypatch.setattr(gpu_ops, "_LARGE", (kind,))
    rig = Rig(gpu, tiny("llama", layers=1), max_rows=70)
    tokens = prompt(rig, 70)
    assert np.array_equal(rig.fill(tokens, 70), rig.fill(tokens, 32))
    built = [tuple(size for _, size in macros) for _, _, macros in gpu.launcher(early=False).built]
    assert (kind[1], kind[0], kind[2]) in built


@pytest.mark.parametrize(
    "rows, depth, tiles, clusters, kind",
    [
        (40, 1056, 5, 1, "float32"),  # a rest of the depth; a block without a tile of rows
        (64, 1120, 37, 2, "gated"),  # two units; columns beyond the last
        (100, 1024, 13, 2, "float16"),  # two groups of rows
        (25, 1024, 4, 1, "float32"),  # two blocks without a tile of rows
    ],
)
def test_clusters_have_the_bits_of_blocks(
    gpu: Any, rows: int, depth: int, tiles: int, clusters: int, kind: str
) -> None:
    launcher = gpu.launcher(early=False)
    random = np.random.default_rng(rows)
    x = launcher.uploaded(random.standard_normal((rows, depth)), np.float16)
    values = launcher.uploaded(random.standard_normal(16 * tiles * depth) / 32, np.float16)
    columns = (8 if kind == "gated" else 16) * tiles - 3
    weight = gpu_ops.PackedWeight(values, depth, columns, gated=kind == "gated")
    outs, dtype = [], np.float32 if kind == "float32" else np.float16
    for launcher.clusters in (0, clusters):
        outs.append(launcher.empty((rows, columns), dtype))
        gpu_ops.multiply(launcher, x, weight, outs[-1], rows)
    assert launcher.launches[-2:] == [f"skinny_{kind}", f"wide_{kind}"]
    assert np.array_equal(*(out.view(np.uint16) for out in outs)) and not np.isnan(outs[0]).any()


def test_a_lane_is_a_trunk(gpu: Any) -> None:
    """From 126 on the lanes grow into the next split, and page."""
    check_lanes(Rig(gpu, tiny("llama", layers=1), num_lanes=2), 126, 4)


def test_a_tree_is_its_paths(gpu: Any) -> None:
    for backend in (gpu, NumpyBackend()):
        check_tree(Rig(backend, tiny("llama", layers=1), num_lanes=8), 126)


@STAGES
def test_every_stage_of_a_chained_round_is_its_twins(
    gpu: Any, tree: Shape, dynamic: Size | None, masks: range
) -> None:
    check_stages(gpu, tree, dynamic, masks)


@COPIES
def test_a_lookup_on_the_device_is_its_twin(gpu: Any, depth: int) -> None:
    check_stages(gpu, Shape(range(depth)), None, range(0), copies=True)


def test_every_stage_of_chained_growth_is_its_twins(gpu: Any) -> None:
    check_growing(gpu)


@pytest.mark.parametrize("width, k", [(101, 1), (5000, 5)])
def test_top_k_of_float32(gpu: Any, width: int, k: int) -> None:
    rng = np.random.default_rng(width)
    values = rng.integers(-9, 9, (2, width)).astype(np.float32) / 8
    values[0, 7] = -0.0
    warps = min(16, -(-width // 256))
    launcher, chunk = gpu.launcher(early=False), 4096
    chunks = -(-width // chunk)
    row = launcher.uploaded(values, np.float32)
    merged = launcher.zeros((2 * chunks * k,), np.uint64)
    ids, tops = launcher.zeros((2, k), np.int32), launcher.zeros((2, k), np.float32)
    sizes = (np.int64(width), np.int32(width), np.int32(chunk), np.int32(k))
    files = ("types", "top_k")
    args = row, *sizes, merged, ids, tops
    launcher.launch("top_k_float32", files, (chunks, 2), (32 * warps,), args, 8 * warps * k)
    if chunks > 1:
        args = merged, np.int32(chunks), np.int32(chunk), np.int32(k), ids, tops
        launcher.launch("top_k_merge_float32", files, (2,), (32,), args, 8 * chunks * k)
    oracle = NumpyBackend()
    expected_ids, expected = oracle.top_buffers(2, k)
    oracle.top_k(values, k, expected_ids, expected)
    assert np.array_equal(ids, expected_ids) and np.array_equal(tops, expected)


def test_what_the_kernels_lack_is_refused(gpu: Any) -> None:
    config = tiny("llama")
    odd = replace(config, shape=replace(config.shape, head_dim=48))
    with pytest.raises(ConfigError, match="head_dim=48: allowed: multiples of 32"):
        CupyOps(gpu, odd, heads=4, kv_heads=2)
    with pytest.raises(ConfigError, match="page=64: allowed: multiples of 128"):
        CupyOps(gpu, config, heads=4, kv_heads=2, page=64)
