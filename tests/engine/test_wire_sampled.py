"""Messages of sampled jobs: q beside the tokens, whole rows in a message of their own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Outcome, Source, Speculation
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import LinkShape
from mpissd.engine.comm.wire import HEADER, Buffer, Kind

INT32 = st.integers(-(2**31), 2**31 - 1)
Rows = NDArray[np.float32]


@st.composite
def sampled(draw: st.DrawFn) -> Speculation:
    """Any tokens, probabilities and lengths; what lies behind num_draft may be anything."""
    count, lookahead = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    speculation = Speculation.empty(draw(st.integers(0, 99)), count, lookahead, sampled=True)
    rows = speculation.rows
    rows[:] = draw(arrays.arrays(np.int32, rows.shape, elements=INT32))
    lengths = st.integers(0, lookahead)
    speculation.num_draft[:] = draw(arrays.arrays(np.int32, count, elements=lengths))
    speculation.source[:], speculation.hit[:] = draw(st.sampled_from(Source)), 1
    chances = st.floats(0, 1, exclude_min=True) | st.sampled_from([1.0, 5e-324, 1 - 2.0**-53])
    q = draw(arrays.arrays(np.float64, (count, lookahead), elements=chances))
    drafted = np.arange(lookahead) < speculation.num_draft[:, None]
    speculation.q[drafted] = q[drafted]
    speculation.tokens[drafted] &= 2**31 - 2
    return speculation


def sent(speculation: Speculation) -> Buffer:
    buffer = Buffer(Kind.SPECULATION, 3, speculation.rows.size + 4)
    wire.write_speculation(buffer, speculation)
    return buffer


@given(sampled())
def test_probabilities_ride_with_the_tokens(speculation: Speculation) -> None:
    """All 64 bits of them: the verifier compares with what was sampled."""
    count, lookahead = speculation.tokens.shape
    buffer = sent(speculation)
    found = wire.read_speculation(buffer, speculation.round, count, lookahead, sampled=True)
    buffer.body[:] = -1  # the next message lands here: what was read is a copy
    assert found.rows.tobytes() == speculation.rows.tobytes()
    assert found.q.tobytes() == speculation.q.tobytes() and found.q.dtype == np.float64
    assert np.array_equal(found.tokens, speculation.tokens)
    certain = [
        sum(q == 1 for q in row[:n])
        for row, n in zip(found.q.tolist(), found.num_draft.tolist(), strict=True)
    ]
    assert found.num_proposals.tolist() == (found.num_draft - certain).tolist()


@given(sampled(), st.booleans())
def test_a_plan_carries_them_to_the_followers(speculation: Speculation, stop: bool) -> None:
    count, lookahead = speculation.tokens.shape
    outcome = Outcome(speculation.round - 1, np.zeros((count, Outcome.WIDTH), np.int32))
    buffer = Buffer(Kind.PLAN, 3, outcome.rows.size + speculation.rows.size)
    wire.write_plan(buffer, outcome, speculation, stop)
    told, found, stopped = wire.read_plan(buffer, speculation.round, lookahead, sampled=True)
    assert found.rows.tobytes() == speculation.rows.tobytes() and found.sampled
    assert (len(told.rows), stopped) == (count, stop)


def one(q: float, num_draft: int = 2) -> Speculation:
    speculation = Speculation.empty(6, 2, 3, sampled=True)
    speculation.rows[:, :3] = Source.JIT, 0, num_draft
    speculation.q[:] = 0.5
    speculation.q[1, 1] = q
    return speculation


@pytest.mark.parametrize("q", [0.0, -0.25, 1.0000001, np.nan, np.inf, -np.inf])
def test_what_is_no_probability_of_a_drawn_token_is_refused(q: float) -> None:
    with pytest.raises(ProtocolError, match=r"round 6: q \[.*\], allowed above 0 to 1"):
        wire.read_speculation(sent(one(q)), 6, 2, 3, sampled=True)
    found = wire.read_speculation(sent(one(q, num_draft=1)), 6, 2, 3, sampled=True)
    assert found.num_draft.tolist() == [1, 1]  # behind num_draft nothing is read


def test_a_speculation_without_probabilities_announces_no_rows() -> None:
    assert Speculation.empty(0, 3, 4).num_proposals.tolist() == [0, 0, 0]


def shape(batch: int = 2, lookahead: int = 3, vocab: int = 5) -> LinkShape:
    return LinkShape(1, batch, lookahead, vocab=vocab)


@given(
    arrays.arrays(
        np.float32,
        st.tuples(st.integers(0, 6), st.just(5)),
        elements=st.floats(0, 1024, width=32),
    )
)
def test_whole_rows_survive(rows: Rows) -> None:
    buffer = shape().proposals_buffer()
    buffer.body[:] = -1
    size = wire.write_proposals(buffer, 9, list(rows))
    assert size == HEADER + rows.size
    found = wire.read_proposals(buffer, 9, len(rows), 5)
    buffer.body[:] = -1
    assert found.dtype == np.float32 and found.tobytes() == rows.tobytes()


def proposals(*rows: list[float]) -> Buffer:
    buffer = shape().proposals_buffer()
    wire.write_proposals(buffer, 9, [np.array(row, np.float32) for row in rows])
    return buffer


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e-30])
def test_rows_that_hold_no_probability_are_refused(value: float) -> None:
    buffer = proposals([0.2] * 5, [0.2, 0.2, value, 0.2, 0.2])
    with pytest.raises(ProtocolError, match="round 9: PROPOSALS hold a number that is no prob"):
        wire.read_proposals(buffer, 9, 2, 5)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, 77, "version is 77"),
        (1, int(Kind.PLAN), f"kind is {int(Kind.PLAN)}, expected {int(Kind.PROPOSALS)}"),
        (2, 4, "group is 4, expected 1"),
        (3, 8, "round is 8, expected 9"),
        (4, 1, "PROPOSALS of 1 rows, expected 2"),
        (4, 3, "PROPOSALS of 3 rows, expected 2"),
        (4, -1, "count -1"),
        (5, 1 << 4, "flags 16"),
    ],
)
def test_rows_of_another_message_are_refused(field: int, value: int, message: str) -> None:
    buffer = proposals([0.2] * 5, [0.2] * 5)
    buffer.array[field] = value
    with pytest.raises(ProtocolError, match=message):
        wire.read_proposals(buffer, 9, 2, 5)


def test_more_rows_than_the_buffer_holds_are_refused() -> None:
    buffer = proposals([0.2] * 5)
    buffer.array[4] = 7
    with pytest.raises(ProtocolError, match="PROPOSALS of 7 rows of 5, the buffer holds 30"):
        wire.read_proposals(buffer, 9, 7, 5)


def test_buffers_hold_the_largest_message() -> None:
    full = shape(batch=3, lookahead=4, vocab=7)
    wire.write_speculation(full.speculation_buffer(), Speculation.empty(0, 3, 4, sampled=True))
    rows = [np.ones(7, np.float32)] * 12
    assert wire.write_proposals(full.proposals_buffer(), 0, rows) == HEADER + 84
