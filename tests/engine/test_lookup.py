"""Lookups against their definitions, by exhaustive search in short sequences."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.engine.law.lookup import PromptLookup, SuffixLookup, latest_match


def looked_up(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """The definition: the tokens after the latest earlier end of the largest suffix n ≤ longest."""
    for n in range(min(longest, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if list(tokens[end - n : end]) == list(tokens[-n:]):
                return list(tokens[end : end + count])
    return []


TOKENS = st.lists(st.integers(0, 2), max_size=24)


@given(TOKENS, st.integers(1, 4), st.integers(1, 6))
def test_prompt_lookup_is_its_definition(tokens: list[int], longest: int, count: int) -> None:
    lookup = PromptLookup(longest)
    lookup.follow(tokens)
    assert lookup.drafted(count) == looked_up(tokens, longest, count)
    start = latest_match(np.array(tokens, np.int32), longest)
    assert lookup.drafted(1) == ([] if start is None else [tokens[start]])
    assert start is None or lookup.drafted(count) == tokens[start : start + count]


@given(TOKENS, st.integers(1, 6))
def test_the_automaton_finds_the_longest_latest_suffix(tokens: list[int], count: int) -> None:
    lookup = SuffixLookup()
    lookup.follow(tokens)
    assert lookup.drafted(count) == looked_up(tokens, len(tokens), count)


class Counted(list[int]):
    """A list that counts how often it is written to."""

    writes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.writes += 1
        super().__setitem__(key, value)


@pytest.mark.parametrize("period", [1, 2])
def test_a_token_takes_bounded_time_in_a_text_that_repeats_itself(period: int) -> None:
    lookup, tokens = SuffixLookup(), [n % period for n in range(3000)]
    lookup._end = counted = Counted(lookup._end)
    lookup.follow(tokens)
    assert counted.writes < 260 * len(tokens), "time grows with the context"
    assert lookup.drafted(1) == [tokens[-period]]


def test_a_short_occurrence_is_padded() -> None:
    lookup = PromptLookup()
    lookup.follow([7, 8, 9, 8])
    assert lookup.drafted(3) == [9, 8]
    assert lookup.padded(4) == [9, 8, 8, 8] and lookup.padded(3, filler=1) == [9, 8, 1]
    empty = SuffixLookup()
    empty.follow([1, 2])
    assert empty.drafted(3) == [] and empty.padded(2) == [2, 2]
