"""What a worker remembers of its sequences, against a model that keeps everything by name."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ProtocolError
from mpissd.common.rng import Purpose
from mpissd.common.rounds import Batch, Event, Outcome, Request, Source, Speculation
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.workload.history import Histories
from mpissd.engine.workload.markov import (
    MarkovDraftWorker,
    MarkovLaws,
    MarkovModel,
    MarkovTargetWorker,
    trunk,
)
from tests.loop.harness import CountingForwards

K, CAPACITY = 3, 4
LAWS = MarkovLaws(MarkovModel(9, 2, 1), MarkovModel(9, 2, 1, 0.5), 1.0, seed=6, prompt_tokens=3)


def prompt(request: Request) -> list[int]:
    return [request.request_id, request.epoch, request.first_token]


@given(st.data())
def test_every_sequence_keeps_its_own_tokens(data: st.DataObject) -> None:
    """Sequences come, commit and go in any order; a slot's next tenant inherits nothing."""
    batch, histories = Batch(CAPACITY), Histories(prompt)
    expected: dict[tuple[int, int], list[int]] = {}
    ages: dict[tuple[int, int], int] = {}
    served: dict[tuple[int, int], list[int]] = {}
    born = 0
    for round_ in range(data.draw(st.integers(1, 8))):
        rows = []
        for id_, epoch in list(expected):
            stays, key = data.draw(st.booleans()), (id_, epoch)
            k = data.draw(st.integers(0, len(served[key])))
            bonus = data.draw(st.integers(0, 8))
            rows.append((id_, epoch, Event.COMMIT if stays else Event.RELEASE, k, bonus))
            if stays:
                expected[key] += [*served[key][:k], bonus]
                ages[key] += 1
            else:
                del expected[key], ages[key], served[key]
        for _ in range(data.draw(st.integers(0, CAPACITY - len(expected)))):
            id_, epoch, first = born % 5, born // 5, data.draw(st.integers(0, 8))
            rows.append((id_, epoch, Event.ADMIT, 0, first))
            expected[id_, epoch], ages[id_, epoch] = [id_, epoch, first], 0
            born += 1
        outcome = Outcome(round_ - 1, np.array(rows, np.int32).reshape(-1, Outcome.WIDTH))
        histories.begin_round(batch, batch.apply(outcome))
        found = histories.rows(batch)
        assert [(h.request.request_id, h.request.epoch) for h in found] == list(expected)
        assert [h.tokens for h in found] == list(expected.values())
        assert [h.age for h in found] == list(ages.values())
        assert all(h.served == [] for h in found)
        speculation = Speculation.empty(round_, len(found), K)
        speculation.rows[:, 2:] = data.draw(
            st.lists(
                st.tuples(st.integers(0, K), *[st.integers(0, 8)] * K),
                min_size=len(found),
                max_size=len(found),
            ).map(lambda table: np.array(table, np.int32).reshape(-1, K + 1))
        )
        histories.serve(batch, speculation)
        for key, row in zip(expected, speculation.rows.tolist(), strict=True):
            served[key] = row[3 : 3 + row[2]]
        assert [h.served for h in found] == list(served.values())


@pytest.mark.parametrize("tokens", [[], [1, 2]])
def test_a_prompt_that_ends_elsewhere_is_refused(tokens: list[int]) -> None:
    batch = Batch(1)
    outcome = Outcome.admission(-1, [Request(5, first_token=3)])
    admissions = batch.apply(outcome)
    with pytest.raises(ProtocolError, match="sequence 5 begins behind token 3, its prompt ends"):
        Histories(lambda request: tokens).begin_round(batch, admissions)


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("known", range(5))
def test_a_trunk_s_contexts_are_those_of_its_prefixes(order: int, known: int) -> None:
    model, tokens, served = MarkovModel(9, order, 0), [4, 1, 7, 3][:known], [8, 2, 5]
    found = trunk(model, tokens, served)
    assert found == [model.context([*tokens, *served[:n]]) for n in range(4)]
    assert trunk(model, tokens, []) == [model.context(tokens)]


def first_draft(epoch: int, seed: int = 6) -> tuple[list[int], list[float]]:
    """K tokens behind a prompt of no information, and the coins of their verification."""
    laws = MarkovLaws(LAWS.target, LAWS.draft, 1.0, seed=seed)
    draft = MarkovDraftWorker(CountingForwards(), laws, 40, FanOuts())
    target = MarkovTargetWorker(CountingForwards(), laws)
    batch = Batch(1)
    request = Request(2, first_token=laws.prompt(2)[-1], epoch=epoch)
    admissions = batch.apply(Outcome.admission(-1, [request]))
    for worker in (draft, target):
        worker.begin_round(batch, admissions)
    rollout = draft.restart(batch, [0], Source.JIT)
    for _ in range(40):
        draft.launch_step([rollout])
        draft.collect_step([rollout])
    return rollout.tokens[0].tolist(), target._draws(
        Purpose.ACCEPT, target._histories.rows(batch)[0], 5
    )


def test_a_sequence_that_begins_again_draws_anew() -> None:
    """A request's next epoch knows what its last one drew: it has draws of its own."""
    assert first_draft(0) == first_draft(0)
    (tokens, coins), (others, other_coins) = first_draft(0), first_draft(1)
    assert tokens != others and not set(coins) & set(other_coins)
    assert first_draft(0, seed=7)[1] != coins
