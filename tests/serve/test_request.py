"""Bodies of any JSON: each is a request with sound values, or is refused with 400. Answers of this
server are messages of the next request."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.serve.protocol import End, Tokens
from mpissd.serve.request import CALL, Exchange, Problem, called, parse
from tests.text import tiny

NAMES = (
    "model prompt messages max_tokens max_completion_tokens stream stream_options temperature "
    "top_p seed stop deadline_s user n presence_penalty frequency_penalty logit_bias logprobs "
    "top_logprobs response_format tools store best_of echo suffix role content type text other "
    "tool_choice tool_calls function arguments continue_final_message add_generation_prompt"
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


USER = {"role": "user", "content": "x"}
FIELDS: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "a whole number >= 1"),
    ("max_tokens", True, "a whole number >= 1"),
    ("temperature", 2.5, "at most 2"),
    ("temperature", [], "at most 2"),
    ("top_p", 0, "above 0"),
    ("seed", 2**63, "a whole number in"),
    ("deadline_s", -1, "above 0"),
    ("n", 9, "in [1, 8]"),
    ("echo", True, "allowed: false"),
    ("logprobs", 6, "in [0, 5]"),
    ("presence_penalty", 2.5, "at most 2"),
    ("frequency_penalty", "1", ">= -2"),
    ("logit_bias", {"é": 1}, '{"TOKEN ID": NUMBER}'),
    ("logit_bias", {"7": -101}, ">= -100"),
    ("logit_bias", {"1": 5, "01": -5}, '{"TOKEN ID": NUMBER}'),
    ("stream", "yes", "true, false"),
    ("stream_options", {"include_usages": True}, "did you mean 'include_usage'"),
    ("stop", [""], "none empty"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", 7, "a string"),
    ("stop", "a" * 2000, "up to 16 strings"),
    ("prompt", ["a", "b"], "one list of token ids"),
    ("prompt", [-1], "one list of token ids"),
    ("speculation", {"lookahead": -1}, "lookahead=-1: allowed: a whole number >= 0"),
    ("speculation", {"K": 1}, "unknown field 'K': allowed: lookahead"),
    ("prompt", "\ud800", "no UTF-8 text"),
    ("prompt", {"a": 1}, "is no text"),
    ("max_token", 5, "did you mean 'max_tokens'"),
    ("messages", [USER], "unknown field"),
    ("é\n", 1, "unknown field"),
]
CONVERSATIONS: list[tuple[Any, str]] = [
    ([], "at least one message"),
    ([7], '"role"'),
    ([{"role": "user"}], "is no text"),
    ([{"role": "robot", "content": "x"}], "role"),
    ([{**USER, "tool_calls": []}], "unknown messages[0] field"),
    ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}], "arguments"),
    ([{"role": "tool", "content": None}], "is no text"),
    ([{"role": "assistant", "refusal": "no"}], "unknown messages[0] field"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "parts"),
    ([{"role": "user", "content": [{"type": "text"}]}], "parts"),
    ([{"role": "user", "content": "a\udfffb"}], "no UTF-8 text"),
    ([{"role": "assistant", "content": False}], "is no text"),
]
BODIES = [
    (b"{", "no JSON"),
    (b"[]", "no JSON object"),
    (b'{"prompt": "\xff"}', "no UTF-8 text (byte 13)"),
    (b'{"prompt": "x", "temperature": NaN}', "NaN"),
    (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "no JSON"),
    (b"[" * 100000, "no JSON"),
    (b'{"prompt": null}', "prompt: needed"),
]


def refusal(words: Tokenizer, body: bytes, *, is_chat: bool = False) -> str:
    with pytest.raises(Problem) as refused:
        parse(body, is_chat=is_chat).encode(words)
    assert refused.value.status == 400
    return refused.value.message


def test_what_cannot_be_is_refused_by_name(words: Tokenizer) -> None:
    for name, value, says in FIELDS:
        told = refusal(words, json.dumps({"prompt": "x", name: value}).encode())
        assert says in told, (name, value, told)
    for value, says in CONVERSATIONS:
        assert says in refusal(words, json.dumps({"messages": value}).encode(), is_chat=True)
    for body, says in BODIES:
        assert says in refusal(words, body)


def is_sound(ask: Exchange) -> bool:
    ranges = [
        ask.max_tokens is None or ask.max_tokens >= 1,
        0 <= ask.sampling.temperature <= 2,
        0 < ask.sampling.top_p <= 1 <= ask.n <= 8,
        0 <= (ask.sampling.seed or 0) < 2**63,
        ask.deadline_s is None or 0 < ask.deadline_s <= 86400,
        all(isinstance(stop, str) and stop for stop in ask.stop),
    ]
    return all(ranges)


@settings(max_examples=60)
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
        assert tokens and min(tokens) >= 0
    except Problem as problem:
        assert problem.status == 400 and problem.message
        json.dumps(problem.to_dict()).encode()


def test_values_of_any_depth_are_refused() -> None:
    """Some are just not too deep for the parser, and too deep to be shown."""
    for depth in (1, 100, *range(900, 1100, 7), 5000):
        body = b'{"prompt": "x", "seed": ' + b"[" * depth + b"]" * depth + b"}"
        with pytest.raises(Problem) as refused:
            parse(body, is_chat=False)
        assert refused.value.status == 400


def test_a_call_whose_arguments_are_no_json_is_text() -> None:
    text = CALL + '{"name": "f", "arguments": {"a": NaN}}</tool_call>'
    assert called(text) == (text, [])


CALLING = (
    "{% if tools %}<tool_call>{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments | tojson }}"
    "{% endfor %}|{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f"}}
PARTS = [
    "", " ", "\n", "é", "\u2028", "so <", CALL, "</tool_call>", '{"name": "f", "arguments": {}}',
    f'{CALL}{{"name": "f", "arguments": {{"a": ["é", 1e5]}}}}</tool_call>', '{"name": 7, "argume',
    f'{CALL}{{"name": "f", "arguments": "{{}}"}}', f'{CALL}{{"name": "g", "arguments": null}}',
    f'{CALL}{{"name": "\\ud800", "arguments": {{}}}}',
    f'{CALL}{{"name": "", "arguments": "\\udfff"}}',
]  # fmt: skip
UNUSED = dict.fromkeys(("refusal", "audio", "function_call", "tool_calls")) | {"annotations": []}


@pytest.fixture(scope="module")
def callers(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("callers")
    return load_tokenizer(str(tiny.write(folder / "tiny", chat_template=CALLING)))


def answered(words: Tokenizer, text: str, cut: int, *, stream: bool) -> dict[str, Any]:
    """Returns the message with which the server answers a text whose last tokens are cut off."""
    body = {"messages": [USER], "tools": [TOOL], "stream": stream}
    (choice,) = parse(json.dumps(body).encode(), is_chat=True).begin(words, (1,), "tiny")
    tokens, deltas = words.encode(text), list[dict[str, Any]]()
    for token in [*tokens[: len(tokens) - cut], *[1] * (not cut)]:
        choice.add(Tokens(0, [token]))
        if stream:
            deltas.append(choice.choice()["delta"])
    choice.close(End(0, "length" if cut else "stop"))
    last = choice.choice()
    json.dumps(last, ensure_ascii=False).encode()  # as the response is sent
    if not stream:
        return dict(last["message"])
    deltas.append(last["delta"])
    content = "".join(delta.get("content") or "" for delta in deltas)
    return {"role": "assistant", "content": content, "tool_calls": deltas[-1].get("tool_calls")}


@settings(max_examples=200)
@given(st.lists(st.sampled_from(PARTS), max_size=5).map("".join), st.integers(0, 4))
@example("", 0)
def test_every_answer_is_a_message_of_the_next_request(
    callers: Tokenizer, text: str, cut: int
) -> None:
    """As it was answered whole or in a stream, with clients' unused fields, or as a list of parts;
    its prompt has the same tokens each time."""
    whole = answered(callers, text, cut, stream=False)
    parts = [{"type": "text", "text": part} for part in (whole["content"] or "")]
    forms = [
        whole,
        answered(callers, text, cut, stream=True),
        {**UNUSED, **whole},
        {**whole, "content": parts},
    ]
    prompts = []
    for form in forms:
        calls = form.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": c["id"], "content": ""} for c in calls]
        body = {"messages": [USER, form, *results, USER]}
        prompts.append(parse(json.dumps(body).encode(), is_chat=True).encode(callers))
    assert prompts == [prompts[0]] * len(forms)
