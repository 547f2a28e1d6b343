"""Counter-based uniforms U(purpose, sequence, position): equal in every mode, rank and timing.

Philox4x64 (Salmon et al. 2011), as NumPy ships it: the key is (seed, purpose and sequence), the
counter is the absolute token position, so any position can be drawn alone and in any order.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_WORDS = 4  # 64-bit words that one Philox counter value yields


class Purpose(IntEnum):
    """What a draw decides; two purposes never share a stream."""

    TOKEN = 1
    ACCEPT = 2
    WRONG = 3
    RANK = 4
    DRAFT = 5
    BONUS = 6
    PROMPT = 7
    TARGET_ROW = 8
    DRAFT_ROW = 9


def uniforms(
    seed: int, purpose: Purpose, sequence: int, start: int, count: int
) -> NDArray[np.float64]:
    """U(purpose, sequence, p) in [0, 1) for p = start … start+count-1, 53 bits each."""
    return stream(seed, (int(purpose) << 32) | sequence, start, count)


def stream(seed: int, word: int, start: int, count: int) -> NDArray[np.float64]:
    """Uniforms start … start+count-1 of the stream that (seed, word), 64 bits each, name."""
    first = start // _WORDS
    key = np.array([seed, word], dtype=np.uint64)
    bits = np.random.Philox(key=key, counter=first)
    skip = start - first * _WORDS
    raw = bits.random_raw(skip + count)[skip:]
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
