"""Every operation of the cupy backend against the NumPy oracle."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import ConfigError
from mpissd.engine.backend.base import WeightPart
from mpissd.engine.backend.numpy_backend import NumpyBackend
from tests.gpu.agreement import relative_error, tolerance
from tests.needs import lack

pytestmark = pytest.mark.gpu
ORACLE = NumpyBackend()
TOP_K_SHAPES = [(1, 64), (3, 77), (8, 2048), (24, 4097), (5, 128256), (2, 300_000)]
PACKED_SHAPES = [(64, 16), (704, 176), (2048, 3072), (8192, 1280), (14336, 4096)]
SHAPES = [(37, 53), (64, 8), (511, 1025), (2048, 3072), (8192, 1280), (28672, 1024)]


def halves(rng: Any, *shape: int) -> Any:
    """Float32 values that float16 holds exactly."""
    return rng.standard_normal(shape).astype(np.float16).astype(np.float32)


def whole(key: int, rows: int, columns: int) -> WeightPart:
    """All of a matrix, its scale keeping the variance."""
    return WeightPart(key, 0, rows, 0, columns, rows**-0.5)


@pytest.mark.parametrize(
    "parts",
    [
        [whole(1, 37, 53)],
        [whole(0xFFFFFFFF, 2048, 3072)],
        [WeightPart(7, 5, 70, 11, 19, 0.5), WeightPart(8, 5, 70, 0, 3, 2.0)],
        [WeightPart(7, 96, 224, 64, 128, 1e-3), WeightPart(9, 96, 224, 1, 1000, 1e-3)],
        [WeightPart(3, 0, 8, 128255, 256510, 0.01)],
    ],
)
def test_weights_are_numpys_to_the_last_bit(backend: Any, parts: list[WeightPart]) -> None:
    expected = ORACLE.weight(parts).astype(np.float16)
    found = backend.to_host(backend.weight(parts)).astype(np.float16)
    assert found.shape == expected.shape
    assert np.array_equal(found.view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("rows", [1, 3, 24])
@pytest.mark.parametrize("width", [53, 2048])
def test_gather_takes_tokens_modulo_the_table(backend: Any, rows: int, width: int) -> None:
    tokens, on_device = ORACLE.host_ints(rows), backend.host_ints(64)[:rows]
    tokens[:] = np.random.default_rng(rows).integers(-(2**31), 2**31, rows)
    on_device[:] = tokens
    out = backend.view(backend.activation(rows + 1, width + 8), rows, 3, 3 + width)
    expected = ORACLE.activation(rows, width)
    ORACLE.gather(ORACLE.table(1000, width, 5), tokens, expected)
    backend.gather(backend.table(1000, width, 5), on_device, out)
    assert np.array_equal(backend.to_host(out), expected.astype(np.float16))


def fused(last: int) -> list[WeightPart]:
    widths = {1: 256, 2: last}
    return [WeightPart(key, 0, 512, 8, 8 + width, 512**-0.5) for key, width in widths.items()]


@pytest.mark.parametrize("rows", [1, 3, 8, 24, 64])
def test_products(backend: Any, rows: int) -> None:
    for shape in SHAPES:
        check_product(backend, rows, [whole(11, *shape)], start=0)
    for start in (1, 64):  # column views and fused parts
        check_product(backend, rows, fused(65), start)


@pytest.fixture
def packing(backend: Any) -> Iterator[Any]:
    """The backend, chaining its products."""
    if backend.no_chain_reason:
        lack(f"a GPU that runs chains ({backend.no_chain_reason})")
    backend.plan_rows(32)
    yield backend
    backend.plan_rows(None)


@pytest.mark.parametrize("rows", [1, 5, 8, 16, 24, 32, 70])
def test_packed_products(packing: Any, rows: int) -> None:
    for shape in PACKED_SHAPES:
        check_product(packing, rows, [whole(11, *shape)], start=0)
    check_product(packing, rows, fused(64), start=64)
    with pytest.raises(ConfigError, match="multiples of 8"):
        check_product(packing, rows, fused(64), start=1)


def test_a_packed_weight_is_the_same_weight(packing: Any) -> None:
    parts = [WeightPart(7, 32, 128, 11, 59, 0.5), WeightPart(8, 32, 128, 0, 16, 2.0)]
    weight = packing.weight(parts)
    expected = ORACLE.weight(parts).astype(np.float16)
    assert weight.packed and np.array_equal(packing.to_host(weight), expected)
    packing.from_host(2 * expected, weight)
    assert np.array_equal(packing.to_host(weight), 2 * expected)


def check_product(backend: Any, rows: int, parts: list[WeightPart], start: int) -> None:
    """x and out are columns from `start` on of wider buffers; other columns are not written."""
    weight = ORACLE.weight(parts)
    k, n = weight.shape
    x = halves(np.random.default_rng(rows), rows, k)
    source, target = (backend.activation(rows + 2, width + 2 * start) for width in (k, n))
    x_view = backend.view(source, rows, start, start + k)
    out_view = backend.view(target, rows, start, start + n)
    backend.from_host(x, x_view)
    backend.matmul(x_view, backend.weight(parts), out_view)
    expected = ORACLE.activation(rows, n)
    ORACLE.matmul(x, weight, expected)
    assert relative_error(backend.to_host(out_view), expected) <= tolerance(1)
    untouched = backend.to_host(target)
    untouched[:rows, start : start + n] = np.nan
    assert np.isnan(untouched).all()


@pytest.mark.parametrize("k, levels", [(1, 3), (1, None), (5, 3), (24, None), (64, 3)])
@pytest.mark.parametrize("rows, width", TOP_K_SHAPES)
def test_top_k(backend: Any, rows: int, width: int, k: int, levels: int | None) -> None:
    rng = np.random.default_rng(width + k)
    values = halves(rng, rows, width)
    if levels:  # many ties, of both zeros too
        values = rng.integers(-1, levels - 1, (rows, width)) * halves(rng, rows, 1)
    buffer = backend.activation(rows, width + 3)
    for start in (0, 3):  # aligned rows or not
        view = backend.view(buffer, rows, start, start + width)
        backend.from_host(values, view)
        ids, tops = backend.top_buffers(rows, k)
        expected_ids, expected_tops = ORACLE.top_buffers(rows, k)
        ORACLE.top_k(values, k, expected_ids, expected_tops)
        backend.top_k(view, k, ids, tops)
        assert np.array_equal(backend.to_host(ids), expected_ids)
        assert np.array_equal(backend.to_host(tops), expected_tops)


def test_read_out_reaches_the_host(backend: Any) -> None:
    ids, _ = backend.top_buffers(7, 5)
    values = np.arange(35, dtype=np.int32).reshape(7, 5)
    backend.from_host(values, ids)
    host = backend.host_ints(40)
    backend.read_out(ids, host)
    backend.synchronize()
    assert np.array_equal(host, [*range(35), 0, 0, 0, 0, 0])


@pytest.mark.parametrize("num_bytes", [16, 4096, 1_000_000, 100_000_000])
def test_a_read_reads_every_word_once(backend: Any, num_bytes: int) -> None:
    buffer = backend.random_words(num_bytes)
    words = buffer.view(np.uint32).ravel()[: -(-num_bytes // 16) * 4]
    expected = int(backend.to_host(words).sum(dtype=np.uint64)) % 2**32
    for passes in (1, 3):
        backend.read_words(buffer, num_bytes, passes)
        found = int(backend.to_host(backend._sums).sum(dtype=np.uint64)) % 2**32
        assert found == expected * passes % 2**32


def test_copies_through_page_locked_memory(backend: Any) -> None:
    array = backend.activation(3, 10)
    values = halves(np.random.default_rng(0), 3, 10)
    backend.from_host(values, array)
    host = backend.host_ints(15)
    backend.copy_out(array, host)
    backend.synchronize()
    assert np.array_equal(host.view(np.float16).reshape(3, 10), values)
    host.view(np.float16)[:] = 2
    backend.copy_in(host, array)
    over = backend.fence()
    backend.synchronize()
    assert over() and (backend.to_host(array) == 2).all()


def test_errors_name_the_value(backend: Any) -> None:
    from mpissd.engine.backend.cupy_device import device_empty

    with pytest.raises(ConfigError, match="10000000000000 bytes wanted"):
        device_empty((10**13,), np.uint8)
