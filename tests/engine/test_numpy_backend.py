"""The NumPy backend: the oracle of the others, so it is checked by hand."""

from __future__ import annotations

import numpy as np
import pytest

from mpissd.engine.backend import weights
from mpissd.engine.backend.base import Cost, WeightPart
from mpissd.engine.backend.numpy_backend import NumpyBackend

COST = Cost(1, 0, 0, 0, 0, 0, 0, 1)


@pytest.fixture
def backend() -> NumpyBackend:
    return NumpyBackend()


def test_a_fused_weight_is_its_parts_side_by_side(backend: NumpyBackend) -> None:
    parts = [WeightPart(key, 3, 11, 2, 2 + width, 0.5) for key, width in ((1, 4), (2, 6))]
    fused = backend.weight(parts)
    assert fused.shape == (8, 10) and fused.flags.c_contiguous and fused.dtype == np.float32
    assert np.array_equal(fused[:, :4], weights.part(parts[0]))
    assert np.array_equal(fused[:, 4:], backend.weight(parts[1:]))


def test_tokens_look_up_rows_around_the_end_of_the_table(backend: NumpyBackend) -> None:
    table, out = backend.table(8, 3, 5), backend.activation(4, 3)
    backend.gather(table, np.array([0, 7, 8, 128255], np.int32), out)
    assert np.array_equal(out, table[[0, 7, 0, 128255 % 8]])


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_k_falls_and_ties_go_to_the_smaller_id(backend: NumpyBackend, k: int) -> None:
    values = np.array([[1, 5, 5, 0, 5], [2, 2, 2, 2, 2], [-1, -2, -3, -4, 9]], np.float32)
    ids, found = backend.top_buffers(3, k)
    backend.top_k(values, k, ids, found)
    want = [[1, 2, 4, 0, 3], [0, 1, 2, 3, 4], [4, 0, 1, 2, 3]]
    assert ids.tolist() == [row[:k] for row in want]
    assert np.array_equal(found, np.take_along_axis(values, ids, axis=1))
    host = backend.host_ints(20)
    backend.read_out(ids, host)
    assert host[: 3 * k].tolist() == ids.ravel().tolist() and (host[3 * k :] == 0).all()


def test_reads_that_others_disturb_do_not_lower_the_rate(
    backend: NumpyBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that was busy while its rate was measured gave a floor above its forwards."""
    seconds = iter(range(1, 10**6))
    clock = [0.0]

    def tick() -> float:
        clock[0] += 1e-3 if next(seconds) % 5 == 1 else 4e-3
        return clock[0]

    monkeypatch.setattr("mpissd.engine.backend.numpy_backend.time.perf_counter", tick)
    assert backend.read_bandwidth(10**6) == pytest.approx(1e6 / 1e-3)
