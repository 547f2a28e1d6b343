"""Event streams as other servers frame them, and what `load` counts in them."""

import json
import random
from typing import Any, NamedTuple

import pytest

from mpissd.lab.load.command import Reply
from mpissd.lab.sse import EventStream, StreamEvent

SEED, NUM_STREAMS = 5, 300
NOISE = [":", ": ping", "other: 1", "Data: 2", " data: 3", "id: 7", "id", "retry: 10"]
WORDS = ["a", " b", "é", "日本", "\u2028", "\x85", "\r\n", "data: x", ":", "\ufeff", "😀", '"']
DAMAGED = ['{"error": {"message": "boom"}}', "{", "", '{"error": "x", "choices": []}']
# Of an incomplete event, which is dropped.
RESTS = [b"", b"data: ", b"data: [DONE]", b"data: [DONE]\n", b"data: x\n\xe2"]


class Stream(NamedTuple):
    """A response's bytes, in the pieces in which they arrive, and what they are: events, the number
    of those that bring a token, and whether they are an answer."""

    pieces: list[bytes]
    events: list[StreamEvent]
    num_tokens: int
    is_answered: bool


def chunk(delta: Any = None, **more: Any) -> dict[str, Any]:
    return {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]}


def token(draw: random.Random) -> dict[str, Any]:
    """Returns a chunk that brings one token, in one of the forms that servers use."""
    text = draw.choice(WORDS)
    logprobs = {"content": [{"token": text, "logprob": -1.0}]}
    deltas = [
        {"role": "assistant", "content": text, "refusal": None},
        {"content": None, "reasoning": text},
        {"reasoning_content": text},
        {"tool_calls": [{"index": 0, "function": {"arguments": text}}]},
    ]
    return draw.choice([*map(chunk, deltas), chunk({"content": ""}, logprobs=logprobs)])


def framed(draw: random.Random, event: StreamEvent) -> str:
    """Returns the lines of an event, with line ends, spaces, comments and fields at random."""
    space = draw.choice(["", " "])
    fields = [f"data:{' ' if line[:1] == ' ' else space}{line}" for line in event.data.split("\n")]
    fields += [("event:" + space + event.kind)] * (event.kind != "message")
    for line in draw.sample(NOISE, draw.choice([0, 0, 1, 3])):
        fields.insert(draw.randrange(len(fields) + 1), line)
    ends = draw.choice([["\n"], ["\r\n"], ["\r"], ["\n", "\r\n"]])
    empty = draw.choice(["", "", f": keep-alive{ends[0]}", ends[-1]])
    return empty + "".join(line + draw.choice(ends) for line in [*fields, ""])


def random_stream(number: int) -> Stream:
    draw = random.Random(f"{SEED} {number}")
    tokens = [token(draw) for _ in range(draw.randrange(6))]
    chunks: list[Any] = [chunk({"role": "assistant", "content": ""}), *tokens]
    for other in (chunk({}), {"choices": [], "usage": None}, chunk({"content": None})):
        if draw.random() < 0.3:
            chunks.insert(draw.randrange(len(chunks) + 1), other)
    has_finish, has_done, fault = draw.random() < 0.6, draw.random() < 0.6, draw.random()
    chunks += [chunk({}, finish_reason="stop")] * has_finish
    indent = draw.choice([None, None, 1])
    texts = [json.dumps(c, indent=indent, ensure_ascii=draw.random() < 0.5) for c in chunks]
    events = [StreamEvent(draw.choice(["message", "message", "chunk"]), text) for text in texts]
    if is_faulty := fault < 0.15:
        events.insert(draw.randrange(len(events) + 1), StreamEvent("message", draw.choice(DAMAGED)))
    events += [StreamEvent("message", "[DONE]")] * has_done
    text = draw.choice(["", "\ufeff"]) + "".join(framed(draw, event) for event in events)
    data = text.encode() + draw.choice(RESTS)
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice([0, 3, len(data)])))
    pieces = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]
    return Stream(pieces, events, len(tokens), not is_faulty and (has_finish or has_done))


def events_of(pieces: list[bytes]) -> list[StreamEvent]:
    stream = EventStream()
    return [event for piece in pieces for event in stream.push(piece)]


@pytest.mark.parametrize("number", range(NUM_STREAMS))
def test_a_stream_is_read_and_counted_however_it_arrives(number: int) -> None:
    stream, answer, is_sound = random_stream(number), Reply(), True
    assert events_of(stream.pieces) == stream.events
    data = b"".join(stream.pieces)
    assert events_of([data[n : n + 1] for n in range(len(data))]) == stream.events
    try:
        for now, event in enumerate(stream.events):
            answer.add(event, float(now))
    except (ValueError, AttributeError):
        is_sound = False
    assert (is_sound and answer.has_ended) == stream.is_answered
    assert answer.num_chunks == stream.num_tokens or not is_sound


def test_an_event_is_dispatched_by_the_standard() -> None:
    examples = {
        b"data\n\ndata\ndata\n\ndata:": ["", "\n"],  # the standard's own
        b"data:test\n\ndata: test\n\ndata:  x\n\n": ["test", "test", " x"],
        b"data: a\rdata: b\r\r": ["a\nb"],  # does not wait for bytes after CR
        b"event: x\n\ndata: \xff\n\n": ["\ufffd"],
    }
    for data, texts in examples.items():
        assert events_of([data]) == [StreamEvent("message", text) for text in texts]
