"""The speculation cache against a model that never forgets what it may not answer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mpissd.engine.spec.cache import Key, SpeculationCache

Keys = st.tuples(*[st.integers(0, 2)] * 5)


@given(st.lists(st.one_of(st.none(), st.lists(Keys, unique=True, max_size=8))), st.lists(Keys))
def test_only_the_latest_generation_answers(
    generations: list[list[Key] | None], asked: list[Key]
) -> None:
    """A generation is its keys in lane order; None clears."""
    cache, latest = SpeculationCache(), list[Key]()
    for generation in generations:
        if generation is None:
            cache.clear()
        else:
            cache.fill(iter(generation))
        latest = generation or []
        assert len(cache) == len(latest)
        for key in {*asked, *(key for keys in generations for key in keys or [])}:
            assert cache.lookup(key) == (latest.index(key) if key in latest else None)


def test_every_part_of_a_key_counts() -> None:
    cache = SpeculationCache()
    cache.fill([(4, 7, 1, 2, 99)])
    assert cache.lookup((4, 7, 1, 2, 99)) == 0
    for place in range(5):
        key = [4, 7, 1, 2, 99]
        key[place] += 1
        assert cache.lookup(tuple(key)) is None  # type: ignore[arg-type]


def test_lane_0_is_an_answer() -> None:
    """Lane 0 is falsy: a lookup is a hit where it is not None."""
    cache = SpeculationCache()
    cache.fill([(0, 0, 0, 0, 0), (0, 0, 0, 0, 1)])
    assert [cache.lookup((0, 0, 0, 0, token)) for token in range(3)] == [0, 1, None]
