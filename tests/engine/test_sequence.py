"""The batch that every rank keeps by applying the same outcomes: rows, tokens and places."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ProtocolError
from mpissd.common.rng import Purpose
from mpissd.common.rounds import Outcome, Request, Source, Speculation
from mpissd.engine.model.transformer.cache import CacheSizes, PageTable, RowPlaces
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.tree import CHAIN
from mpissd.engine.workload.markov import (
    MarkovDraft,
    MarkovLaws,
    MarkovModel,
    MarkovTarget,
    trunk,
)
from mpissd.engine.workload.sequence import Batch, Placement
from mpissd.engine.workload.workers import DraftWorker
from tests.common.test_rounds import ADMIT, COMMIT, RELEASE, outcome
from tests.loop.harness import CountingForwards

K = 3
Row = tuple[int, int, int, int, int]


def prompt(request: Request) -> list[int]:
    return [request.request_id, request.epoch, request.first_token]


@dataclass
class Expected:
    """The state of a sequence that a batch must hold."""

    length: int
    last: int
    tokens: list[int]
    rounds: int = 0
    served: list[int] = field(default_factory=list)


@given(st.data(), st.integers(1, 5))
def test_a_batch_follows_its_outcomes(data: st.DataObject, capacity: int) -> None:
    """Sequences join, commit and leave in any order; a slot's next tenant inherits nothing."""
    draw, batch, born = data.draw, Batch(capacity, None, prompt), 0
    model: dict[tuple[int, int], Expected] = {}
    slot_of: dict[tuple[int, int], int] = {}
    for round_ in range(draw(st.integers(1, 8))):
        rows: list[Row] = []
        for (name, epoch), one in list(model.items()):
            k, bonus, stays = draw(st.integers(0, len(one.served))), draw(st.integers(0, 8)), True
            if draw(st.booleans()):
                one.length, one.last, one.rounds = one.length + k + 1, bonus, one.rounds + 1
                one.tokens += [*one.served[:k], bonus]
            else:
                del model[name, epoch]
                stays = False
            rows.append((name, epoch, COMMIT if stays else RELEASE, k, bonus))
        for _ in range(draw(st.integers(0, capacity - len(model)))):
            name, epoch, first = born % 5, born // 5, draw(st.integers(0, 8))
            rows.append((name, epoch, ADMIT, 0, first))
            model[name, epoch] = Expected(1, first, [name, epoch, first])
            born += 1
        change = batch.apply(outcome(round_ - 1, *rows))
        assert len(change.left) == sum(row[2] == RELEASE for row in rows)
        assert len(change.placed) == sum(row[2] == ADMIT for row in rows)
        assert [*change.placed] == [*change.started]
        slot_of |= {(s.request.request_id, s.request.epoch): s.slot for s in change.placed}
        names = [(s.request.request_id, s.request.epoch) for s in batch.sequences]
        assert names == list(model) == list(map(tuple, batch.identity[:, :2]))
        assert batch.lengths.tolist() == [one.length for one in model.values()]
        assert batch.last_tokens.tolist() == [one.last for one in model.values()]
        assert [s.tokens for s in batch.sequences] == [one.tokens for one in model.values()]
        assert [s.rounds for s in batch.sequences] == [one.rounds for one in model.values()]
        # A sequence keeps the slot that it was given, and shares it with no live one.
        assert batch.slots.tolist() == [slot_of[name] for name in model]
        assert len({*batch.slots.tolist()}) == len(model)
        served = Speculation.empty(round_, len(model), K)
        for row, one in zip(served.rows, model.values(), strict=True):
            one.served = draw(st.lists(st.integers(0, 8), max_size=K))
            row[2], row[3 : 3 + len(one.served)] = len(one.served), one.served
        batch.serve(served)
        assert [s.served for s in batch.sequences] == [one.served for one in model.values()]


@given(st.data(), st.integers(1, 4))
def test_the_short_cut_of_a_steady_round_changes_nothing(data: st.DataObject, size: int) -> None:
    batches = [Batch(size, Placement(), prompt), Batch(size, Placement(), prompt)]
    for batch in batches:
        batch.apply(Outcome.admission(-1, [Request(n, n) for n in range(size)]))
    for round_ in range(4):
        ks = data.draw(st.lists(st.integers(0, 7), min_size=size, max_size=size))
        rows: list[Row] = [(n, 0, COMMIT, k, 9 * k) for n, k in enumerate(ks)]
        batches[1]._steady = b"never"  # uses the general code
        states = []
        for batch in batches:
            for one in batch.sequences:
                one.served = [*range(7)]
            assert not any(batch.apply(outcome(round_, *rows)))
            columns = batch.slots, batch.lengths, batch.last_tokens, batch.filled
            states.append([*(c.tolist() for c in columns), [s.tokens for s in batch.sequences]])
        assert states[0] == states[1]


@pytest.mark.parametrize(
    "rows",
    [
        [(1, 0, COMMIT, 0, 5)],  # one is missing
        [(2, 0, COMMIT, 0, 5), (1, 0, COMMIT, 0, 5)],  # in another order
        [(1, 0, COMMIT, 0, 5), (2, 1, COMMIT, 0, 5)],  # another epoch
        [(1, 0, COMMIT, 0, 5), (2, 0, ADMIT, 0, 5)],  # admitted twice
        [(1, 0, COMMIT, 0, 5), (2, 0, COMMIT, 0, 5), (3, 0, COMMIT, 0, 5)],  # never admitted
        [(1, 0, COMMIT, 0, 5), (2, 0, COMMIT, 0, 5), (3, 0, RELEASE, 0, 5)],
        [(1, 0, COMMIT, 0, 5), (2, 0, COMMIT, 0, 5), (3, 0, ADMIT, 0, 5), (4, 0, ADMIT, 0, 5)],
    ],
)
def test_an_outcome_of_other_sequences_is_refused_and_changes_nothing(rows: list[Row]) -> None:
    batch = Batch(3)
    batch.apply(Outcome.admission(-1, [Request(1), Request(2)]))
    with pytest.raises(ProtocolError, match="round 8"):
        batch.apply(outcome(8, *rows))
    assert not any(batch.apply(outcome(8, (1, 0, COMMIT, 3, 5), (2, 0, COMMIT, 0, 6))))
    assert (batch.ids.tolist(), batch.lengths.tolist()) == ([1, 2], [5, 2])


def test_a_full_batch_takes_one_in_for_one_that_leaves() -> None:
    batch = Batch(1)
    batch.apply(Outcome.admission(-1, [Request(4, 40)]))
    change = batch.apply(outcome(0, (4, 0, RELEASE, 2, 7), (4, 1, ADMIT, 0, 41)))
    assert [one.request for one in change.started] == [Request(4, 41, 1)]
    assert (batch.lengths.tolist(), batch.last_tokens.tolist()) == ([1], [41])


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_prompt_that_ends_elsewhere_is_refused(tokens: list[int]) -> None:
    batch = Batch(1, None, lambda request: tokens)
    with pytest.raises(ProtocolError, match="sequence 5 begins after token 3, its prompt ends"):
        batch.apply(Outcome.admission(-1, [Request(5, first_token=3)]))


def test_a_trunk_s_contexts_are_those_of_its_prefixes() -> None:
    for order in (1, 2, 3):
        for known in range(5):
            model, tokens, served = MarkovModel(9, order, 0), [4, 1, 7, 3][:known], [8, 2, 5]
            found = trunk(model, tokens, served, CHAIN)
            assert found == [model.context([*tokens, *served[:n]]) for n in range(4)]


def test_a_sequence_that_begins_again_draws_anew() -> None:
    """A request's next epoch has other draws than its last one."""

    def first_draft(epoch: int, seed: int = 6) -> tuple[list[int], list[float]]:
        model = MarkovModel(9, 2, 1)
        laws = MarkovLaws(model, MarkovModel(9, 2, 1, 0.5), 1.0, seed=seed)
        draft = DraftWorker(CountingForwards(), MarkovDraft(laws, 40, FanOuts()))
        batch = draft.open_batch(1)
        request = Request(2, first_token=laws.prompt(2)[-1], epoch=epoch)
        draft.enter(batch, batch.apply(Outcome.admission(-1, [request])))
        rollout = draft.restart(batch, [0], Source.JIT)
        for _ in range(40):
            draft.launch_step(batch, [rollout])
            draft.collect_step([rollout])
        coins = MarkovTarget(laws)._draws(Purpose.ACCEPT, batch.sequences[0], 5)
        return rollout.tokens[0].tolist(), coins

    assert first_draft(0) == first_draft(0)
    (tokens, coins), (others, other_coins) = first_draft(0), first_draft(1)
    assert tokens != others and not set(coins) & set(other_coins)
    assert first_draft(0, seed=7)[1] != coins


# Places in the KV cache.


def placed(*requests: Request, **placement: Any) -> Batch:
    batch = Batch(2, Placement(**placement))
    batch.apply(Outcome.admission(-1, requests))
    return batch


def test_positions_without_a_prompt_begin_after_the_context_and_begin_again() -> None:
    batch, seen = placed(Request(0), Request(1), context=100, window=6), []
    for round_ in range(5):
        seen.append(batch.last().tolist())
        batch.apply(outcome(round_, (0, 0, COMMIT, 1, 3), (1, 0, COMMIT, 0, 3)))
    assert seen == [[100, 100], [102, 101], [104, 102], [100, 103], [102, 104]]


def test_a_prompt_is_missing_until_it_is_filled() -> None:
    batch = placed(Request(0, 7, 0, (5, 6, 7)), Request(1, 9, 0, (9,)))
    gaps = batch.gaps(range(2))
    assert gaps == [(0, 0, 2)] and batch.gaps(range(2), spare=2) == []
    places = batch.fill(gaps)
    assert (places.slots.tolist(), places.positions.tolist()) == ([0, 0], [0, 1])
    assert batch.gaps(range(2)) == []
    trunk = batch.trunk(np.array([2, 0], np.int32))
    assert trunk.slots.tolist() == [0, 0, 0, 1] and trunk.positions.tolist() == [2, 3, 4, 0]
    assert (trunk.lanes == -1).all() and batch.filled.tolist() == [5, 1]
    lanes = batch.lanes(np.array([0, 0, 1]), np.array([0, 2, 0], np.int32), np.zeros(3, np.int32))
    step = batch.step(lanes, 1)
    assert step.positions.tolist() == [4, 6, 2] and step.trunks.tolist() == [3, 5, 1]
    assert step.lanes.tolist() == [0, 1, 2] and batch.filled.tolist() == [5, 1]
    kept = batch.step(lanes.keep(np.array([1])), 2)
    assert (kept.lanes.tolist(), kept.positions.tolist()) == ([1], [7])
    batch.apply(outcome(0, (0, 0, COMMIT, 1, 3), (1, 0, COMMIT, 0, 3)))
    assert batch.filled.tolist() == [4, 1]


@pytest.mark.parametrize("window", [None, 6])
def test_a_sequence_has_the_same_places_in_a_batch_of_one_and_of_two(window: int | None) -> None:
    """A batch of one has its own code path: its rows equal the first sequence's in every round."""

    def rounds(*requests: Request) -> list[tuple[list[Any], int]]:
        batch, found = placed(*requests, context=100, window=window), []
        for round_, (drafted, accepted) in enumerate([(2, 1), (0, 0), (3, 3), (1, 0)]):
            places = batch.trunk(np.array([drafted] * len(requests), np.int32))
            mine = places.slots == 0
            parts = places.slots, places.positions, places.lanes, places.trunks
            assert {part.dtype for part in parts} == {np.dtype(np.int32)}
            found.append(([part[mine].tolist() for part in parts], int(batch.filled[0])))
            batch.apply(outcome(round_, *[(r.request_id, 0, 0, accepted, 3) for r in requests]))
        return found

    assert rounds(Request(0)) == rounds(Request(0), Request(1))
    with pytest.raises(AssertionError, match="after tokens that are missing"):
        placed(Request(0, 7, 0, (5, 6, 7))).trunk(np.array([1], np.int32))


def test_branches_after_a_short_trunk_stay_within_its_pages() -> None:
    """A backup served one of K = 2 tokens and the trunk ends with a page; imposed tokens grow K + 1
    rows."""
    sizes = CacheSizes(1, 1, 16, slots=1, capacity=64, page=16, lanes=3, steps=2)
    pages = PageTable(RowPlaces(np.zeros(RowPlaces.size(16, sizes), np.int32), 16, sizes), sizes)
    batch = placed(Request(0, 7, 0, tuple(range(15))))
    pages.place(batch.fill(batch.gaps(range(1))))
    pages.place(batch.trunk(np.array([1], np.int32)))
    assert pages.held == [1] and batch.filled[0] == 16
    lanes = batch.lanes(np.zeros(3, np.int64), np.arange(3, dtype=np.int32), np.zeros(3, np.int32))
    assert lanes.first.tolist() == [15, 16, 16]  # the third can never hit
    pages.place(batch.step(lanes, 0))
    assert pages.held == [1]
