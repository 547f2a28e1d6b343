"""Messages: what is packed comes out, and what does not fit is refused with both values."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Event, Ints, Outcome, Source, Speculation
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import LinkShape
from mpissd.engine.comm.wire import Buffer, Kind

MARGIN = 4  # rows of room that a message leaves, full of an older message's numbers
INT32 = st.integers(-(2**31), 2**31 - 1)
Rounds = st.integers(-1, 2**31 - 1)


@st.composite
def outcomes(draw: st.DrawFn) -> Outcome:
    count = draw(st.integers(0, 5))
    rows = draw(arrays.arrays(np.int32, (count, Outcome.WIDTH), elements=INT32))
    rows[:] = possible(rows)
    for row in rows:
        row[2] = draw(st.sampled_from(Event))
    return Outcome(draw(Rounds), rows)


@st.composite
def speculation_rows(draw: st.DrawFn, count: int, lookahead: int) -> Ints:
    shape = (count, Speculation.HEAD + lookahead)
    rows: Ints = draw(arrays.arrays(np.int32, shape, elements=INT32))
    for row in rows:
        row[:2] = draw(st.sampled_from(Source)), draw(st.integers(0, 1))
        row[2] = draw(st.integers(0, lookahead))
        drafted = row[3 : 3 + row[2]]  # what lies behind num_draft may be anything
        drafted[:] = possible(drafted)
    return rows


def possible(numbers: Ints) -> Ints:
    """Not negative, and below the largest V."""
    return np.minimum(numbers & wire.MOST, wire.MOST - 1)


@st.composite
def speculations(draw: st.DrawFn) -> Speculation:
    rows = draw(speculation_rows(draw(st.integers(0, 5)), draw(st.integers(0, 7))))
    return Speculation(draw(Rounds), rows)


def used(kind: Kind, size: int) -> Buffer:
    """A buffer with room to spare whose last message was longer."""
    buffer = Buffer(kind, 3, size + MARGIN)
    buffer.body[:] = -9
    return buffer


@given(outcomes(), st.booleans())
def test_an_outcome_survives(outcome: Outcome, stop: bool) -> None:
    buffer = used(Kind.OUTCOME, outcome.rows.size)
    wire.write_outcome(buffer, outcome, stop)
    found, stopped = wire.read_outcome(buffer)
    buffer.body[:] = -1  # the next message lands here: what was read is a copy
    assert (found.round, stopped) == (outcome.round, stop)
    assert found.rows.dtype == np.int32 and np.array_equal(found.rows, outcome.rows)


@given(speculations())
def test_a_speculation_survives(speculation: Speculation) -> None:
    count, width = speculation.rows.shape
    buffer = used(Kind.SPECULATION, speculation.rows.size)
    wire.write_speculation(buffer, speculation)
    lookahead = width - Speculation.HEAD
    found = wire.read_speculation(buffer, speculation.round, count, lookahead)
    buffer.body[:] = -1
    assert np.array_equal(found.rows, speculation.rows)


@given(outcomes(), st.data(), st.integers(0, 5), st.booleans())
def test_a_plan_survives(outcome: Outcome, data: st.DataObject, lookahead: int, stop: bool) -> None:
    rows = data.draw(speculation_rows(outcome.num_live, lookahead))
    speculation = Speculation(outcome.round + 1, rows)
    buffer = used(Kind.PLAN, outcome.rows.size + rows.size)
    wire.write_plan(buffer, outcome, speculation, stop)
    told, plan, stopped = wire.read_plan(buffer, outcome.round + 1, lookahead)
    buffer.body[:] = -1
    assert np.array_equal(told.rows, outcome.rows) and np.array_equal(plan.rows, rows)
    assert (told.round, plan.round, stopped) == (outcome.round, outcome.round + 1, stop)


def sent(round_: int = 6, count: int = 2, lookahead: int = 3) -> Buffer:
    buffer = Buffer(Kind.SPECULATION, 1, count * (Speculation.HEAD + lookahead))
    wire.write_speculation(buffer, Speculation.empty(round_, count, lookahead))
    return buffer


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (0, 77, f"version is 77, expected {wire.VERSION}"),
        (1, int(Kind.PLAN), f"kind is {int(Kind.PLAN)}, expected {int(Kind.SPECULATION)}"),
        (2, 9, "group is 9, expected 1"),
        (3, 5, "round is 5, expected 6"),
        (3, 7, "round is 7, expected 6"),
        (4, -1, "count -1"),
        (4, 10**6, "count 1000000"),
        (4, 1, "of 1 sequences, expected 2"),
        (4, 3, "of 3 sequences, expected 2"),
        (5, 2, "flags 2"),
        (5, -1, "flags -1"),
    ],
)
def test_a_header_that_does_not_fit_names_both_values(field: int, value: int, message: str) -> None:
    buffer = sent()
    buffer.array[field] = value
    with pytest.raises(ProtocolError, match=message):
        wire.read_speculation(buffer, 6, 2, 3)


@pytest.mark.parametrize("num_draft", [-1, 4, 2**31 - 1])
def test_more_or_less_drafted_than_can_be_is_refused(num_draft: int) -> None:
    buffer = sent()
    buffer.body[Speculation.HEAD + 3 + 2] = num_draft  # of the second row
    buffer.seal(12)
    message = rf"round 6: num_draft \[0, {num_draft}\], allowed 0..3"
    with pytest.raises(ProtocolError, match=message):
        wire.read_speculation(buffer, 6, 2, 3)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, -1, "id is -1, allowed 0..2147483647"),
        (1, -7, "epoch is -7, allowed 0..2147483647"),
        (2, 5, "event is 5, allowed 0..4"),
        (2, -1, "event is -1, allowed 0..4"),
        (3, -1, "num_accepted is -1, allowed 0..6"),
        (3, 7, "num_accepted is 7, allowed 0..6"),
        (4, 32, "bonus is 32, allowed 0..31"),
        (4, -2, "bonus is -2, allowed 0..31"),
    ],
)
@pytest.mark.parametrize("kind", [Kind.OUTCOME, Kind.PLAN])
def test_a_malformed_outcome_is_refused(kind: Kind, column: int, value: int, message: str) -> None:
    rows = np.zeros((2, Outcome.WIDTH), np.int32)
    rows[1, column] = value
    buffer, outcome = Buffer(kind, 0, 30, lookahead=6, vocab=32), Outcome(4, rows)
    with pytest.raises(ProtocolError, match=f"round 4: malformed outcome row 1: {message}"):
        if kind == Kind.PLAN:
            wire.write_plan(buffer, outcome, Speculation.empty(5, outcome.num_live, 0), False)
            wire.read_plan(buffer, 5, 0)
        else:
            wire.write_outcome(buffer, outcome)
            wire.read_outcome(buffer)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 4, "source is 4, allowed 0..3"),
        (0, -1, "source is -1, allowed 0..3"),
        (1, 2, "hit is 2, allowed 0..1"),
        (3, 32, "token 1 is 32, allowed 0..31"),
        (4, -1, "token 2 is -1, allowed 0..31"),
        (5, 99, None),  # behind num_draft
    ],
)
@pytest.mark.parametrize("kind", [Kind.SPECULATION, Kind.PLAN])
def test_a_malformed_speculation_is_refused(
    kind: Kind, column: int, value: int, message: str | None
) -> None:
    speculation = Speculation.empty(6, 2, 3)
    speculation.rows[1, 2], speculation.rows[1, column] = 2, value
    buffer = Buffer(kind, 0, 30, lookahead=3, vocab=32)
    refused = f"round 6: malformed {kind.name} row 1: {message}"
    with nullcontext() if message is None else pytest.raises(ProtocolError, match=refused):
        if kind == Kind.PLAN:
            outcome = Outcome(5, np.zeros((2, Outcome.WIDTH), np.int32))
            wire.write_plan(buffer, outcome, speculation, False)
            wire.read_plan(buffer, 6, 3)
        else:
            wire.write_speculation(buffer, speculation)
            wire.read_speculation(buffer, 6, 2, 3)


def test_a_count_that_the_buffer_cannot_hold_is_refused() -> None:
    buffer = Buffer(Kind.OUTCOME, 0, 2 * Outcome.WIDTH)
    wire.write_outcome(buffer, Outcome(1, np.zeros((2, Outcome.WIDTH), np.int32)))
    buffer.array[4] = 3
    with pytest.raises(ProtocolError, match="OUTCOME of 3 rows of 5, the buffer holds 10"):
        wire.read_outcome(buffer)


def test_a_plan_is_of_the_round_after_its_outcome() -> None:
    buffer = Buffer(Kind.PLAN, 0, 10)
    wire.write_plan(buffer, Outcome.admission(3, []), Speculation.empty(4, 0, 0), False)
    assert wire.read_plan(buffer, 4, 0)[0].round == 3
    with pytest.raises(ProtocolError, match="round is 3, expected 4"):
        wire.read_plan(buffer, 5, 0)


def test_messages_of_one_sequence_leave_at_once() -> None:
    """An Isend completes at once up to 256 B on Open MPI."""
    shape = LinkShape(0, 1, 12)
    buffers = shape.outcome_buffer(), shape.speculation_buffer(), shape.plan_buffer()
    assert [buffer.kind for buffer in buffers] == [Kind.OUTCOME, Kind.SPECULATION, Kind.PLAN]
    assert max(buffer.array.nbytes for buffer in buffers) <= 256


def test_a_full_change_of_the_batch_fits_its_buffers() -> None:
    """All b sequences leave and b others come in one outcome."""
    batch, lookahead = 3, 5
    shape = LinkShape(0, batch, lookahead)
    rows = np.zeros((2 * batch, Outcome.WIDTH), np.int32)
    rows[:batch, 2], rows[batch:, 2] = Event.RELEASE, Event.ADMIT
    outcome, plan = Outcome(0, rows), shape.plan_buffer()
    wire.write_outcome(shape.outcome_buffer(), outcome)
    wire.write_plan(plan, outcome, Speculation.empty(1, batch, lookahead), False)
    assert len(wire.read_plan(plan, 1, lookahead)[1].rows) == batch
