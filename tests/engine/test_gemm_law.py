"""Tables against the distributions that they tabulate, at any position, and their sums."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from mpissd.common.rounds import Outcome, Request, Source
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
