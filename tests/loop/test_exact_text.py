"""Sampled text loses nothing: the exact joint distribution of its first tokens is the target's own.

Two transformers of two tiny layers decide, through the loops, the links and the caches of text.
"""

from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.rounds import Source
from mpissd.engine.law.tree import Tree
from tests.loop.enumeration import EXACT, Case, Found, enumerate_
from tests.loop.text_rig import TextPair, text_workers
from tests.tiny_pair import tiny_pair

V = 4
CACHE, JIT, FAST = Source.CACHE, Source.JIT, Source.FAST
FORKED, SMALL = Tree((0, 0, 1, 1)), Tree((0, 0, 1))
PENALTIES = ((2, -1.0), (3, 0.7)), 0.9, 0.6  # bias, presence, frequency


SHAPE: dict[str, Any] = {"vocab": V, "heads": 2, "kv_heads": 1, "hidden": 32, "noise": 0.5}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TextPair:
    made = tiny_pair(tmp_path_factory.mktemp("pair"), **SHAPE)
    told = {"target_where": str(made.target), "draft_where": str(made.draft)}
    return TextPair("ssd", vocab=V, lookahead=2, fan_out=(1, 1, 1), **told)


@pytest.fixture(scope="module")
def narrow(base: TextPair, tmp_path_factory: pytest.TempPathFactory) -> TextPair:
    """The draft knows all tokens but 1."""
    made = tiny_pair(tmp_path_factory.mktemp("narrow"), **SHAPE, head_ids=[0, 2, 3])
    return replace(base, draft_where=str(made.draft))


def enumerated(pair: TextPair, count: int = 3) -> Found:
    found = enumerate_(Case(pair, count=count, workers=text_workers))
    print(f"{pair.mode}: {len(found.law)} texts, total variation {found.bias:.1e}")
    return found


@pytest.mark.parametrize(
    ("changed", "sources"),
    [
        ({}, {CACHE, JIT}),
        ({"temperature": 0.5, "saguaro_c": 0.3}, {CACHE, JIT}),
        ({"top_p": 0.7}, {CACHE, JIT}),
        ({"backup": "fast"}, {CACHE, FAST}),
        ({"mode": "sd", "tree": FORKED, "top_p": 0.8}, {JIT}),
        ({"tree": Tree((0, 0)), "lookahead": 1}, {CACHE, JIT}),
        ({"penalties": PENALTIES}, {CACHE, JIT}),
        ({"penalties": PENALTIES, "mode": "sd", "tree": SMALL}, {JIT}),
    ],
)
def test_the_law_of_text(base: TextPair, changed: dict[str, object], sources: set[Source]) -> None:
    found = enumerated(replace(base, **changed))  # type: ignore[arg-type]
    assert {source for rows in found.served for source, _ in rows} == sources
    assert abs(sum(found.law.values()) - 1) < 1e-9 and found.bias <= EXACT


def test_a_draft_of_fewer_tokens_loses_nothing(narrow: TextPair) -> None:
    """q = 0 for tokens that the draft lacks, which only the target emits."""
    for pair in (narrow, replace(narrow, mode="sd", tree=FORKED)):
        found = enumerated(pair)
        assert any(1 in text for text in found.law) and found.bias <= EXACT


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"top_p": 0.7},
        {"backup": "fast", "penalties": (((0, 1.5),), 0.5, 0.2)},
        {"mode": "sd", "tree": FORKED},
        {"forces": True},
        {"forces": True, "mode": "sd"},
        {"forces": True, "tree": SMALL},
    ],
)
def test_the_law_of_grammars(base: TextPair, narrow: TextPair, changed: dict[str, object]) -> None:
    """The texts of four tokens 0 … 3 are 64 without the grammar."""
    for pair in (base, narrow)[: 2 - len(changed)]:
        found = enumerated(replace(pair, has_grammar=True, **changed))  # type: ignore[arg-type]
        assert 4 < len(found.law) < 50 and found.bias <= EXACT
