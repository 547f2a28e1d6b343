"""Random weights as a hash of (key, row, column): any part equals the same part of the whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.engine.backend import weights
from mpissd.engine.backend.base import WeightPart

KEY = 0xDEADBEEF
Edges = st.tuples(st.integers(0, 300), st.integers(1, 20))


def by_hand(key: int, row: int, column: int) -> float:
    """MurmurHash3's finaliser over the two coordinates, in whole numbers."""
    mask = 0xFFFFFFFF
    h = (row * 0x9E3779B1 & mask) ^ (column * 0x85EBCA77 & mask) ^ (key & mask)
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    return ((h ^ h >> 16) >> 8) / 2**24 - 0.5


@pytest.mark.parametrize("key", [0, 1, KEY, 2**32 - 1])
def test_an_element_by_hand(key: int) -> None:
    rows, columns = np.array([0, 1, 77, 28671, 2**20]), np.array([0, 5, 8191, 128255])
    found = weights.element(key, rows, columns)
    want = [[by_hand(key, int(r), int(c)) * 12**0.5 for c in columns] for r in rows]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-7)


@given(Edges, Edges)
def test_a_part_is_a_slice_of_the_whole(rows: tuple[int, int], columns: tuple[int, int]) -> None:
    (top, height), (left, width) = rows, columns
    whole = weights.part(WeightPart(KEY, 0, top + height, 0, left + width, 0.25))
    part = weights.part(WeightPart(KEY, top, top + height, left, left + width, 0.25))
    assert np.array_equal(part, whole[top:, left:])
