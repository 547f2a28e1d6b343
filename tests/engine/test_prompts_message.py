"""The PROMPT message: what the lead read reaches every rank, and nothing else passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Event, Outcome, Request
from mpissd.common.wait import Waiter
from mpissd.engine.comm import wire
from mpissd.engine.comm.link import LinkShape
from mpissd.engine.comm.queue_link import queue_link
from mpissd.engine.workload.sequence import Batch

V, BATCH, MOST = 50, 3, 12
SHAPE = LinkShape(1, BATCH, 4, num_tokens=V, prompt_tokens=MOST)
WAITER = Waiter(5.0, spin=False)

REQUESTS = st.builds(
    lambda id_, epoch, prompt, temperature, top_p: Request(
        id_, prompt[-1], epoch, tuple(prompt), temperature, top_p
    ),
    st.integers(0, 9),
    st.integers(0, 3),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=MOST),
    st.floats(0, 100),
    st.floats(0, 1, exclude_min=True),
)


@given(st.lists(REQUESTS, max_size=BATCH, unique_by=lambda r: (r.request_id, r.epoch)))
def test_every_draft_hears_the_prompts_as_they_are(requests: list[Request]) -> None:
    lead, draft = queue_link(SHAPE, WAITER)
    for round_ in (-1, 0):  # the buffers are used again
        told = Outcome.admission(round_, requests)
        lead.send_outcome(told)
        found, stop = draft.outcome(round_)
        assert not stop and list(found.prompts.values()) == requests
        batches = [Batch(BATCH), Batch(BATCH)]
        admitted = [batch.apply(one) for batch, one in zip(batches, (told, found), strict=True)]
        for change in admitted:
            assert [one.request for one in change.started] == requests
        assert batches[0].digest == batches[1].digest
    assert lead.num_messages == (4 if requests else 2)


def test_the_digest_of_a_batch_covers_the_prompts() -> None:
    """Ranks that heard other prompts of the same last token do not agree."""
    batches = []
    for first in (1, 2):
        batches.append(Batch(1))
        batches[-1].apply(Outcome.admission(-1, [Request(0, 7, 0, (first, 7))]))
    assert batches[0].digest != batches[1].digest


def test_rounds_without_admissions_send_none() -> None:
    lead, draft = queue_link(SHAPE, WAITER)
    for round_ in range(3):
        rows = np.array([[4, 0, Event.COMMIT, 2, 3], [5, 0, Event.RELEASE, 0, 0]], np.int32)
        lead.send_outcome(Outcome(round_, rows))
        assert not draft.outcome(round_)[0].prompts
    assert lead.num_messages == 3


def written(request: Request) -> tuple[wire.Buffer, Outcome]:
    buffer, told = SHAPE.prompt_buffer(), Outcome.admission(6, [request])
    wire.write_prompts(buffer, told)
    return buffer, Outcome(6, told.rows)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, 7, 0, (V, 7)), "prompt tokens 7..50, allowed 0..49"),
        (Request(0, 7, 0, (-1, 7)), "prompt tokens -1..7, allowed 0..49"),
        (Request(0, 7, 0, (7, 8)), "a prompt that ends in 8, expected 7"),
        (Request(0, 7, 0, (7,), -0.5), "temperature -0.5, top_p 1, allowed 0 or more"),
        (Request(0, 7, 0, (7,), float("nan")), "temperature nan, .* allowed 0 or more"),
        (Request(0, 7, 0, (7,), 1.0, 0.0), "top_p 0, allowed .* above 0 to 1"),
        (Request(0, 7, 0, (7,), 1.0, 1.5), "top_p 1.5, allowed .* above 0 to 1"),
    ],
)
def test_sealed_prompts_that_cannot_be_are_refused(request_: Request, message: str) -> None:
    buffer, told = written(request_)
    with pytest.raises(ProtocolError, match=f"^round 6: malformed PROMPT: .*{message}"):
        wire.read_prompts(buffer, told)


@pytest.mark.parametrize("size", [0, -1, 10**6, 2**31 - 1])
def test_a_length_beyond_the_buffer_is_refused(size: int) -> None:
    buffer, told = written(Request(0, 7, 0, (3, 7)))
    buffer.body[0] = size
    buffer.seal(7)
    with pytest.raises(ProtocolError, match=f"a prompt of {size} tokens at 0, the buffer holds"):
        wire.read_prompts(buffer, told)


def test_prompts_of_another_number_of_sequences_are_refused() -> None:
    buffer, _ = written(Request(0, 7, 0, (3, 7)))
    told = Outcome.admission(6, [Request(0, 7), Request(1, 7)])
    with pytest.raises(ProtocolError, match="malformed PROMPT: 1 prompts, expected 2"):
        wire.read_prompts(buffer, told)


def test_the_longest_prompts_fit() -> None:
    full = [Request(n, 1, 0, (1,) * MOST) for n in range(BATCH)]
    buffer = SHAPE.prompt_buffer()
    assert wire.write_prompts(buffer, Outcome.admission(0, full)) == len(buffer.array)
