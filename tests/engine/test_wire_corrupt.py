"""Messages that were damaged on their way are refused: one line, both values, nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Event, Outcome, Request, Source, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import LinkShape
from mpissd.engine.comm.queue_link import queue_link
from mpissd.engine.comm.wire import HEADER, Buffer

BATCH, K, V, ROUND = 3, 4, 50, 7
SHAPE = LinkShape(2, BATCH, K, vocab=V, prompt_tokens=9)


@dataclass
class Message:
    """A message as it was sent, and how its receiver reads it."""

    buffer: Buffer
    size: int  # int32 in use
    read: Callable[[], object]


def speculation(seed: int) -> Speculation:
    rng = np.random.default_rng(seed)
    found = Speculation.empty(ROUND, BATCH, K, sampled=True)
    found.source[:], found.hit[:] = Source.JIT, 0
    found.num_draft[:] = rng.integers(1, K + 1, BATCH)
    found.tokens[:] = rng.integers(0, V, (BATCH, K))
    found.q[:] = rng.uniform(0.1, 1, (BATCH, K))
    return found


def outcome(seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    rows = np.zeros((BATCH, Outcome.WIDTH), np.int32)
    rows[:, 0], rows[:, 1] = np.arange(BATCH), rng.integers(0, 3, BATCH)
    rows[:, 2] = Event.COMMIT
    rows[:, 3], rows[:, 4] = rng.integers(0, K + 1, BATCH), rng.integers(0, V, BATCH)
    return Outcome(ROUND - 1, rows)


def sent_outcome(seed: int) -> Message:
    buffer, told = SHAPE.outcome_buffer(), outcome(seed)
    wire.write_outcome(buffer, told)
    size = HEADER + told.rows.size
    return Message(buffer, size, lambda: wire.read_outcome(buffer, ROUND - 1))


def spoken(buffer: Buffer, seed: int) -> Message:
    told = speculation(seed)
    wire.write_speculation(buffer, told)
    size = HEADER + told.rows.size
    return Message(
        buffer, size, lambda: wire.read_speculation(buffer, ROUND, BATCH, K, sampled=True)
    )


def sent_speculation(seed: int) -> Message:
    return spoken(SHAPE.speculation_buffer(), seed)


def sent_plan(seed: int) -> Message:
    buffer, told, drafted = SHAPE.plan_buffer(), outcome(seed), speculation(seed)
    wire.write_plan(buffer, told, drafted, False)
    size = HEADER + told.rows.size + drafted.rows.size
    return Message(buffer, size, lambda: wire.read_plan(buffer, ROUND, K, sampled=True))


def sent_proposals(seed: int) -> Message:
    buffer = SHAPE.proposals_buffer()
    rows = np.random.default_rng(seed).uniform(0, 1, (BATCH, V)).astype(np.float32)
    size = wire.write_proposals(buffer, ROUND, list(rows))
    return Message(buffer, size, lambda: wire.read_proposals(buffer, ROUND, BATCH, V))


def sent_prompts(seed: int) -> Message:
    buffer, told = SHAPE.prompt_buffer(), admission(seed)
    size = wire.write_prompts(buffer, told)
    bare = Outcome(told.round, told.rows)
    return Message(buffer, size, lambda: wire.read_prompts(buffer, bare))


def admission(seed: int) -> Outcome:
    """Goes on with one sequence, and admits two with prompts of 1 to 9 tokens."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, V, rng.integers(1, 10)).tolist() for _ in range(2)]
    admitted = Outcome.admission(
        0, [Request(n, text[-1], 1, tuple(text), 0.5, 0.9) for n, text in enumerate(texts)]
    )
    rows = np.concatenate([outcome(seed).rows[2:], admitted.rows])
    return Outcome(ROUND - 1, rows, admitted.prompts)


SENT = [sent_outcome, sent_speculation, sent_plan, sent_prompts, sent_proposals]
Send = Callable[[int], Message]
in_every_message = pytest.mark.parametrize("send", SENT, ids=lambda send: send.__name__[5:])


def names_two_values(error: ProtocolError) -> bool:
    """What was found, and what was expected or is allowed."""
    text = str(error)
    told = (" expected " in text, " allowed " in text, " the buffer holds " in text)
    return any(told) and text.startswith("round ") and "\n" not in text


def refused(message: Message) -> ProtocolError:
    with pytest.raises(ProtocolError) as error:
        message.read()
    assert names_two_values(error.value), str(error.value)
    return error.value


@in_every_message
def test_an_untouched_message_is_read(send: Send) -> None:
    send(0).read()


@in_every_message
def test_every_single_bit_of_the_header_counts(send: Send) -> None:
    for bit in range(32 * HEADER):
        message = send(bit)
        message.buffer.array.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
        refused(message)


@in_every_message
@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bits_are_refused(send: Send, data: st.DataObject) -> None:
    message = send(data.draw(st.integers(0, 99), "seed"))
    places = st.integers(0, 32 * message.size - 1)
    bits = data.draw(st.sets(places, min_size=1, max_size=3), "bits")
    for bit in bits:
        message.buffer.array.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
    refused(message)


@in_every_message
@settings(max_examples=40)
@given(data=st.data())
def test_truncated_messages_are_refused(send: Send, data: st.DataObject) -> None:
    """Behind what arrived lies an older message, or nothing."""
    message = send(1)
    kept = data.draw(st.integers(0, message.size - 1), "numbers that arrived")
    whole = message.buffer.array.copy()
    if data.draw(st.booleans(), "over an older message"):
        older = send(2).buffer
        older.write_header(int(older.array[3]) - 1, int(older.array[4]))
        older.seal(message.size - HEADER)
        message.buffer.array[kept:] = older.array[kept:]
    else:
        message.buffer.array[kept:] = 0
    if (message.buffer.array == whole).all():
        message.read()  # what was cut off was there already
    else:
        refused(message)


@in_every_message
@pytest.mark.parametrize("late", [-3, -1, 1, 2, 1000])
def test_another_round_is_named_with_the_expected_one(send: Send, late: int) -> None:
    message = send(3)
    told = int(message.buffer.array[3])
    message.buffer.write_header(told + late, int(message.buffer.array[4]))
    message.buffer.seal(message.size - HEADER)  # not damaged: sent by who is somewhere else
    assert f"round is {told + late}, expected {told}" in str(refused(message))


@in_every_message
def test_another_version_is_named_with_ours(send: Send) -> None:
    message = send(4)
    message.buffer.array[0] = 0x5D01
    assert f"version is {0x5D01}, expected {wire.VERSION}" in str(refused(message))


@in_every_message
@settings(max_examples=50)
@given(st.binary(min_size=0, max_size=400))
def test_whatever_arrives_is_a_protocol_error(send: Send, found: bytes) -> None:
    """Never a hang, a wrong cast or an IndexError."""
    message = send(5)
    message.buffer.array.view(np.uint8)[: len(found)] = 0
    room = message.buffer.array.view(np.uint8)[: len(found)]
    room[:] = np.frombuffer(found, np.uint8)[: len(room)]
    before = send(5).buffer.array
    if (message.buffer.array == before).all():
        message.read()
    else:
        refused(message)


@settings(max_examples=150)
@given(st.data())
def test_sealed_nonsense_is_refused_or_harmless(data: st.DataObject) -> None:
    """A peer with a defect, not a damaged message: what passes is within all limits."""
    message = data.draw(st.sampled_from(SENT[:4]), "message")(data.draw(st.integers(0, 9), "seed"))
    body = message.buffer.body
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        place = data.draw(st.integers(0, message.size - HEADER - 1), "place")
        body[place] = data.draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 60), "value")
    message.buffer.seal(message.size - HEADER)
    try:
        found = message.read()
    except ProtocolError as error:
        assert names_two_values(error), str(error)
        return
    parts = found if isinstance(found, tuple) else (found,)
    for part in parts:
        if isinstance(part, Outcome) and part.prompts:
            assert part.prompts.keys() == {(0, 1), (1, 1)}
            for request in part.prompts.values():
                assert request.temperature >= 0 and 0 < request.top_p <= 1
                assert all(0 <= token < V for token in request.prompt)
        if isinstance(part, Outcome):
            assert ((part.num_accepted >= 0) & (part.num_accepted <= K)).all()
            assert ((part.bonus >= 0) & (part.bonus < V)).all() and (part.ids >= 0).all()
        elif isinstance(part, Speculation):
            served = np.arange(K) < part.num_draft[:, None]
            assert ((part.num_draft >= 0) & (part.num_draft <= K)).all()
            assert ((part.tokens[served] >= 0) & (part.tokens[served] < V)).all()


def test_large_messages_are_checked_by_a_fold() -> None:
    """Distributions of a large vocabulary: any one bit counts there, too."""
    shape = LinkShape(0, 2, 4, vocab=30_011)
    rows = np.random.default_rng(0).uniform(0, 1, (8, 30_011)).astype(np.float32)
    buffer = shape.proposals_buffer()
    wire.write_proposals(buffer, ROUND, list(rows))
    assert (wire.read_proposals(buffer, ROUND, 8, 30_011) == rows).all()
    for place in (0, 1, 1024, 100_000, rows.size - 1):
        for bit in (0, 13, 30):
            buffer.body[place] ^= 1 << bit
            with pytest.raises(ProtocolError, match=r"checksum is 0x\w+, expected 0x"):
                wire.read_proposals(buffer, ROUND, 8, 30_011)
            buffer.body[place] ^= 1 << bit
    wire.check_proposals(buffer, ROUND, 8)


def test_a_damaged_message_ends_the_wait_for_it() -> None:
    """Over a link: the reader raises at once, it does not wait for a better one."""
    lead, draft = queue_link(SHAPE, Waiter(5.0, spin=False))
    lead._out.array[2] ^= 1  # the group of every message from here on
    lead.send_outcome(outcome(0))
    with pytest.raises(ProtocolError, match="group is 3, expected 2"):
        draft.outcome(ROUND - 1)
