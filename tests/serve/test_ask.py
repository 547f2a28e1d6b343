"""Bodies of any JSON: each is a request with sound values, or is refused with 400."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.lead import Problem
from mpissd.serve.requests import Ask, parse
from tests.serve.rig import tokenizer

NAMES = (
    "model prompt messages max_tokens max_completion_tokens stream stream_options temperature "
    "top_p seed stop deadline_s user n presence_penalty frequency_penalty logit_bias logprobs "
    "top_logprobs response_format tools store best_of echo suffix role content type text other"
).split()
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["user", "assistant", "text", "x", ""]),
    st.text(max_size=4),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return tokenizer(tmp_path_factory.mktemp("words"))


def is_sound(ask: Ask) -> bool:
    ranges = [
        ask.max_tokens is None or ask.max_tokens >= 1,
        ask.temperature is None or 0 <= ask.temperature <= 2,
        0 < ask.top_p <= 1,
        ask.seed is None or 0 <= ask.seed < 2**63,
        ask.deadline_s is None or 0 < ask.deadline_s <= 86400,
        all(isinstance(stop, str) and stop for stop in ask.stop),
    ]
    return all(ranges)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=6), st.booleans())
@example({"prompt": [0.5]}, False)
@example({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, True)
@example({"prompt": "x", "stop": ["\ud800"]}, False)
@example({"prompt": [2**70]}, False)
def test_a_request_is_sound_or_refused(words: Tokenizer, body: dict[str, Any], chat: bool) -> None:
    try:
        ask = parse(json.dumps(body).encode(), is_chat=chat)
        assert is_sound(ask)
        tokens = ask.encode(words)
        assert tokens and all(0 <= token < words.vocab_size for token in tokens)
    except Problem as problem:
        assert problem.status == 400 and problem.message
        json.dumps(problem.to_dict()).encode()


@given(st.binary(max_size=60))
@example(b"\xef\xbb\xbf{}")
@example(b'{"prompt": 1e999}')
@example(b'{"\\ud800": 1}')
def test_bytes_are_no_request(body: bytes) -> None:
    with pytest.raises(Problem) as refused:
        parse(body, is_chat=False)
    assert refused.value.status == 400
    json.dumps(refused.value.to_dict()).encode()


def test_a_null_is_as_if_it_were_not_there() -> None:
    named = "model max_tokens stream stream_options temperature top_p seed stop n logprobs echo"
    body = json.dumps({**dict.fromkeys(named.split()), "prompt": "x"})
    assert parse(body.encode(), is_chat=False) == Ask(is_chat=False, subject="x")


def test_values_of_any_depth_are_refused() -> None:
    """Some are just not too deep for the parser, and too deep to be shown."""
    for depth in range(1, 2200):
        body = b'{"prompt": "x", "seed": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(Problem) as refused:
            parse(body, is_chat=False)
        assert refused.value.status == 400
