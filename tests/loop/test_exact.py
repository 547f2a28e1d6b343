"""SSD loses nothing: the exact joint distribution of the first three tokens is the target's own.

The total variation must be below 1e-12 (it is about 2e-16). Each condition that losslessness
depends on has a biased variant that the same enumeration must refuse. For some of these mistakes
the same machinery also runs without the mistake and is exact: so the mistake is the cause.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mpissd.common.rng import Purpose
from mpissd.common.rounds import Control, Source, Speculation
from mpissd.engine.law import sampling
from mpissd.engine.law.tree import Shape
from mpissd.engine.oracle import sampled as oracle
from tests.loop.choices import Name
from tests.loop.enumeration import EXACT, Case, Decoding, Judged, Rows, Watched, enumerate_
from tests.loop.markov_rig import Pair

SD, SSD = Pair("sd"), Pair("ssd")
SMALL = Pair("ssd", vocab=3)
FORKED = Shape((0, 0, 1, 1))


def by_past(decoding: Decoding) -> Control:
    """K, and the most candidates of a row, by the numbers of tokens accepted so far."""
    past = sum(decoding.accepted)
    return Control(lookahead=(2, 1)[past % 2], width=(3, 1, 0, 2)[past % 4])


def none(decoding: Decoding) -> int:
    return 0


CACHE, JIT, FAST = Source.CACHE, Source.JIT, Source.FAST
BOTH, TREES = {(CACHE, 2), (JIT, 2)}, {(CACHE, 4), (JIT, 4)}
PAST = Case(replace(SSD, fan_out=(1, 2, 3), saguaro_c=0.5), control=by_past)
LOST = Case(SMALL, confirms=lambda decoding: bool(decoding.choices.among(2)))
# name: (case, what must have been served in it)
LOSSLESS: dict[str, tuple[Case, set[tuple[Source, int]]]] = {
    "jit": (Case(SD), {(JIT, 2)}),
    "jit, short": (Case(replace(SD, backup_lookahead=1)), {(JIT, 1)}),
    "hit or jit": (Case(SSD), BOTH),
    "hit, finished late": (Case(SSD, steps=none), BOTH),
    "hit": (Case(replace(SSD, fan_out=(4, 4, 4))), BOTH),
    "fast": (Case(replace(SSD, fan_out=(1, 0, 0), backup="fast")), {(CACHE, 2), (FAST, 2)}),
    "fast alone": (Case(replace(SD, backup="fast")), {(FAST, 2)}),
    "all by past k": (PAST, {(CACHE, 1), *BOTH}),
    "hit at the lead, or jit": (Case(SSD, pushes=True), BOTH),
    "hit at the lead, by past k": (replace(PAST, pushes=True), {(CACHE, 1), *BOTH}),
    "hit at the lead, distributions lost at random": (replace(LOST, pushes=True), BOTH),
    "a tree, hit at the lead": (Case(replace(SMALL, tree=FORKED), pushes=True), TREES),
    "deeper": (
        Case(Pair(vocab=3, lookahead=3, fan_out=(1, 1, 1, 2)), count=4),
        {(CACHE, 3), (JIT, 3)},
    ),
    "order 2, longer prompt": (Case(replace(SSD, order=2, prompt_tokens=3)), BOTH),
    "cold": (Case(replace(SSD, temperature=0.4)), BOTH),
    "hot": (Case(replace(SSD, temperature=3.0, divergence=1.0)), BOTH),
    "one model": (Case(replace(SSD, divergence=0.0)), BOTH),
    "C=0.5": (Case(replace(SSD, saguaro_c=0.5, fan_out=(2, 1, 3))), BOTH),
    "C=0.0": (Case(replace(SSD, saguaro_c=0.0, fan_out=(2, 1, 3))), BOTH),
    "C=0 over everything": (Case(replace(SMALL, saguaro_c=0.0, fan_out=(3, 3, 3))), BOTH),
    "distributions lost at random": (LOST, BOTH),
    "a tree": (Case(replace(SD, tree=FORKED)), {(JIT, 4)}),
    "a bush": (Case(replace(SD, vocab=3, tree=Shape((0, 0, 0, 1, 1, 2)))), {(JIT, 6)}),
    "a tree, every distribution lost": (
        Case(replace(SD, vocab=3, tree=FORKED), confirms=lambda decoding: False),
        {(JIT, 4)},
    ),
    "a tree, hit or jit": (Case(replace(SMALL, tree=FORKED)), TREES),
    "a tree, C=0.5": (
        Case(replace(SMALL, tree=FORKED, fan_out=(1, 0, 2, 1, 1), saguaro_c=0.5)),
        TREES,
    ),
    "every distribution lost": (Case(SMALL, confirms=lambda decoding: False), BOTH),
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


SD3, SSD3 = (Pair(mode, vocab=3, seed=5, divergence=0.6) for mode in ("sd", "ssd"))
UNLIKELY = 0.3  # a less probable token is unlikely


def serve_no_more_than(count: int, answer: Speculation, rows: Rows) -> None:
    """The first tokens of sequence 0's speculation."""
    answer.num_draft[0] = count
    rows[0] = rows[0][:count]


def drop_unlikely(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    """Serves a speculation up to the first token that is unlikely."""
    unlikely = np.flatnonzero(answer.q[0, : answer.num_draft[0]] < UNLIKELY)
    if len(unlikely):
        serve_no_more_than(int(unlikely[0]), answer, rows)


def drop_behind_unlikely(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    """Serves a speculation up to and including its first unlikely token, which leaves SSD exact."""
    unlikely = np.flatnonzero(answer.q[0, : answer.num_draft[0]] < UNLIKELY)
    if len(unlikely):
        serve_no_more_than(int(unlikely[0]) + 1, answer, rows)


def second_draft(decoding: Decoding) -> tuple[list[int], list[float], list[sampling.Row]]:
    """Other tokens for sequence 0, from draws of their own."""
    laws, choices = decoding.case.pair.laws, decoding.choices
    tokens, q, rows = list[int](), list[float](), list[sampling.Row]()
    for place in range(decoding.case.pair.K):
        after = [*laws.prompt(0), *decoding.emitted[0], *tokens]
        logits = laws.draft.logits(laws.draft.context(after))
        u = choices.uniforms(0, Purpose.WRONG, 0, choices.round * 512 + place, 1)[0]
        found = sampling.propose(sampling.weigh(logits, laws.temperature).probs, u)
        for kept, value in zip((tokens, q, rows), found, strict=True):
            kept.append(value)  # type: ignore[attr-defined]
    return tokens, q, rows


def replace_draft(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    answer.tokens[0], answer.q[0], rows[0] = second_draft(decoding)


def likelier_branch(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    """Of two speculations the one that is likelier in the draft model."""
    tokens, q, own = second_draft(decoding)
    if np.prod(q) > np.prod(answer.q[0]):
        answer.tokens[0], answer.q[0], rows[0] = tokens, q, own


def redraft_bad_branch(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    """Another speculation in the place of one that begins with an unlikely token."""
    if answer.q[0, 0] < UNLIKELY:
        replace_draft(decoding, answer, rows)


def draft_s_own_q(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    """Certain tokens, sent with the probabilities that the draft model gives them."""
    laws = decoding.case.pair.laws
    told = []
    for place, token in enumerate(answer.tokens[0].tolist()):
        after = [*laws.prompt(0), *decoding.emitted[0], *answer.tokens[0, :place].tolist()]
        logits = laws.draft.logits(laws.draft.context(after))
        row = sampling.record(sampling.weigh(logits, laws.temperature).probs)
        answer.q[0, place] = sampling.recorded(row)[token]
        told.append(row)
    rows[0] = told


class PlainQ(Watched):
    """Damped tokens, sent with the probabilities of plain sampling."""

    def _propose(self, lane: Any, place: int, u: float) -> oracle.Proposal:
        token, _, _ = super()._propose(lane, place, u)
        logits = self._laws.draft.logits(lane.context)
        row = sampling.record(sampling.weigh(logits, self._laws.temperature).probs)
        return oracle.Proposal(token, float(sampling.recorded(row)[token]), row)


class RoundedAfter(Watched):
    """Rows that are rounded after their token is drawn."""

    def _propose(self, lane: Any, place: int, u: float) -> oracle.Proposal:
        logits = self._laws.draft.logits(lane.context)
        probs = sampling.weigh(logits, self._laws.temperature).probs
        token, row = sampling.draw(probs, u), self.rounded(probs)
        return oracle.Proposal(token, float(sampling.recorded(row)[token]), row)

    def rounded(self, probs: sampling.Floats) -> sampling.Row:
        """Rounds to the eight bits of bfloat16."""
        half = sampling.record(probs).view(np.uint32) + 0x8000
        return (half & np.uint32(0xFFFF0000)).view(np.float32)


class RoundedToSingleAfter(RoundedAfter):
    """Rounds to float32, the type that is sent."""

    rounded = staticmethod(sampling.record)


def each_round_alike(purpose: Purpose) -> Callable[[Name], Name]:
    """The draws of one purpose do not depend on the round."""
    return lambda name: (name[0], name[1], name[2] % 512) if name[0] == purpose else name


def in_the_place_of(purpose: Purpose, other: Purpose) -> Callable[[Name], Name]:
    """Two purposes share their draws."""
    return lambda name: (other, *name[1:]) if name[0] == purpose else name


class ByPosition(Watched):
    """Draws its tokens by their absolute position: an unverified token shares its draw with a
    token of the next round."""

    def _propose(self, lane: Any, place: int, u: float) -> oracle.Proposal:
        choices, position = self.decoding.choices, len(self.decoding.emitted[0]) + place
        by_position = choices.uniforms(0, Purpose.TOKEN, 0, position, 1)[0]
        return super()._propose(lane, place, by_position)


class Forgiving(Judged):
    """Draws the first token from the target again if one is rejected."""

    def _judge_one(self, case: oracle.Case) -> tuple[int, int]:
        k, bonus = super()._judge_one(case)
        if k == len(case.tokens):
            return k, bonus
        return super()._judge_one(replace(case, tokens=[], q=[]))


def wary(decoding: Decoding, answer: Speculation, rows: Rows) -> None:
    """Serves nothing if the last speculation ended in an unlikely token that was not verified."""
    last = decoding.last_q
    decoding.last_q = float(answer.q[0, 1])
    if decoding.accepted and decoding.accepted[-1] == 0 and last < UNLIKELY:
        serve_no_more_than(0, answer, rows)


class FirstQ(Watched):
    """Siblings without replacement, sent with the probabilities of the first one's draw."""

    def _other(self, proposal: oracle.Proposal, u: float) -> oracle.Proposal:
        token, _, _ = super()._other(proposal, u)
        q = float(sampling.recorded(proposal.row)[token])
        return oracle.Proposal(token, q, proposal.row)


def siblings_alike(purpose: Purpose) -> Callable[[Name], Name]:
    """Both children of a node share a draw."""
    return lambda name: (*name[:2], name[2] & ~1) if name[0] == purpose else name


TREE = replace(SD3, tree=Shape((0, 0, 1, 1)))
BRANCHED = replace(SSD3, tree=TREE.tree)
WARY = Case(SD3, tamper=wary, remembers=lambda decoding: decoding.last_q)

BIASED: dict[str, Case] = {
    "1: an unlikely token is not served": Case(SSD3, tamper=drop_unlikely),
    "2: the likelier of two branches": Case(SD3, tamper=likelier_branch),
    "2: a bad branch is drafted again": Case(SD3, tamper=redraft_bad_branch),
    "3: certain tokens, the draft's q": Case(replace(SD3, backup="fast"), tamper=draft_s_own_q),
    "3: C = 0.1, plain q": Case(replace(SSD3, saguaro_c=0.1), worker=PlainQ),
    "4: draft draws are the coins": Case(
        SD3, rename=in_the_place_of(Purpose.ACCEPT, Purpose.DRAFT)
    ),
    "4: a coin draws the bonus": Case(SD3, rename=in_the_place_of(Purpose.BONUS, Purpose.ACCEPT)),
    "4: the bonus is drawn alike": Case(SD3, rename=each_round_alike(Purpose.BONUS), fresh=False),
    "4: coins are alike": Case(SD3, rename=each_round_alike(Purpose.ACCEPT), fresh=False),
    "4: drafts are alike": Case(SSD3, rename=each_round_alike(Purpose.DRAFT), fresh=False),
    "4: what decided nothing is used again": replace(WARY, worker=ByPosition, fresh=False),
    "3: a rejected round is drawn again, its q being lost": Case(SD3, judge=Forgiving),
    "7: stopped by rounds": Case(SD3, rounds=2),
    "tree: the first draw's q": Case(TREE, worker=FirstQ),
    "tree: siblings share a draw": Case(TREE, rename=siblings_alike(Purpose.DRAFT)),
    "branches of trees: the first draw's q": Case(BRANCHED, worker=FirstQ),
    "branches of trees: an unlikely token is not served": Case(BRANCHED, tamper=drop_unlikely),
    "tree: siblings share a coin": Case(TREE, rename=siblings_alike(Purpose.ACCEPT)),
}


@pytest.mark.parametrize("name", BIASED)
def test_a_bias_is_refused(name: str) -> None:
    found = enumerate_(BIASED[name])
    print(f"{name}: total variation {found.bias:.4f}")
    assert found.bias > 0.02


@pytest.mark.parametrize(("worker", "least"), [(RoundedAfter, 1e-4), (RoundedToSingleAfter, 1e-10)])
def test_rounding_what_was_sampled_is_refused(worker: type[Watched], least: float) -> None:
    """Condition 3 again: the bias is too small for any number of sampled tokens to show."""
    found = enumerate_(Case(SD3, worker=worker))
    print(f"3: {worker.__name__}: total variation {found.bias:.1e}")
    assert found.bias > least > 10 * EXACT


def test_a_rejection_that_is_let_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Condition 5: only a residual of rounding errors is none, not a small one."""
    monkeypatch.setattr(sampling, "_EMPTY", 0.2)
    found = enumerate_(Case(replace(SD3, divergence=0.2)))
    print(f"5: a residual below 0.2 is none: total variation {found.bias:.4f}")
    assert found.bias > 0.02


HARMLESS: dict[str, Case] = {
    "dropped after an unlikely token": Case(SSD3, tamper=drop_behind_unlikely),
    "every branch is drafted again": Case(SD3, tamper=replace_draft),
    "nothing is served after what decided nothing": WARY,
    "drawn by position": Case(SD3, worker=ByPosition, fresh=False),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_looks_alike_and_is_no_mistake_is_exact(name: str) -> None:
    assert enumerate_(HARMLESS[name]).bias <= EXACT


def test_a_draw_that_serves_two_rounds_is_noticed() -> None:
    with pytest.raises(AssertionError, match="is used in rounds"):
        enumerate_(Case(SD3, rename=each_round_alike(Purpose.BONUS)))
