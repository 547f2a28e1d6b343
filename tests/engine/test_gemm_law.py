"""Tables against the distributions that they tabulate, at any position, and their sums."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.rounds import Outcome, Request, Source, Speculation
from mpissd.engine.spec.acceptance import AcceptanceLaw, named_hit_law
from mpissd.engine.workload.gemm import DraftStream, TokenStream
from mpissd.engine.workload.sequence import Batch
from tests.oracle import Law

SHORT = 64  # positions of a window, so that some rounds cross several


class Pair:
    """Streams of both sides, their batch, and the imposed model that they tabulate."""

    def __init__(
        self,
        lookahead: int,
        fan_out: Sequence[int],
        *,
        batch: int = 1,
        vocab: int = 1000,
        seed: int = 0,
        rates: Sequence[float] = (),
        fast: float = 0.3,
        p_hit: float | None = None,
        hit_law: str | None = None,
    ) -> None:
        self.lookahead, self.fan_out = lookahead, tuple(fan_out)
        primary = tuple(rates) or (0.8,) * lookahead
        laws = dict.fromkeys((Source.CACHE, Source.JIT), AcceptanceLaw(primary, ""))
        laws[Source.FAST] = AcceptanceLaw((fast,) * lookahead, "")
        text = hit_law or ("smollm2" if p_hit is None else f"p_hit:{p_hit}")
        hits = named_hit_law(text)
        hazards = {source: law.hazards for source, law in laws.items()}
        (a, end_a), (r, end_r), (floor, end_floor) = hits.powers(1, 1)
        both = (a, r, floor), (end_a, end_r, end_floor)
        self.law = Law(seed, vocab, hazards, self.fan_out, hits.p_hit, both)
        self.draft = DraftStream(seed, vocab, batch, laws, hits, max((1, *fan_out)))
        self.target = TokenStream(seed, vocab, batch, lookahead, SHORT)
        self.batch = Batch(batch)

    def admit(self, *requests: Request) -> None:
        self._begin(Outcome.admission(-1, requests))

    def commit(self, ks: Sequence[int]) -> None:
        """Every sequence goes on by k + 1 tokens."""
        rows = self.batch.identity.copy()
        rows[:, 3] = ks
        self._begin(Outcome(0, rows))

    def _begin(self, outcome: Outcome) -> None:
        started = self.batch.apply(outcome).started
        self.draft.begin_round(self.batch, started)
        self.target.begin_round(self.batch, started)

    def places(self) -> list[tuple[int, int]]:
        """(sequence, committed length) of the batch's rows."""
        return list(zip(self.batch.ids.tolist(), self.batch.lengths.tolist(), strict=True))

    def candidates(self, source: Source, num_draft: Sequence[int]) -> list[list[list[int]]]:
        """By batch row and k: F_k ids, in lane order."""
        speculation = Speculation.empty(0, len(num_draft), self.lookahead)
        speculation.rows[:, 0], speculation.rows[:, 2] = source, num_draft
        ids, _ = self.draft.grown(speculation, self.fan_out)
        ends = np.cumsum(self.fan_out)[:-1]
        return [[part.tolist() for part in np.split(row, ends)] for row in ids]


@pytest.fixture(autouse=True)
def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpissd.engine.workload.gemm.WINDOW", SHORT)


def check_tables(pair: Pair) -> None:
    """Every number that this round may ask for."""
    ahead = np.arange(pair.lookahead + 1)
    want = [[pair.law.true(s, n + j) for j in ahead] for s, n in pair.places()]
    assert pair.draft.true(ahead).tolist() == pair.target.true(ahead).tolist() == want
    for source in (Source.CACHE, Source.JIT, Source.FAST):
        found = pair.draft.drafts(source, ahead)  # [b, K+1, K]
        for row, (s, n) in zip(found.tolist(), pair.places(), strict=True):
            for offset, tokens in enumerate(row):
                assert tokens == pair.law.proposals(s, n + offset, pair.lookahead, source)


@pytest.mark.parametrize("lookahead", [1, 4, 9])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_refilled_window_holds_the_same_draws(lookahead: int, batch: int) -> None:
    """Sequences at different paces, over ten windows, each round checked."""
    rates = [0.9 - 0.08 * i for i in range(lookahead)]
    pair = Pair(lookahead, (2,) * (lookahead + 1), batch=batch, rates=rates, seed=3)
    pair.admit(*[Request(n) for n in range(batch)])
    paces = np.arange(batch) % (lookahead + 1)
    paces[-1] = lookahead  # the fastest that there is
    while pair.batch.lengths.max() < 10 * SHORT:
        check_tables(pair)
        pair.commit(paces.tolist())


def test_a_slot_taken_again_forgets_its_last_tenant() -> None:
    pair = Pair(2, (1, 1, 1), batch=2)
    pair.admit(Request(0), Request(1))
    for _ in range(40):
        pair.commit([2, 0])
    rows = pair.batch.identity.copy()
    rows[0, 2] = 2  # sequence 0 leaves its slot to sequence 7, which is at its beginning
    new = Outcome.admission(0, [Request(7)]).rows
    pair._begin(Outcome(40, np.concatenate([rows, new])))
    assert pair.places() == [(1, 42), (7, 1)] and set(pair.batch.slots.tolist()) == {0, 1}
    check_tables(pair)


Fans = st.integers(1, 5).flatmap(
    lambda k: st.lists(st.integers(0, 4), min_size=k + 1, max_size=k + 1)
)


@settings(max_examples=150)
@given(Fans.filter(any), st.integers(0, 5), st.integers(0, 2**32), st.data())
def test_candidates(fan_out: list[int], spare: int, seed: int, data: st.DataObject) -> None:
    """Distinct; the true bonus only at the place of its rank; never the proposed token."""
    lookahead, vocab = len(fan_out) - 1, max(fan_out) + 2 + spare
    alpha = data.draw(st.sampled_from([0.0, 0.5, 0.8, 1.0]))
    hits = data.draw(st.sampled_from([None, "power:A=1.2/0.3,r=0.5/1.5"]))
    rates = [alpha] * lookahead
    pair = Pair(
        lookahead, fan_out, batch=2, vocab=vocab, seed=seed, rates=rates, fast=0.5, hit_law=hits
    )
    pair.admit(Request(0), Request(5))
    for _ in range(3):
        source = data.draw(st.sampled_from([Source.CACHE, Source.JIT, Source.FAST]))
        num_draft = data.draw(st.lists(st.integers(0, lookahead), min_size=2, max_size=2))
        found, ks = pair.candidates(source, num_draft), []
        for rows, (s, n), served in zip(found, pair.places(), num_draft, strict=True):
            drafts = pair.law.proposals(s, n, served, source)
            k, bonus = pair.law.judge(s, n, drafts)
            ks.append(k)
            for j, ids in enumerate(rows):
                assert len(ids) == len(set(ids)) == fan_out[j]
                assert all(0 <= token < vocab for token in ids)
                assert j >= served or drafts[j] not in ids
            rank = pair.law.rank(s, n + k, k == served)
            where = rows[k].index(bonus) + 1 if bonus in rows[k] else math.inf
            assert where == (rank if rank <= fan_out[k] else math.inf)
        pair.commit(ks)


@pytest.mark.parametrize("text", ["p_hit:0.35", "power:A=1.2,r=0.5", "power:A=0.64/0.23,r=0.4/0.5"])
def test_hits_follow_the_hit_law(text: str) -> None:
    """Seed 11, 8 sequences, 500 rounds; 5 standard deviations: a false alarm in 1.7e6 a check."""
    fan_out = (4, 1, 3)
    pair = Pair(2, fan_out, batch=8, seed=11, hit_law=text)
    pair.admit(*[Request(n) for n in range(8)])
    tries, hits = np.zeros(3), np.zeros(3)
    for _ in range(500):
        found, ks = pair.candidates(Source.JIT, [2] * 8), []
        for rows, (s, n) in zip(found, pair.places(), strict=True):
            k, bonus = pair.law.judge(s, n, pair.law.proposals(s, n, 2, Source.JIT))
            tries[k] += 1
            hits[k] += bonus in rows[k]
            ks.append(k)
        pair.commit(ks)
    law = named_hit_law(text)
    for k, fan in enumerate(fan_out):
        p = law.hit_probability(fan, k == 2)
        assert abs(hits[k] - tries[k] * p) <= 5 * math.sqrt(tries[k] * p * (1 - p))
        assert tries[k] > 400


def test_acceptance_follows_its_hazards() -> None:
    """Seed 2, 4,000 rounds of place-dependent rates; 5 standard deviations."""
    hazards = (0.9, 0.6, 0.3)
    pair = Pair(3, (1,) * 4, batch=8, rates=hazards, seed=2)
    pair.admit(*[Request(n) for n in range(8)])
    reached, accepted = np.zeros(3), np.zeros(3)
    for _ in range(500):
        drafts = pair.draft.drafts(Source.JIT, np.zeros((), np.int64))
        ks = (drafts == pair.target.true(np.arange(3))).cumprod(axis=1).sum(axis=1)
        for k in ks.tolist():
            reached[: min(k + 1, 3)] += 1
            accepted[:k] += 1
        pair.commit(ks.tolist())
    for tries, hits, rate in zip(reached, accepted, hazards, strict=True):
        assert abs(hits - tries * rate) <= 5 * math.sqrt(tries * rate * (1 - rate))
