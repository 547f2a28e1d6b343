"""SSD loses nothing: the exact joint distribution of the first three tokens is the target's own.

The total variation must be below 1e-12 (it is about 2e-16). Each condition of losslessness
has a biased variant that the same enumeration must refuse.
"""

from dataclasses import replace

import pytest

from mpissd.common.rounds import Control, Source
from mpissd.engine.spec.tree import Tree
from tests.loop.enumeration import EXACT, Case, Decoding, enumerate_
from tests.loop.markov_rig import Pair

SD, SSD = Pair("sd"), Pair("ssd")
SMALL = Pair("ssd", vocab=3)
FORKED = Tree((0, 0, 1, 1))


def by_past(decoding: Decoding) -> Control:
    """K, and the most candidates of a row, by the numbers of tokens accepted so far."""
    past = sum(decoding.accepted)
    return Control(lookahead=(2, 1)[past % 2], width=(3, 1, 0, 2)[past % 4])


def none(decoding: Decoding) -> int:
    return 0


CACHE, JIT, FAST = Source.CACHE, Source.JIT, Source.FAST
# name: (case, what must have been served in it)
LOSSLESS: dict[str, tuple[Case, set[tuple[Source, int]]]] = {
    "jit": (Case(SD), {(JIT, 2)}),
    "jit, short": (Case(replace(SD, backup_lookahead=1)), {(JIT, 1)}),
    "hit or jit": (Case(SSD), {(CACHE, 2), (JIT, 2)}),
    "hit, finished late": (Case(SSD, steps=none), {(CACHE, 2), (JIT, 2)}),
    "hit": (Case(replace(SSD, fan_out=(4, 4, 4))), {(CACHE, 2), (JIT, 2)}),
    "fast": (Case(replace(SSD, fan_out=(1, 0, 0), backup="fast")), {(CACHE, 2), (FAST, 2)}),
    "fast alone": (Case(replace(SD, backup="fast")), {(FAST, 2)}),
    "all by past k": (
        Case(replace(SSD, fan_out=(1, 2, 3), saguaro_c=0.5), control=by_past),
        {(CACHE, 1), (CACHE, 2), (JIT, 2)},
    ),
    "deeper": (
        Case(Pair(vocab=3, lookahead=3, fan_out=(1, 1, 1, 2)), count=4),
        {(CACHE, 3), (JIT, 3)},
    ),
    "order 2, longer prompt": (
        Case(replace(SSD, order=2, prompt_tokens=3)),
        {(CACHE, 2), (JIT, 2)},
    ),
    "cold": (Case(replace(SSD, temperature=0.4)), {(CACHE, 2), (JIT, 2)}),
    "hot": (Case(replace(SSD, temperature=3.0, divergence=1.0)), {(CACHE, 2), (JIT, 2)}),
    "one model": (Case(replace(SSD, divergence=0.0)), {(CACHE, 2), (JIT, 2)}),
    **{
        f"C={c}": (Case(replace(SSD, saguaro_c=c, fan_out=(2, 1, 3))), {(CACHE, 2), (JIT, 2)})
        for c in (0.5, 0.0)
    },
    "C=0 over everything": (
        Case(replace(SMALL, saguaro_c=0.0, fan_out=(3, 3, 3))),
        {(CACHE, 2), (JIT, 2)},
    ),
    "distributions lost at random": (
        Case(SMALL, confirms=lambda decoding: bool(decoding.choices.among(2))),
        {(CACHE, 2), (JIT, 2)},
    ),
    "a tree": (Case(replace(SD, tree=FORKED)), {(JIT, 4)}),
    "a bush": (Case(replace(SD, vocab=3, tree=Tree((0, 0, 0, 1, 1, 2)))), {(JIT, 6)}),
    "a tree, every distribution lost": (
        Case(replace(SD, vocab=3, tree=FORKED), confirms=lambda decoding: False),
        {(JIT, 4)},
    ),
    "a tree, hit or jit": (Case(replace(SMALL, tree=FORKED)), {(CACHE, 4), (JIT, 4)}),
    "a tree, C=0.5": (
        Case(replace(SMALL, tree=FORKED, fan_out=(1, 0, 2, 1, 1), saguaro_c=0.5)),
        {(CACHE, 4), (JIT, 4)},
    ),
    "every distribution lost": (
        Case(SMALL, confirms=lambda decoding: False),
        {(CACHE, 2), (JIT, 2)},
    ),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_is_emitted_has_the_target_s_law(name: str) -> None:
    case, served = LOSSLESS[name]
    found = enumerate_(case)
    print(f"{name}: total variation {found.bias:.1e}")
    assert {rows[0] for rows in found.served} == served
    assert found.bias <= EXACT


@pytest.mark.parametrize(("watched", "backup"), [(0, "jit"), (1, "fast")])
def test_a_sequence_owes_nothing_to_the_one_beside_it(watched: int, backup: str) -> None:
    """Whatever the other one draws; hits of one share rounds with misses of the other."""
    pair = replace(SSD, batch=2, fan_out=(1, 1, 2), backup=backup, seed=2)
    found = enumerate_(Case(pair, watched=(watched,)))
    print(f"row {watched} beside another, {backup}: total variation {found.bias:.1e}")
    sources = {tuple(source for source, _ in rows) for rows in found.served}
    miss = Source[backup.upper()]
    assert sources == {(CACHE, CACHE), (CACHE, miss), (miss, CACHE), (miss, miss)}
    assert found.bias <= EXACT


def test_two_sequences_are_independent() -> None:
    pair = Pair(vocab=2, lookahead=1, batch=2, fan_out=(1, 1))
    found = enumerate_(Case(pair, watched=(0, 1), count=2))
    print(f"two sequences: total variation {found.bias:.1e}")
    sources = {tuple(source for source, _ in rows) for rows in found.served}
    assert sources == {(CACHE, CACHE), (CACHE, JIT), (JIT, CACHE), (JIT, JIT)}
    assert found.bias <= EXACT


@pytest.mark.parametrize(
    ("lookahead", "count"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.long)]
)
def test_nothing_is_lost_where_nothing_is_left_out(lookahead: int, count: int) -> None:
    """No state is merged, losing lanes are enumerated as well, and growth runs where it belongs."""
    pair = Pair(vocab=3, lookahead=lookahead, fan_out=(1,) * (lookahead + 1))
    found = enumerate_(Case(pair, count=count, merged=False, fresh=False))
    assert {rows[0] for rows in found.served} == {(CACHE, lookahead), (JIT, lookahead)}
    assert found.bias <= EXACT
    merged = enumerate_(Case(pair, count=count))
    assert merged.law.keys() == found.law.keys()
    assert max(abs(found.law[first] - chance) for first, chance in merged.law.items()) <= EXACT
