"""The one kernel of ranks that share a model, on a processor: sums over the ranks within it.

Each rank is a thread with an emulated GPU of its own, whose kernels write the others' inboxes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cache import trunk_rows
from mpissd.engine.model.transformer.config import TransformerConfig
from mpissd.engine.model.transformer.cupy_ops.ops import CupyOps
from mpissd.engine.model.transformer.cupy_ops.whole import Whole
from mpissd.engine.model.transformer.cupy_ops.whole_ops import VARIABLE, WholeOps, chosen
from tests.emulator.launcher import EmulatedGpu
from tests.emulator.oneshot import EmulatedOneshot, on_gpus
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import Rig, prompt, uneven, use_whole
from tests.thread_group import ThreadGroup, on_ranks
from tests.whole_twin import differences

BOUND = 8e-3  # of a float16 forward against float32


@pytest.fixture(autouse=True)
def one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    use_whole(monkeypatch, is_on=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


def of_sizes(name: str, **sizes: int) -> TransformerConfig:
    config = uneven(name)
    return replace(config, shape=replace(config.shape, **sizes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "tp, rows, config",
    [
        (2, 5, uneven("five")),
        pytest.param(2, 12, uneven("three"), marks=pytest.mark.long),
        pytest.param(4, 3, of_sizes("five", ffn=256, num_layers=1), marks=pytest.mark.long),
        # Blocks have two units of columns, of two tiles of rows each.
        pytest.param(2, 12, of_sizes("five", hidden=256, num_layers=1), marks=pytest.mark.long),
    ],
)
def test_one_kernel_has_the_bits_of_many_and_of_a_row_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tp: int, rows: int, config: TransformerConfig
) -> None:
    """Heads that ranks split unevenly; all ranks choose the same candidates."""

    def play(gpu: EmulatedGpu, group: Group) -> Any:
        monkeypatch.setattr(Whole, "most_rows", 32)
        rig = Rig(gpu, config, max_rows=rows, group=group)
        tokens = prompt(rig, rows)
        alone = rig.fill(tokens, 1)
        together = rig.fill(tokens, rows, slot=1)
        best = rig.stack.read(rows)
        assert {"whole", "exchange"} <= set(gpu.launcher(early=False).launches)
        assert np.array_equal(together, alone)
        return rig, tokens, together, best

    def apart(gpu: EmulatedGpu, group: Group) -> Any:
        monkeypatch.setattr(Whole, "most_rows", 0)
        rig = Rig(gpu, config, max_rows=rows, group=group)
        found = rig.fill(prompt(rig, rows), rows)
        assert "whole" not in gpu.launcher(early=False).launches
        return found, rig.stack.read(rows)

    found, separate = on_gpus(tp, folder, play), on_gpus(tp, folder, apart)
    rig, tokens, _, (ids, values) = found[0]
    for (_, _, logits, own), (expected, best) in zip(found, separate, strict=True):
        assert np.array_equal(logits, expected)
        assert np.array_equal([ids, values], own) and np.array_equal([ids, values], best)
    joined, reference = np.concatenate([part[2] for part in found], axis=1), rig.reference(tokens)
    assert relative_error(joined, reference) < BOUND
    of_rank = values[0, :, :, 0].argmax(0)
    assert np.array_equal(ids[0, of_rank, range(rows), 0], joined.argmax(-1))


@pytest.mark.slow
def test_each_operation_is_its_twins(folder: Path) -> None:
    """The tensors of both ranks are joined; what both have has equal bits."""

    def play(gpu: EmulatedGpu, group: Group) -> Any:
        assert isinstance(group, EmulatedOneshot)
        rig = Rig(gpu, uneven("three"), max_rows=8, group=group)
        return dict(differences(rig, 3, 3, group.everyone))

    found, other = on_gpus(2, folder, play)
    assert found == other and len(found) == 2 * (3 + 1 + 4 + 1 + 4) + 1
    assert max(found.values()) < 2e-3, found


@pytest.mark.slow
def test_a_peer_that_never_comes_ends_the_wait(tmp_path: Path) -> None:
    def play(gpu: EmulatedGpu, group: Group) -> Any:
        assert isinstance(group, EmulatedOneshot)
        if group.rank == 1:
            return None
        group.limit_ns = 10**6
        rig = Rig(gpu, uneven("five"), max_rows=8, group=group)
        return rig.forward(prompt(rig, 2), trunk_rows(0, 0, 2)), int(gpu.stop[0])

    (logits, stop), _ = on_gpus(2, tmp_path, play)
    assert stop == 1 and np.isnan(logits).all()


@pytest.mark.slow
def test_ranks_that_map_no_memory_take_separate_kernels(folder: Path) -> None:
    def play(group: ThreadGroup) -> Any:
        gpu = EmulatedGpu(folder / str(group.rank))
        rig = Rig(gpu, uneven("five"), max_rows=8, group=group)
        tokens = prompt(rig, 4)
        found = rig.fill(tokens, 4)
        assert "whole" not in gpu.launcher(early=False).launches
        return rig.stack.weights.kernel, found, rig.reference(tokens)

    (kernel, *_), _ = every = on_ranks(2, play, 300)
    assert kernel == "whole"
    joined = np.concatenate([found for _, found, _ in every], axis=1)
    assert relative_error(joined, every[0][2]) < BOUND


@pytest.mark.parametrize("is_on", [True, False])
def test_a_share_of_heads_is_one_kernel_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_on: bool
) -> None:
    monkeypatch.setenv(VARIABLE, "2" if is_on else "1")
    gpu = EmulatedGpu(tmp_path)
    ops = chosen(gpu, uneven("five"), heads=6, kv_heads=3, max_rows=8, page=128)
    assert type(ops) is (WholeOps if is_on else CupyOps)
