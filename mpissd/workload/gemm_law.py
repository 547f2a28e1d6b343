"""The synthetic laws of the `gemm` workload: which tokens exist, are accepted, are predicted.

Every draw is keyed by (seed, purpose, sequence, absolute position), so AR, SD and SSD with any K,
hit law or timing emit the same tokens for one seed. Draws are tabulated a window of positions at a
time: the hot path only gathers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mpissd.rng import Purpose, uniforms
from mpissd.rounds import Batch, Ints
from mpissd.workload.base import Admissions

WINDOW = 8192  # positions a slot's table holds; a refill costs about a millisecond
_MARGIN = 4


class TokenStream:
    """Y(s,p), the wrong token, U(accept) and U(rank), by slot and position."""

    def __init__(self, seed: int, vocab: int, capacity: int, reach: int) -> None:
        """reach: positions past the newest committed token that a round may ask for."""
        self._seed, self.vocab, self._reach = seed, vocab, reach
        self.window = max(WINDOW, 4 * reach)
        self._base = np.zeros(capacity, np.int64)  # absolute position of column 0
        self._request = np.full(capacity, -1, np.int64)
        self._flat_base = np.zeros(capacity, np.int64)  # slot · window - base
        self._limit = np.zeros(capacity, np.int64)  # lengths from here on need a refill
        shape = (capacity, self.window)
        self._true = np.zeros(shape, np.int32)
        self._wrong = np.zeros(shape, np.int32)
        self._accept = np.zeros(shape, np.float64)
        self._rank = np.zeros(shape, np.float64)

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Makes every position that this round may ask for available."""
        for slot, request in admissions:
            self._request[slot] = request.request_id
            self._fill(slot, 0)
        late = batch.lengths >= self._limit[batch.slots]
        if late.any():
            for row in np.flatnonzero(late):
                start = max(0, int(batch.lengths[row]) - _MARGIN)
                self._fill(int(batch.slots[row]), start)

    def _fill(self, slot: int, start: int) -> None:
        sequence, count = int(self._request[slot]), self.window

        def draw(purpose: Purpose) -> NDArray[np.float64]:
            return uniforms(self._seed, purpose, sequence, start, count)

        true = (draw(Purpose.TOKEN) * self.vocab).astype(np.int32)
        other = (draw(Purpose.WRONG) * (self.vocab - 1)).astype(np.int32)
        self._true[slot] = true
        self._wrong[slot] = other + (other >= true)
        self._accept[slot] = draw(Purpose.ACCEPT)
        self._rank[slot] = draw(Purpose.RANK)
        self._base[slot] = start
        self._flat_base[slot] = slot * self.window - start
        self._limit[slot] = start + self.window - self._reach

    def index(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Flat indices of absolute positions [b, …] of slots [b]."""
        base = self._flat_base[slots]
        return positions + base.reshape(base.shape + (1,) * (positions.ndim - 1))

    def true(self, index: NDArray[np.int64]) -> Ints:
        """Y: the token that the target emits at each index."""
        return self._true.ravel().take(index)

    def drafts(self, index: NDArray[np.int64], rates: NDArray[np.float64]) -> Ints:
        """x = Y where U(accept) < a[i], else another token; rates broadcast along the last axis."""
        accepted = self._accept.ravel().take(index) < rates
        return np.where(accepted, self._true.ravel().take(index), self._wrong.ravel().take(index))

    def rank(self, index: NDArray[np.int64]) -> NDArray[np.float64]:
        """U(rank) in [0, 1)."""
        return self._rank.ravel().take(index)
