"""The price of the tokens that a draft on the lead's own device stores."""

from __future__ import annotations

import pytest

from mpissd.engine.decode.row_times import RowTimes
from mpissd.engine.decode.storing import StoredPrice

TOKEN_S = 0.001


@pytest.fixture
def price() -> StoredPrice:
    times = RowTimes()
    times.add(1, 0.01)
    times.caught_up(16, 16 * TOKEN_S, 1, 0.002)
    return StoredPrice(times)


def test_a_prompt_is_spread_over_its_answer(price: StoredPrice) -> None:
    assert price.seconds(4, 0) == 0  # no request is over: nothing is known
    price.ended(60, 20)
    assert price.seconds(4, 0) == pytest.approx(3 * TOKEN_S)


def test_what_live_sequences_lack_is_spread_over_what_they_emit_yet(price: StoredPrice) -> None:
    price.ended(60, 20)  # met at any time, an answer of 20 tokens has 10 to come
    assert price.seconds(4, 400) == pytest.approx(10 * TOKEN_S)
    assert price.seconds(4, 100) == pytest.approx(3 * TOKEN_S)  # less than prompts take


def test_requests_that_got_nothing_set_no_price(price: StoredPrice) -> None:
    """One that its client cancelled in the queue stored nothing, however long its prompt is."""
    price.ended(60, 20)
    for _ in range(100):
        price.ended(10_000, 0)
    assert price.seconds(4, 0) == pytest.approx(3 * TOKEN_S)


def test_earlier_requests_are_forgotten(price: StoredPrice) -> None:
    for _ in range(2000):
        price.ended(600, 20)
    for _ in range(2000):
        price.ended(20, 20)
    assert price.seconds(4, 0) == pytest.approx(TOKEN_S, rel=0.05)


def test_one_sequence_alone_is_ready_at_once_and_more_wait_in_turn(price: StoredPrice) -> None:
    price.ended(60, 20)
    assert price.ready(1, 400) == price.ready(4, 0) == 1
    assert 0 < price.ready(4, 400) < price.ready(4, 100) < 1
