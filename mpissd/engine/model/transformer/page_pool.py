"""The pages of a KV cache that sequences share: who holds one, and which tokens it stores.

A page whose positions are all stored may be *named* by its tokens and those before it. A sequence
that begins with the same tokens takes it over instead of computing it again: the K and V of a
position depend on the tokens up to it alone, bit for bit. A named page that nobody holds keeps its
numbers until the pool needs it, the one that was given back first before others.

Names are compared as they are and never hashed alone, so that nobody can make two texts share a
name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import numpy as np

_FIRST = 0  # the name before a sequence's first page
_Key = tuple[int, bytes]  # the name of the page before, and the page's tokens


class PagePool:
    """The pages of one cache, of `page` positions each."""

    def __init__(self, pages: int, page: int) -> None:
        self._page = page
        self._blank = list(range(pages - 1, -1, -1))  # free, without a name
        self._kept: dict[int, None] = {}  # free with a name, in the order of their return
        self._holders = [0] * pages
        self._names: dict[_Key, tuple[int, int]] = {}  # (page, its name)
        self._keys: dict[int, _Key] = {}  # by page
        self._serial = count(_FIRST + 1)

    @property
    def free(self) -> list[int]:
        """The pages that nobody holds; the last one of those without a name is taken first."""
        return [*self._blank, *self._kept]

    def take(self) -> int:
        """Returns a page for new positions; it is the caller's alone."""
        page = self._blank.pop() if self._blank else self._oldest()
        self._holders[page] = 1
        return page

    def _oldest(self) -> int:
        page = next(iter(self._kept))
        del self._kept[page], self._names[self._keys.pop(page)]
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
                if page in self._keys:  # behind a page that another one has replaced
                    return
                self._names[key], self._keys[page] = (page, next(self._serial)), key
            name = self._names[key][1]

    def _parts(self, tokens: Sequence[int]) -> Iterator[bytes]:
        every = np.asarray(tokens, np.int32)
        for start in range(0, len(every) - self._page + 1, self._page):
            yield every[start : start + self._page].tobytes()
