"""Two ranks that share one GPU, each with half of its multiprocessors: forwards in one kernel."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpissd.engine.model.transformer.cache import trunk_rows
from tests.gpu.agreement import relative_error
from tests.gpu.inboxes import Inboxes
from tests.gpu.transformer_rig import Rig, prompt, uneven, use_megakernel
from tests.needs import lack

pytestmark = pytest.mark.gpu
SIZES, REPEATS = (1, 5, 12, 24), 20


@pytest.fixture
def ranks(gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, Inboxes]]]:
    from mpissd.engine.backend.cupy_backend import CupyBackend

    use_megakernel(monkeypatch, is_on=True)
    backends = [CupyBackend(0) for _ in range(2)]
    if float(backends[0].info.compute_capability) < 9.0:
        lack("compute capability 9.0")
    inboxes = [Inboxes(backend, 2, rank) for rank, backend in enumerate(backends)]
    for own in inboxes:
        own.connect(other.inbox for other in inboxes)
    yield list(zip(backends, inboxes, strict=True))
    for backend in backends:
        backend.close()


def prepared(ranks: list[tuple[Any, Inboxes]], in_one: int) -> list[Rig]:
    """The ranks' models; the first `in_one` of them use one kernel. Their first runs come one after
    another, so they must not wait."""
    rigs = []
    for rank, (backend, own) in enumerate(ranks):
        rig = Rig(backend, uneven("five"), max_rows=24, group=own)
        rig.ops.most_rows = 24 if rank < in_one else 0
        assert all(rig.ops._takes(own, rows) == (rank < in_one) for rows in SIZES)
        rig.ops.launcher.multiprocessors //= len(ranks)
        backend.stop[0] = 1
        for rows in SIZES:
            rig.prepare(rows)
        backend.stop[0] = 0
        rig.ops.clear(rig.stack.cache)
        rigs.append(rig)
    return rigs


def logits(rigs: list[Rig], tokens: list[int], start: int) -> Any:
    for rig in rigs:
        rig.start(tokens, trunk_rows(0, start, start + len(tokens)))
    return np.concatenate([rig.finish(len(tokens)) for rig in rigs], axis=1)


def test_one_kernel_over_ranks_has_the_bits_of_many(ranks: list[tuple[Any, Inboxes]]) -> None:
    found = []
    for in_one in (0, 2, 1):
        rigs = prepared(ranks, in_one)
        tokens = prompt(rigs[0], sum(SIZES))
        for _ in range(REPEATS):
            start, parts = 0, []
            for rows in SIZES:
                parts.append(logits(rigs, tokens[start : start + rows], start))
                start += rows
            found.append(np.concatenate(parts))
    assert all(np.array_equal(each, found[0]) for each in found)
    assert relative_error(found[0], rigs[0].reference(tokens)) < 8e-3
