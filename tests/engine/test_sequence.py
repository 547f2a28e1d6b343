"""The batch that every rank keeps by applying the same outcomes: rows, tokens and places."""

from typing import Any

import numpy as np
import pytest

from mpissd.common.errors import ProtocolError
from mpissd.common.rng import Purpose
from mpissd.common.rounds import Event, Outcome, Request, Source
from mpissd.engine.model.transformer.cache import CacheSizes, PageTable, RowPlaces
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.markov import MarkovDraft, MarkovLaws, MarkovModel, MarkovTarget
from mpissd.engine.workload.sequence import Batch, Placement
from mpissd.engine.workload.workers import DraftWorker
from tests.loop.harness import CountingForwards

K = 3
Row = tuple[int, int, int, int, int]  # id, epoch, event, k, t*
COMMIT, ADMIT, RELEASE = Event.COMMIT, Event.ADMIT, Event.RELEASE


def outcome(round_: int, *rows: Row) -> Outcome:
    return Outcome(round_, np.array(rows, np.int32).reshape(-1, Outcome.WIDTH))


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


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_prompt_that_ends_elsewhere_is_refused(tokens: list[int]) -> None:
    batch = Batch(1, None, lambda request: tokens)
    with pytest.raises(ProtocolError, match="sequence 5 begins after token 3, its prompt ends"):
        batch.apply(Outcome.admission(-1, [Request(5, first_token=3)]))


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
