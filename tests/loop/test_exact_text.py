"""Sampled text loses nothing: the exact joint distribution of its first tokens is the target's own.

Two transformers of two tiny layers decide, through the loops, the links and the caches of text.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.rng import Purpose
from mpissd.common.rounds import Source
from mpissd.engine import RunConfig
from mpissd.engine.law.tree import Shape
from mpissd.engine.oracle.sampled import Proposal
from tests.loop.enumeration import EXACT, Case, Found, enumerate_
from tests.loop.markov_rig import deviation, joint_law
from tests.loop.text_rig import TextPair, WatchedText, text_workers
from tests.text_config import finished
from tests.tiny_pair import tiny_pair

V = 4
CACHE, JIT, FAST = Source.CACHE, Source.JIT, Source.FAST
FORKED, SMALL = Shape((0, 0, 1, 1)), Shape((0, 0, 1))
PENALTIES = ((2, -1.0), (3, 0.7)), 0.9, 0.6  # bias, presence, frequency
RULES = ("repetition_penalty", 3.0), ("min_tokens", 2), ("stop_ids", (1, 3))
CUTS = ("top_k", 3), ("min_p", 0.15)
FEWER = ((2, -1.0),), 0.9, 0.6


def text_pair(home: Path, vocab: int = V, **told: Any) -> TextPair:
    made = tiny_pair(home, vocab=vocab, heads=2, kv_heads=1, hidden=32, noise=0.5, **told)
    where = {"target_where": str(made.target), "draft_where": str(made.draft)}
    return TextPair("ssd", vocab=vocab, lookahead=2, fan_out=(1, 1, 1), **where)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> TextPair:
    return text_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> TextPair:
    """Three tokens, of which longer texts are enumerated."""
    return replace(text_pair(tmp_path_factory.mktemp("three"), vocab=3), fan_out=None)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> TextPair:
    """The draft knows all tokens but 1."""
    return text_pair(tmp_path_factory.mktemp("narrow"), head_ids=[0, 2, 3])


def enumerated(pair: TextPair, count: int = 3, **told: Any) -> Found:
    found = enumerate_(Case(pair, count=count, workers=text_workers, **told))
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
        ({"tree": Shape((0, 0)), "lookahead": 1}, {CACHE, JIT}),
        ({"penalties": PENALTIES}, {CACHE, JIT}),
        ({"penalties": PENALTIES, "mode": "sd", "tree": SMALL}, {JIT}),
        ({"rules": RULES}, {CACHE, JIT}),
        ({"rules": CUTS}, {CACHE, JIT}),
        ({"rules": (*RULES, *CUTS), "top_p": 0.9, "mode": "sd", "tree": SMALL}, {JIT}),
        ({"rules": (*RULES, *CUTS), "is_parallel": True, "backup": "fast"}, {CACHE, FAST}),
        ({"is_parallel": True}, {CACHE, JIT}),
        ({"is_parallel": True, "temperature": 0.5, "saguaro_c": 0.3}, {CACHE, JIT}),
        ({"is_parallel": True, "tree": SMALL, "fan_out": (1,) * 4}, {CACHE, JIT}),
        ({"is_parallel": True, "lookahead": 3, "vocab": 3, "top_p": 0.8}, {CACHE, JIT}),
        ({"is_parallel": True, "lookahead": 3, "vocab": 3, "mode": "sd"}, {JIT}),
        (
            {"is_parallel": True, "vocab": 3, "mode": "sd", "tree": FORKED, "penalties": FEWER},
            {JIT},
        ),
    ],
)
def test_the_law_of_text(
    base: TextPair, three: TextPair, changed: dict[str, Any], sources: set[Source]
) -> None:
    found = enumerated(replace(three if "vocab" in changed else base, **changed))
    assert {source for rows in found.served for source, _ in rows} == sources
    assert abs(sum(found.law.values()) - 1) < 1e-9 and found.bias <= EXACT


def test_a_draft_of_fewer_tokens_loses_nothing(narrow: TextPair) -> None:
    """q = 0 for tokens that the draft lacks, which only the target emits."""
    at_once = replace(narrow, is_parallel=True)
    trees = [replace(narrow, mode="sd", tree=FORKED), replace(at_once, mode="sd", tree=SMALL)]
    for pair in (narrow, at_once, *trees):
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
        {"forces": True, "tree": SMALL, "fan_out": (1,) * 4},
        {"forces": True, "is_parallel": True},
        {"forces": True, "is_parallel": True, "tree": SMALL, "fan_out": (1,) * 4},
    ],
)
def test_the_law_of_grammars(base: TextPair, narrow: TextPair, changed: dict[str, object]) -> None:
    """The texts of four tokens 0 … 3 are 64 without the grammar."""
    for pair in (base,) if changed else (base, narrow):
        found = enumerated(replace(pair, has_grammar=True, **changed))  # type: ignore[arg-type]
        assert 4 < len(found.law) < 50 and found.bias <= EXACT


def test_a_target_that_masks_every_row_as_the_first_is_found(base: TextPair) -> None:
    assert enumerated(replace(base, has_grammar=True, forgets_path=True)).bias > 0.01


def test_a_target_that_forgets_top_p_is_found(base: TextPair) -> None:
    assert enumerated(replace(base, top_p=0.7, wrong_top_p=1.0)).bias > 0.01


@pytest.mark.parametrize(
    ("told", "tree"),
    [
        ({"penalties": PENALTIES}, Shape((0, 1))),
        ({"penalties": PENALTIES}, SMALL),
        ({"rules": RULES[:1]}, Shape((0, 1))),
        ({"rules": RULES[1:]}, Shape((0, 1))),
    ],
)
def test_penalties_that_forget_the_draft_s_tokens_are_found(
    base: TextPair, told: dict[str, Any], tree: Shape
) -> None:
    forgets: dict[str, Any] = {"forgets_drafts": True, "mode": "sd", "tree": tree}
    assert enumerated(replace(base, **told, **forgets)).bias > 0.01


class OtherDepth(WatchedText):
    """Reports the distribution of the first token for the second one."""

    def collect(self, grown: Any, first_row: int) -> None:
        super().collect(grown, first_row)
        for branches in grown:
            for n, (row, *_) in enumerate(branches.drawn_from):
                branches.drawn_from[n][1] = row
                branches.q[n, 1] = row[branches.tokens[n, 1]] / row.sum(dtype=float)


class FirstQ(WatchedText):
    """Reports a sibling as if the first one could be drawn twice."""

    def _other(self, proposal: Proposal, u: float) -> Proposal:
        other, row = super()._other(proposal, u), proposal.row
        assert row is not None
        return other._replace(q=float(row[other.token] / row.sum(dtype=float)), row=row)


class OtherHead(WatchedText):
    """Takes the entries of a draft that knows some tokens for the first tokens of all."""

    def _named(self, entry: int) -> int:
        return entry


def test_biased_parallel_drafts_are_found(
    base: TextPair, three: TextPair, narrow: TextPair
) -> None:
    """The last one's levels share a draw: tokens depend on one another, and their q do not."""
    wrong = [
        replace(base, draft_oracle=OtherDepth),
        replace(three, draft_oracle=FirstQ, mode="sd", tree=SMALL),
        replace(narrow, draft_oracle=OtherHead, mode="sd"),
    ]
    found = [enumerated(replace(pair, is_parallel=True)) for pair in wrong]
    alike = {"rename": lambda name: (*name[:2], name[2] & ~(name[0] == Purpose.DRAFT))}
    found.append(enumerated(replace(base, mode="sd", is_parallel=True), **alike))
    assert min(one.bias for one in found) > 0.01


@pytest.mark.parametrize("mode", ["ssd", "inline", "parallel sd", "parallel inline, a tree"])
def test_many_answers_to_one_prompt_follow_the_target(base: TextPair, mode: str) -> None:
    """A chi-squared test of the first three tokens, in threads with the time of a real run.

    The enumerations above are exact; 1,000 texts show what threads would lose, an error of a tenth
    of the probability.
    """
    count, prompt = 1000, base.prompts[0]
    law = joint_law(replace(base, top_p=0.9), prompt, 3)
    config = RunConfig(
        workload="text", temperature=1.0, top_p=0.9, backend="numpy", num_tokens=3, lookahead=2,
        prompt_ids=";".join([",".join(map(str, prompt))] * count), batch_size=40, seed=3,
        target=base.target_where, draft=base.draft_where, mode="ssd" if "ssd" in mode else "sd",
        num_drafts=int("inline" not in mode), parallel_drafting="parallel" in mode,
        tree=3 if "tree" in mode else None, fan_out="uniform:2",
    )  # fmt: skip
    texts = list(finished(config).tokens.values())
    assert len(texts) == count and deviation(law, texts) < 5
