"""Counter-based random numbers U(purpose, sequence, position), equal in all modes and on all ranks.

The generator is NumPy's Philox4x64 (Salmon et al. 2011). Its key is made of the seed, the purpose
and the sequence; its counter is the absolute token position. So the number of a position can be
drawn alone and in any order, and draws do not depend on timing.
"""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

_WORDS = 4  # number of 64-bit words that Philox makes of one counter value


class Purpose(IntEnum):
    """What a random number decides; each purpose has its own stream of numbers."""

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
    """Returns random numbers in [0, 1), float64 [count], for a sequence's token positions from
    `start` on. sequence: the sequence's id. purpose: what they decide. seed: the job's."""
    return stream(seed, (int(purpose) << 32) | sequence, start, count)


def stream(seed: int, word: int, start: int, count: int) -> NDArray[np.float64]:
    """Returns `count` random numbers in [0, 1) of stream (seed, word), from number `start` on."""
    first = start // _WORDS
    bits = np.random.Philox(key=np.array([seed, word], dtype=np.uint64), counter=first)
    skip = start - first * _WORDS
    raw = bits.random_raw(skip + count)[skip:]
    return np.asarray((raw >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
