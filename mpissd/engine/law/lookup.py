"""Drafts without a model: copies the tokens that followed an earlier occurrence of the last tokens.

PromptLookup    finds the latest occurrence of the last n ≤ `longest` tokens [Saxena 2023, prompt
                lookup decoding; the n-gram drafts of vLLM]
SuffixLookup    finds the longest suffix that occurred before, of any length, by a suffix automaton
                [Blumer et al. 1985; as a draft: Hu et al. 2024, SAM decoding]

Each class reads a token in constant time (the automaton amortised) and drafts `count` tokens in
O(count), so that the cost of a round does not grow with the context.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.common.workloads import LOOKUPS, imported

LONGEST = 3  # the default number of last tokens that prompt lookup compares
_DEEPEST = 256  # the most suffixes whose latest occurrence is updated for one new token


class Lookup(ABC):
    """An index of one sequence's tokens, which finds the tokens that followed an earlier occurrence
    of the last tokens. longest: the most last tokens to compare (in PromptLookup)."""

    def __init__(self, longest: int = LONGEST) -> None:
        self.longest = longest
        self.tokens: list[int] = []

    def follow(self, tokens: Sequence[int]) -> None:
        """Reads the tokens that the sequence `tokens` has gained since the last call."""
        for token in tokens[len(self.tokens) :]:
            self.add(token)

    def add(self, token: int) -> None:
        """Reads one token, the next of the sequence."""
        self.tokens.append(token)
        self._add(token)

    def drafted(self, count: int) -> list[int]:
        """Returns up to `count` tokens that followed an earlier occurrence of the last tokens."""
        start = self._start()
        return [] if start is None else self.tokens[start : start + count]

    def padded(self, count: int, filler: int | None = None) -> list[int]:
        """Returns exactly `count` tokens: drafted ones, then `filler` (None: the last token)."""
        tokens = self.drafted(count)
        rest = self.tokens[-1] if filler is None else filler
        return tokens + [rest] * (count - len(tokens))

    @abstractmethod
    def _add(self, token: int) -> None:
        """Adds the sequence's newest token, `token`, to the index."""

    @abstractmethod
    def _start(self) -> int | None:
        """Returns the index after an earlier occurrence of the last tokens; None without one."""


class PromptLookup(Lookup):
    """Finds the latest earlier occurrence of the last n tokens, for the largest n that has one."""

    def __init__(self, longest: int = LONGEST) -> None:
        super().__init__(longest)
        # _latest[n − 1] maps each n tokens in a row to the index after their last occurrence.
        self._latest: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]
        # _before[n − 1] is the index after the previous occurrence of the last n tokens.
        self._before: list[int | None] = [None] * longest

    def _add(self, token: int) -> None:
        end = len(self.tokens)
        for n, latest in enumerate(self._latest, 1):
            if n <= end:
                gram = tuple(self.tokens[-n:])
                self._before[n - 1] = latest.get(gram)
                latest[gram] = end

    def _start(self) -> int | None:
        return next((start for start in reversed(self._before) if start is not None), None)


class SuffixLookup(Lookup):
    """Finds the latest earlier occurrence of the longest suffix that occurred before.

    A state of the suffix automaton represents the substrings that end at the same places. The link
    of the newest state leads to the longest suffix that also ends elsewhere. If more than _DEEPEST
    suffixes occurred before, as in repetitive text, an older place of a short one may be found.
    """

    def __init__(self, longest: int = LONGEST) -> None:
        super().__init__(longest)
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [0]  # by state, the index after the latest recorded occurrence
        self._last = self._found = 0

    def _add(self, token: int) -> None:
        new = self._state(self._length[self._last] + 1, {})
        state = self._last
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state >= 0:
            self._link[new] = self._split(state, token)
        self._last = new
        above = self._link[new]
        self._found = self._end[above] if above else 0
        for _ in range(_DEEPEST):  # states whose suffixes just occurred again
            if above <= 0:
                break
            self._end[above] = len(self.tokens)
            above = self._link[above]

    def _state(self, length: int, following: dict[int, int]) -> int:
        self._next.append(following)
        self._link.append(0)
        self._length.append(length)
        self._end.append(len(self.tokens))
        return len(self._link) - 1

    def _split(self, state: int, token: int) -> int:
        """Returns the state whose longest substring is the longest suffix that ends in `token` and
        occurred before; splits that state from a longer one where necessary."""
        old = self._next[state][token]
        length = self._length[state] + 1
        if self._length[old] == length:
            return old
        clone = self._state(length, dict(self._next[old]))
        self._link[clone] = self._link[old]
        self._end[clone] = self._end[old]
        self._link[old] = clone
        while state >= 0 and self._next[state].get(token) == old:
            self._next[state][token] = clone
            state = self._link[state]
        return clone

    def _start(self) -> int | None:
        return self._found or None


def latest_match(tokens: Ints, longest: int) -> int | None:
    """Returns the index after the latest earlier occurrence of the last n tokens, for the largest
    n ≤ longest that has one; None without one. Like a PromptLookup that has read `tokens`, int32
    [n], but in one search without an index, as copy.cu does on a GPU."""
    ends = np.arange(1, len(tokens))
    matched = np.zeros(len(ends), np.int64)  # by end, how many last tokens it repeats
    for back in range(min(longest, len(ends))):
        is_longer = (matched == back) & (ends > back)
        matched += is_longer & (tokens[ends - 1 - back] == tokens[-1 - back])
    if not matched.any():
        return None
    return int(ends[matched == matched.max()][-1])


def make_lookup(kind: str, longest: int = LONGEST) -> Lookup:
    """Returns an empty Lookup. kind: a value of --lookup, "prompt" or "suffix". longest: the most
    last tokens to compare (in prompt lookup)."""
    lookup: Lookup = imported(LOOKUPS[kind])(longest)
    return lookup
