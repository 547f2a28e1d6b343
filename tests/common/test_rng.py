"""Counter-based draws: any position on its own, in any order, in any process."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.rng import Purpose, uniforms

MASK = 2**64 - 1


def philox(counter: int, key: tuple[int, int]) -> list[int]:
    """Philox4x64-10 (Salmon et al. 2011), word by word."""
    words, (low, high) = [counter & MASK, counter >> 64, 0, 0], key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [b >> 64 ^ words[1] ^ low, b & MASK, a >> 64 ^ words[3] ^ high, a & MASK]
        low, high = (low + 0x9E3779B97F4A7C15) & MASK, (high + 0xBB67AE8584CAA73B) & MASK
    return words


@pytest.mark.parametrize("position", [0, 1, 3, 4, 4095, 2**31, 2**40 + 3])
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_the_draw_is_philox_of_seed_purpose_sequence_and_position(seed: int, position: int) -> None:
    sequence, purpose = 5, Purpose.ACCEPT
    word = philox(position // 4 + 1, (seed, int(purpose) << 32 | sequence))[position % 4]
    drawn = uniforms(seed, purpose, sequence, position, 1)
    assert drawn[0] == (word >> 11) / 2**53


@given(
    st.integers(0, 2**64 - 1),
    st.sampled_from(Purpose),
    st.integers(0, 2**31 - 1),
    st.integers(0, 2**20),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_a_window_is_a_slice_of_a_longer_one(
    seed: int, purpose: Purpose, sequence: int, start: int, skip: int, count: int
) -> None:
    long = uniforms(seed, purpose, sequence, start, skip + count)
    part = uniforms(seed, purpose, sequence, start + skip, count)
    assert part.dtype == np.float64
    assert part.tolist() == long[skip:].tolist()
