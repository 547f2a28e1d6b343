"""Messages: fields are unpacked as they were packed, and bad messages are refused in one line. The
batch that every rank keeps by applying the same outcomes: rows, tokens and places."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import ProtocolError
from mpissd.common.rng import Purpose
from mpissd.common.rounds import (
    MOST_GRAMMAR,
    MOST_SAMPLING,
    Control,
    Event,
    Ints,
    Outcome,
    Request,
    Sampling,
    Source,
    Speculation,
)
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import queue_link
from mpissd.engine.comm.wire import HEADER, Header, Kind, LinkShape, Message
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.model.transformer.cache import CacheSizes, PageTable, RowPlaces
from mpissd.engine.oracle.markov import MarkovDraft, MarkovLaws, MarkovModel, MarkovTarget
from mpissd.engine.round.rows import DraftWorker
from mpissd.engine.round.sequence import Batch, Placement
from mpissd.serve.fields import MOST_BIASES, MOST_TOP
from tests.loop.harness import CountingForwards

BATCH, K, V, ROUND, MOST_PROMPT = 3, 4, 50, 7, 9
SHAPE = LinkShape(2, BATCH, K, vocab=V, prompt_tokens=MOST_PROMPT)
WAITER = Waiter(5.0, spin=False)
CONTROLS = (Control(), Control(2, 0, 300), Control(0, 5))


def speculation(seed: int, shape: LinkShape = SHAPE, count: int = BATCH) -> Speculation:
    """Any tokens and lengths; numbers after num_draft may have any value."""
    rng = np.random.default_rng(seed)
    made = Speculation.empty(ROUND, count, K, sampled=shape.sampled)
    made.rows[:, Speculation.HEAD :] = rng.integers(-(2**31), 2**31, made.rows[:, 3:].shape)
    made.source[:], made.hit[:] = Source.JIT, rng.integers(0, 2, count)
    made.num_draft[:] = rng.integers(0, K + 1, count)
    drafted = np.arange(K) < made.num_draft[:, None]
    made.tokens[drafted] = rng.integers(0, V, int(drafted.sum()))
    if shape.sampled:
        made.q[drafted] = 1 - rng.uniform(0, 1, int(drafted.sum()))
    made.version = seed
    return made


def outcome(seed: int) -> Outcome:
    """b sequences that go on."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((BATCH, Outcome.WIDTH), np.int32)
    rows[:, 0], rows[:, 1] = np.arange(BATCH), rng.integers(0, 3, BATCH)
    rows[:, 3], rows[:, 4] = rng.integers(0, K + 1, BATCH), rng.integers(0, V, BATCH)
    return Outcome(ROUND - 1, rows, control=CONTROLS[seed % len(CONTROLS)])


def admission(seed: int) -> Outcome:
    """Goes on with one sequence, and admits two with prompts of 1 to 9 tokens."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, V, rng.integers(1, 10)).tolist() for _ in range(2)]
    told = Sampling(
        *(0.1 + 0.2, 1 / 3, int(rng.integers(0, 2**63)) * 2 + 1, 0, ((7, -1e-300), (8, 5e-324))),
        *(float(rng.normal()), 2.5, '{"é": "\\n"}\n', 3),
    )
    requests = [
        Request(n, text[-1], 1, tuple(text), sampling, n)
        for n, (text, sampling) in enumerate(zip(texts, (Sampling(), told), strict=True))
    ]
    admitted = Outcome.admission(0, requests)
    rows = np.concatenate([outcome(seed).rows[2:], admitted.rows])
    return Outcome(ROUND - 1, rows, admitted.prompts)


@dataclass
class Sent:
    """A message as it was sent, and how its receiver reads it."""

    message: Message
    size: int  # int32 in use
    read: Callable[[], Any]


def sent_outcome(seed: int) -> Sent:
    message, made = Message(Kind.OUTCOME, SHAPE), outcome(seed)
    wire.write_outcome(message, made, stop=seed % 2 == 1)
    return Sent(message, HEADER + made.rows.size, lambda: wire.read_outcome(message, ROUND - 1))


def sent_speculation(seed: int) -> Sent:
    message, made = Message(Kind.SPECULATION, SHAPE), speculation(seed)
    wire.write_speculation(message, made)
    size = HEADER + made.rows.size
    return Sent(message, size, lambda: wire.read_speculation(message, ROUND, BATCH))


def sent_plan(seed: int) -> Sent:
    message, parts = Message(Kind.PLAN, SHAPE), (outcome(seed), speculation(seed))
    wire.write_outcome(message, parts[0], seed % 2 == 1, parts[1])
    size = HEADER + sum(part.rows.size for part in parts)
    return Sent(message, size, lambda: wire.read_plan(message, ROUND))


def distributions(seed: int) -> list[Any]:
    return [*np.random.default_rng(seed).uniform(0, 1, (BATCH, V)).astype(np.float32)]


def sent_proposals(seed: int) -> Sent:
    message = Message(Kind.PROPOSALS, SHAPE)
    size = wire.write_proposals(message, ROUND, distributions(seed))
    return Sent(message, size, lambda: wire.read_proposals(message, ROUND, BATCH))


def sent_prompts(seed: int) -> Sent:
    message, made = Message(Kind.PROMPT, SHAPE), admission(seed)
    size = wire.write_prompts(message, made)
    bare = Outcome(made.round, made.rows)
    return Sent(message, size, lambda: wire.read_prompts(message, bare))


SENT = [sent_outcome, sent_speculation, sent_plan, sent_prompts, sent_proposals]
Send = Callable[[int], Sent]
in_every_message = pytest.mark.parametrize("send", SENT, ids=lambda send: send.__name__[5:])


@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_read(seed: int) -> None:
    sent = [send(seed) for send in SENT]
    read = [one.read() for one in sent]
    for one in sent:
        one.message.array[:] = -1  # the next message reuses it: read() copies
    (told, stop), drafted, plan, prompts, rows = read
    wanted, answer = outcome(seed), speculation(seed)
    for found in (told, plan[0]):
        assert (found.round, found.control) == (ROUND - 1, wanted.control)
        assert found.rows.tobytes() == wanted.rows.tobytes() and found.rows.dtype == np.int32
    for found in (drafted, plan[1]):
        assert found.round == ROUND and found.rows.tobytes() == answer.rows.tobytes()
        assert found.q.tobytes() == answer.q.tobytes() and found.q.dtype == np.float64
    assert stop == plan[2] == (seed % 2 == 1) and drafted.version == seed
    assert prompts.prompts == admission(seed).prompts
    assert rows.tobytes() == np.array(distributions(seed)).tobytes()


def change(message: Message, **fields: int) -> None:
    """Changes fields of a message's header."""
    header = Header._make(wire._HEADER.unpack_from(message._bytes))
    wire._HEADER.pack_into(message._bytes, 0, *header._replace(**fields))


def refused(sent: Sent) -> str:
    """The refusal, in one line that has the round and two values."""
    with pytest.raises(ProtocolError) as error:
        sent.read()
    text = str(error.value)
    assert " expected " in text or " allowed " in text
    assert text.startswith("round ") and "\n" not in text
    return text


@in_every_message
def test_every_single_bit_of_the_header_counts(send: Send) -> None:
    for bit in range(32 * HEADER):
        sent = send(bit)
        sent.message.array.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
        refused(sent)


@in_every_message
@settings(max_examples=100)
@given(data=st.data())
def test_any_damage_is_refused(send: Send, data: st.DataObject) -> None:
    """A few flipped bits, any bytes at its start, and a message that is cut, with nothing or the
    rest of an older one behind: each is a ProtocolError, and never a hang or an IndexError."""
    sent = send(data.draw(st.integers(0, 99), "seed"))
    size, array = sent.size, sent.message.array
    before, how = array.copy(), data.draw(st.sampled_from(["bits", "bytes", "cut", "older"]))
    if how == "bits":
        places = st.integers(0, 32 * size - 1)
        for bit in data.draw(st.sets(places, min_size=1, max_size=3), "bits"):
            array.view(np.uint32)[bit // 32] ^= np.uint32(1 << bit % 32)
    elif how == "bytes":
        found = np.frombuffer(data.draw(st.binary(max_size=400)), np.uint8)
        room = array.view(np.uint8)[: len(found)]
        room[:] = found[: len(room)]
    else:
        kept, older = data.draw(st.integers(0, size - 1), "numbers that arrived"), send(2)
        change(older.message, round=ROUND - 2)
        array[kept:] = older.message.array[kept:] if how == "older" else 0
    if (array[:size] != before[:size]).any():
        refused(sent)


@pytest.mark.parametrize(
    "packed",
    [
        b"", b"[]", b"7", b"{", b"[" * 10**5, b'{"colour": 1}', b'{"temperature": "hot"}',
        b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"temperature": true}',
        b'{"seed": -1}', b'{"seed": 1.5}', b'{"seed": 18446744073709551616}', b'{"lookahead": -1}',
        b'{"logprobs": null}', b'{"logit_bias": [[1]]}', b'{"logit_bias": [[-1, 2.0]]}',
        b'{"logit_bias": {"7": 1}}', b'{"grammar": ["x"]}', b'{"grammar": "\\ud800"}',
    ],
)  # fmt: skip
def test_what_is_no_sampling_is_refused(packed: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the checksum is right: a draft's client is not trusted."""
    monkeypatch.setattr(json, "dumps", lambda *_, **told: packed.decode("latin-1"))
    refused(sent_prompts(3))


@settings(max_examples=60)
@given(numbers=st.lists(st.integers(-3, 9) | st.integers(-(2**31), 2**31 - 1), max_size=20))
def test_prompts_of_any_numbers_are_refused(numbers: list[int]) -> None:
    message, made = Message(Kind.PROMPT, SHAPE), admission(0)
    message.write(made.round, len(made.fresh), [np.array(numbers, np.int32)])
    refused(Sent(message, 0, lambda: wire.read_prompts(message, Outcome(made.round, made.rows))))


def test_the_largest_sampling_fits_its_message() -> None:
    biases = tuple((10**9 - 1 - n, -1.2345678901234567e-101) for n in range(MOST_BIASES))
    told = Sampling(*(1e-300 / 3, 1e-300 / 7, 2**64 - 1, MOST_TOP, biases), 1 / 3, 2 / 3)
    told = replace(told, grammar='"' * MOST_GRAMMAR, lookahead=256, top_k=10**6, min_p=1 / 3)
    stops = tuple(range(10**6, 10**6 + 64))
    told = replace(told, repetition_penalty=4 / 3, stop_ids=stops, min_tokens=10**6)
    packed = json.dumps(told.to_dict(), ensure_ascii=False)
    assert len(packed.encode()) + 3 <= MOST_SAMPLING
    assert Sampling.from_dict(json.loads(packed)) == told


def test_large_messages_are_checked_by_a_fold() -> None:
    """Distributions of a large vocabulary: any one bit counts there, too."""
    message = Message(Kind.PROPOSALS, LinkShape(0, 2, 4, vocab=30_011))
    rows = np.random.default_rng(0).uniform(0, 1, (8, 30_011)).astype(np.float32)
    wire.write_proposals(message, ROUND, list(rows))
    assert (wire.read_proposals(message, ROUND, 8) == rows).all()
    for place in (0, 1, 1024, 100_000, rows.size - 1):
        for bit in (0, 13, 30):
            message.array[HEADER + place] ^= 1 << bit
            with pytest.raises(ProtocolError, match=r"checksum is 0x\w+, expected 0x"):
                wire.read_proposals(message, ROUND, 8)
            message.array[HEADER + place] ^= 1 << bit


def test_every_draft_receives_the_prompts_as_they_are() -> None:
    lead, draft = queue_link(SHAPE, WAITER)
    requests = [Request(n, n, n, (5, n), Sampling(0.5 * n)) for n in range(BATCH)]
    for round_ in (-1, 0):  # the memory is used again
        told = Outcome.admission(round_, requests)
        lead.send_outcome(told)
        found, stop = draft.outcome(round_)
        assert not stop and list(found.prompts.values()) == requests
        batches = [Batch(BATCH), Batch(BATCH)]
        for batch, one in zip(batches, (told, found), strict=True):
            batch.apply(one)
            assert [sequence.request for sequence in batch.sequences] == requests
        assert batches[0].digest == batches[1].digest
    rows: Ints = np.array([[4, 0, Event.COMMIT, 2, 3], [5, 0, Event.RELEASE, 0, 0]], np.int32)
    lead.send_outcome(Outcome(1, rows))  # admits nothing: no prompts follow
    assert not draft.outcome(1)[0].prompts
    assert lead.num_messages == 5
    other = Batch(BATCH)
    other.apply(Outcome.admission(0, [Request(n, n, n, (6, n)) for n in range(BATCH)]))
    assert other.digest != batches[0].digest  # it covers the prompts


def test_a_damaged_message_ends_the_wait_for_it() -> None:
    """Over a link: the reader raises at once, and does not wait for another message."""
    lead, draft = queue_link(SHAPE, WAITER)
    lead._outcomes.message._same = wire.VERSION, 1, 3
    lead.send_outcome(outcome(0))
    with pytest.raises(ProtocolError, match="group is 3, expected 2"):
        draft.outcome(ROUND - 1)


Row = tuple[int, int, int, int, int]  # id, epoch, event, k, t*
COMMIT, ADMIT, RELEASE = Event.COMMIT, Event.ADMIT, Event.RELEASE


def outcome_of(round_: int, *rows: Row) -> Outcome:
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
        batch.apply(outcome_of(8, *rows))
    assert not any(batch.apply(outcome_of(8, (1, 0, COMMIT, 3, 5), (2, 0, COMMIT, 0, 6))))
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
        branches = draft.oracle.restart(batch, [0], Source.JIT)
        for _ in range(40):
            draft.launch_step(batch, [branches])
            draft.collect_step([branches])
        coins = MarkovTarget(laws)._draws(Purpose.ACCEPT, batch.sequences[0], 5)
        return branches.tokens[0].tolist(), coins

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
        batch.apply(outcome_of(round_, (0, 0, COMMIT, 1, 3), (1, 0, COMMIT, 0, 3)))
    assert seen == [[100, 100], [102, 101], [104, 102], [100, 103], [102, 104]]


def test_branches_after_a_short_trunk_stay_within_its_pages() -> None:
    """A backup served one of K = 2 tokens and the trunk ends with a page; imposed tokens grow K + 1
    rows."""
    sizes = CacheSizes(1, 1, 16, slots=1, capacity=64, page=16, lanes=3, steps=2)
    pages = PageTable(RowPlaces(lambda count: np.zeros(count, np.int32), 16, sizes), sizes)
    batch = placed(Request(0, 7, 0, tuple(range(15))))
    pages.place(batch.store(batch.gaps(range(1))))
    pages.place(batch.trunk(np.array([1], np.int32)))
    assert pages.held == [1] and batch.filled[0] == 16
    nodes = np.arange(3, dtype=np.int32)
    zeros = np.zeros(3, np.int32)
    branches = batch.grown_ahead(np.zeros(3, np.int64), nodes, zeros, zeros, zeros[:, None])
    assert branches.places.starts.tolist() == [15, 16, 16]  # the third can never hit
    pages.place(batch.step(branches.places, 0))
    assert pages.held == [1]
