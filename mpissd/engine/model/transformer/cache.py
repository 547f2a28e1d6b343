"""The host's view of the KV cache: its sizes, its page table, and where a forward's rows lie.

A page holds the K and V of `page` consecutive positions of one sequence, in all layers. Attention
is split at absolute multiples of `page`, so that a row's numbers do not depend on which pages its
sequence has. Besides the pages, the cache has *lanes*: scratch memory for the K and V of one
speculative branch each.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count as counted

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.backend.base import HostArray
from mpissd.engine.model.forwards import SPAN, Places

_START = 0  # serial number that stands for the start of a text, before its first page
_Key = tuple[int, bytes]  # identifies a full page: (serial number of the page before, tokens)
PADDING = -1  # slot number of a padding row, which writes and attends nothing


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of one rank's KV cache. slots: the most sequences at once. capacity: the most tokens of
    a sequence. page: positions of a page. lanes, steps: the number of lanes (scratch memory of
    branches), and the tokens that each has room for. pool: the most tokens of all sequences
    together (0: each may have `capacity`)."""

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
        """The number of pages of a sequence that has `capacity` tokens."""
        return -(-max(1, self.capacity) // self.page)

    @property
    def num_pages(self) -> int:
        """The number of pages: enough for `capacity` tokens in every slot, or for `pool` tokens in
        all slots together if that is less."""
        total = self.slots * self.pages_per_slot
        return min(total, max(self.pages_per_slot, self.pool // self.page)) if self.pool else total

    @property
    def num_positions(self) -> int:
        """The number of positions that a sequence's tokens, drafted ones included, may have."""
        return self.pages_per_slot * self.page + self.steps


class RowPlaces:
    """Where a forward's rows lie in the KV cache, and the page table, in one int32 buffer that the
    device reads. rows: [4, max_rows], for each row its slot (its sequence's part of the cache;
    PADDING: none), its position, its lane (scratch memory of a branch; −1: none), and its trunk
    (the number of tokens before the branch). pages: [slots, pages_per_slot], each slot's pages by
    rising position."""

    def __init__(
        self, host_ints: Callable[[int], HostArray], max_rows: int, sizes: CacheSizes
    ) -> None:
        """Allocates the buffer, with padding in all rows. host_ints(n): allocates n zeros in memory
        that the device can read (Backend.host_ints)."""
        self.ints = host_ints(4 * max_rows + sizes.slots * sizes.pages_per_slot)
        self.rows = self.ints[: 4 * max_rows].reshape(4, max_rows)
        self.pages = self.ints[4 * max_rows :].reshape(sizes.slots, sizes.pages_per_slot)
        self.rows[...] = PADDING


class PageTable:
    """The page table of one KV cache: sequences take pages as they grow and return all at the end.

    A full page may be *named* by its tokens and all tokens before them. A sequence that begins with
    the same tokens reads that page instead of computing it again: the K and V of a position depend
    on the tokens up to it only, bit for bit. A named page that no sequence holds stays valid until
    its memory is needed; the page that was returned first is overwritten first. Names are compared
    token by token and never only hashed, so that no two texts can be made to share a page. held:
    the number of pages of each slot.
    """

    def __init__(self, row_places: RowPlaces, sizes: CacheSizes) -> None:
        self.row_places = row_places
        self.sizes = sizes
        self.held = [0] * sizes.slots
        # Free pages whose contents nobody can share. Pages are taken from the end.
        self._blank = list(range(sizes.num_pages - 1, -1, -1))
        self._kept: dict[int, None] = {}  # reusable pages that no sequence holds, oldest first
        self._holders = [0] * sizes.num_pages
        self._names: dict[_Key, tuple[int, int]] = {}  # (page, its name)
        self._keys: dict[int, _Key] = {}  # by page
        self._serial = counted(_START + 1)

    def place(self, places: Places | None) -> int:
        """Prepares the KV cache for a forward: writes where its rows (tokens) lie to `row_places`,
        whose other rows become padding, and reserves pages for rows that are stored in their
        sequence's slot, not in a lane (scratch memory). Returns the number of rows (None: 0)."""
        rows = self.row_places.rows
        sizes = self.sizes
        if places is None:
            rows[0] = PADDING
            return 0
        count = len(places.slots)
        rows[0, count:] = PADDING
        for row, part in zip(rows, places.columns, strict=True):
            row[:count] = part
        lists = (part.tolist() for part in places.columns)
        for slot, position, lane, trunk in zip(*lists, strict=True):
            stored = self.held[slot] * sizes.page
            if lane < 0:
                if position >= stored:
                    self._grow(slot, position)
                continue
            step = position - trunk
            fits = lane % SPAN < sizes.lanes and 0 <= step < sizes.steps and trunk <= stored
            assert fits, f"lane {lane}, step {step}, trunk {trunk}: no such place in {sizes}"
        return count

    def hold(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """Reserves the pages that slots[i] lacks for its positions up to (and including)
        positions[i], for each i. slots, positions: [n]."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            if position >= self.held[slot] * self.sizes.page:
                self._grow(slot, position)

    def _grow(self, slot: int, position: int) -> None:
        sizes = self.sizes
        assert position < sizes.capacity, f"position {position} of a cache of {sizes.capacity}"
        count = position // sizes.page + 1
        for index in range(self.held[slot], count):
            if self._blank:
                page = self._blank.pop()
            else:
                page = next(iter(self._kept))
                del self._kept[page], self._names[self._keys.pop(page)]
            self._holders[page] = 1
            self.row_places.pages[slot, index] = page
        self.held[slot] = count

    def release(self, slots: Sequence[int]) -> None:
        """Frees the pages of these slots, whose sequences have ended. Pages that are named by their
        tokens stay reusable until their memory is needed. A sequence's last page is given up first,
        because its first pages are the likeliest to be shared."""
        for slot in slots:
            for page in reversed(self._pages(slot)):
                self._holders[page] -= 1
                if not self._holders[page]:
                    if page in self._keys:
                        self._kept[page] = None
                    else:
                        self._blank.append(page)
            self.held[slot] = 0

    def adopt(self, slot: int, tokens: Sequence[int]) -> int:
        """Shares stored pages with an empty slot (prefix caching): the longest run of full pages,
        named by their tokens (see keep), that hold the first of `tokens`. Returns the number of
        tokens that these pages hold."""
        pages = []
        name = _START
        for part in self._parts(tokens):
            page, name = self._names.get((name, part), (-1, -1))
            if page < 0:
                break
            pages.append(page)
            self._holders[page] += 1
            self._kept.pop(page, None)
        self.row_places.pages[slot, : len(pages)] = pages
        self.held[slot] = len(pages)
        return len(pages) * self.sizes.page

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """Names a slot's full pages by the tokens in them, so that `adopt` finds them for other
        sequences. tokens: the sequence's tokens from its first one on."""
        name = _START
        for page, part in zip(self._pages(slot), self._parts(tokens), strict=False):
            key = name, part
            if key not in self._names:
                if page in self._keys:  # It has a name that builds on an overwritten page.
                    return
                self._names[key] = (page, next(self._serial))
                self._keys[page] = key
            name = self._names[key][1]

    def _parts(self, tokens: Sequence[int]) -> Iterator[bytes]:
        ints = np.asarray(tokens, np.int32)
        page = self.sizes.page
        for start in range(0, len(ints) - page + 1, page):
            yield ints[start : start + page].tobytes()

    def _pages(self, slot: int) -> list[int]:
        pages: list[int] = self.row_places.pages[slot, : self.held[slot]].tolist()
        return pages


def trunk_rows(slot: int, start: int, stop: int, *, reads: bool = True) -> Places:
    """Returns where a forward's rows (tokens) for positions start … stop − 1 of one sequence lie:
    in its slot of the KV cache, not in a lane (scratch memory of a branch). reads: whether an
    output of any of these rows is read."""
    count = stop - start
    positions = np.arange(start, stop, dtype=np.int32)
    none = np.full(count, -1, np.int32)
    return Places(np.full(count, slot, np.int32), positions, none, none, reads)
