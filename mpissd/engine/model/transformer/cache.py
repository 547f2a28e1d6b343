"""The KV cache as the host knows it: sizes, pages, and the places of a forward's rows.

A page holds the K and V of PAGE consecutive positions of one sequence, in all layers. Attention is
split at absolute multiples of PAGE positions, so the numbers of a row do not depend on which pages
its sequence got. A lane (a branch that a draft grows) keeps its K and V in a scratch of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counted

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.base import HostArray
from mpissd.engine.model.forwards import SPAN, Places

_FIRST = 0  # the name before a sequence's first page
_Key = tuple[int, bytes]  # the name of the page before, and the page's tokens
PADDING = -1  # the slot of a padding row, which stores and attends nothing


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of one rank's KV cache.

    slots: sequences at once. capacity: tokens that a sequence may have. page: positions of a page.
    lanes, steps: lanes of the scratch, and tokens that each may grow. pool: tokens of all sequences
    together (0: each may have `capacity`).
    """

    layers: int
    kv_heads: int
    head_dim: int
    slots: int
    capacity: int
    page: int
    lanes: int = 0
    steps: int = 0
    pool: int = 0

    @property
    def pages_per_slot(self) -> int:
        """The largest number of pages that a sequence may have."""
        return -(-max(1, self.capacity) // self.page)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: enough for all slots at their capacity, or `pool` tokens' if fewer."""
        most = self.slots * self.pages_per_slot
        return min(most, max(self.pages_per_slot, self.pool // self.page)) if self.pool else most

    @property
    def num_positions(self) -> int:
        """Positions that a row can have, lanes included."""
        return self.pages_per_slot * self.page + self.steps


class RowPlaces:
    """Host arrays of the places of a forward's rows; views of one int32 buffer.

    rows: [4, max_rows], each row's slot (PADDING: none), position, lane (the branch that it belongs
    to) and trunk (tokens before the lane), as in forwards.Places. pages: [slots, pages_per_slot],
    the pages of each slot in rising order of positions.
    """

    def __init__(self, ints: HostArray, max_rows: int, sizes: CacheSizes) -> None:
        """Lays the arrays out in `ints`, which has `size(max_rows, sizes)` elements."""
        self.ints = ints
        self.rows = ints[: 4 * max_rows].reshape(4, max_rows)
        self.pages = ints[4 * max_rows :].reshape(sizes.slots, sizes.pages_per_slot)
        self.rows[...] = PADDING
        self.pages[...] = 0

    @staticmethod
    def size(max_rows: int, sizes: CacheSizes) -> int:
        """Returns the number of elements of the buffer."""
        return 4 * max_rows + sizes.slots * sizes.pages_per_slot


class PagePool:
    """The pages of one cache, of `page` positions each, which sequences share.

    A page whose positions are all stored may be *named* by its tokens and those before it. A
    sequence that begins with the same tokens takes it over instead of computing it again: the K and
    V of a position depend on the tokens up to it only, bit for bit. A named page without a holder
    keeps its numbers until the pool needs it; the page that was given back first goes first. Names
    are compared as they are and never only hashed, so that no two texts can be made to share one.
    """

    def __init__(self, pages: int, page: int) -> None:
        self._page = page
        self._blank = list(range(pages - 1, -1, -1))  # free, without a name
        self._kept: dict[int, None] = {}  # free with a name, in the order of their return
        self._holders = [0] * pages
        self._names: dict[_Key, tuple[int, int]] = {}  # (page, its name)
        self._keys: dict[int, _Key] = {}  # by page
        self._serial = counted(_FIRST + 1)

    @property
    def free(self) -> list[int]:
        """The pages without a holder; the last page without a name is taken first."""
        return [*self._blank, *self._kept]

    def take(self) -> int:
        """Returns a page for new positions; only the caller holds it."""
        if self._blank:
            page = self._blank.pop()
        else:
            page = next(iter(self._kept))
            del self._kept[page], self._names[self._keys.pop(page)]
        self._holders[page] = 1
        return page

    def give_back(self, pages: Iterable[int]) -> None:
        """Takes a sequence's pages back, the first positions' first: they are kept longest."""
        for page in reversed([*pages]):
            self._holders[page] -= 1
            if not self._holders[page]:
                if page in self._keys:
                    self._kept[page] = None
                else:
                    self._blank.append(page)

    def found(self, tokens: Sequence[int]) -> list[int]:
        """Returns the pages that store the first of these tokens, as many as are known; they are
        the caller's as well."""
        pages, name = [], _FIRST
        for part in self._parts(tokens):
            page, name = self._names.get((name, part), (-1, -1))
            if page < 0:
                break
            pages.append(page)
        for page in pages:
            self._holders[page] += 1
            self._kept.pop(page, None)
        return pages

    def name(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Names the pages that store these tokens, the last part of a page left out."""
        name = _FIRST
        for page, part in zip(pages, self._parts(tokens), strict=False):
            key = name, part
            if key not in self._names:
                if page in self._keys:  # follows a page that another one has replaced
                    return
                self._names[key], self._keys[page] = (page, next(self._serial)), key
            name = self._names[key][1]

    def _parts(self, tokens: Sequence[int]) -> Iterator[bytes]:
        every = np.asarray(tokens, np.int32)
        for start in range(0, len(every) - self._page + 1, self._page):
            yield every[start : start + self._page].tobytes()


class PageTable:
    """Takes pages from the pool as sequences grow, and gives them back when they end."""

    def __init__(self, seats: RowPlaces, sizes: CacheSizes) -> None:
        self.seats, self.sizes = seats, sizes
        self._pool = PagePool(sizes.num_pages, sizes.page)
        self.held = [0] * sizes.slots

    @property
    def free(self) -> list[int]:
        """The pages that no sequence holds."""
        return self._pool.free

    def place(self, places: Places | None) -> int:
        """Writes the places of a forward's rows into the seats; returns how many rows (None: 0).

        Reserves the pages that trunk rows write. All other rows become padding.
        """
        rows, sizes, held = self.seats.rows, self.sizes, self.held
        if places is None:
            rows[0] = PADDING
            return 0
        count = len(places.slots)
        rows[0, count:] = PADDING
        parts = places.slots, places.positions, places.lanes, places.trunks
        for to, part in zip(rows, parts, strict=True):
            to[:count] = part
        for slot, position, lane, trunk in zip(*(part.tolist() for part in parts), strict=True):
            if lane < 0:
                if position >= held[slot] * sizes.page:
                    self._grow(slot, position)
                continue
            step, stored = position - trunk, held[slot] * sizes.page
            fits = lane % SPAN < sizes.lanes and 0 <= step < sizes.steps and trunk <= stored
            assert fits, f"lane {lane}, step {step}, trunk {trunk}: no such place in {sizes}"
        return count

    def hold(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Reserves the pages of these slots up to these positions, those included."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if position >= self.held[slot] * self.sizes.page:
                self._grow(slot, position)

    def _grow(self, slot: int, position: int) -> None:
        sizes = self.sizes
        assert position < sizes.capacity, f"position {position} of a cache of {sizes.capacity}"
        wanted = position // sizes.page + 1
        for index in range(self.held[slot], wanted):
            self.seats.pages[slot, index] = self._pool.take()
        self.held[slot] = wanted

    def release(self, slots: Sequence[int]) -> None:
        """Gives the pages of these slots back to the pool."""
        for slot in slots:
            self._pool.give_back(self._pages(slot))
            self.held[slot] = 0

    def adopt(self, slot: int, tokens: Sequence[int]) -> int:
        """Gives an empty slot the pages that store the first of these tokens; returns how many
        tokens."""
        pages = self._pool.found(tokens)
        self.seats.pages[slot, : len(pages)] = pages
        self.held[slot] = len(pages)
        return len(pages) * self.sizes.page

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Lets later sequences adopt the pages of a slot, which stores these tokens."""
        self._pool.name(self._pages(slot), tokens)

    def _pages(self, slot: int) -> list[int]:
        pages: list[int] = self.seats.pages[slot, : self.held[slot]].tolist()
        return pages


def trunk_rows(slot: int, start: int, stop: int, *, reads: bool = True) -> Places:
    """Returns the places of positions start … stop − 1 of one sequence, as trunk rows."""
    count = stop - start
    positions = np.arange(start, stop, dtype=np.int32)
    none = np.full(count, -1, np.int32)
    return Places(np.full(count, slot, np.int32), positions, none, none, reads)
