"""Bodies of any JSON: each is a request with sound values, or is refused with 400. Answers of this
server are messages of the next request."""

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mpissd.common.rounds import GREEDY, Logprob
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.serve.fields import ChatBody, CompletionBody, Problem, read_object
from mpissd.serve.protocol import End, PromptTokens, Ready, Tokens
from mpissd.serve.request import CALL, Exchange, called, made
from mpissd.serve.responses import parse_response
from tests.text import tiny

NAMES = (
    "model prompt messages max_tokens max_completion_tokens stream stream_options temperature "
    "top_p seed stop deadline_s user n presence_penalty frequency_penalty logit_bias logprobs "
    "top_logprobs response_format tools store best_of echo suffix role content type text other "
    "tool_choice tool_calls function arguments continue_final_message add_generation_prompt"
).split()
SCALARS = st.none() | st.booleans() | st.integers(-3, 300) | st.integers()
SCALARS |= st.floats(allow_nan=False, allow_infinity=False)
SCALARS |= st.sampled_from(["user", "assistant", "text", "x", ""]) | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    ),
    max_leaves=8,
)


def parse(body: bytes, *, is_chat: bool) -> Exchange:
    return made(read_object(body), ChatBody if is_chat else CompletionBody)


USER = {"role": "user", "content": "x"}
CALLED = {"function": {"name": "f", "arguments": "{"}}
FIELDS: list[tuple[str, Any, str]] = [
    ("max_tokens", 0, "max_tokens=0: allowed: int >= 1"),
    ("max_tokens", True, "max_tokens=true: allowed: int"),
    ("temperature", 2.5, "<= 2"),
    ("temperature", [], "allowed: float"),
    ("top_p", 0, "> 0"),
    ("top_k", -2, ">= -1"),
    ("min_p", 1.5, "<= 1"),
    ("repetition_penalty", 0, ">= 0.01"),
    ("repetition_penalty", 1e-310, ">= 0.01"),  # a logit divided by it is infinite
    ("min_tokens", -1, ">= 0"),
    ("seed", 2**63, "allowed: int <="),
    ("deadline_s", -1, "> 0"),
    ("n", 9, "<= 8"),
    ("logprobs", 21, "<= 20"),
    ("presence_penalty", 2.5, "<= 2"),
    ("frequency_penalty", "1", "allowed: float"),
    ("logit_bias", {"é": 1}, "matching regex"),
    ("logit_bias", {"7": -101}, ">= -100"),
    ("logit_bias", {"1": 5, "01": -5}, "matching regex"),
    ("stream", "yes", "allowed: bool"),
    ("stream_options", {"include_usages": True}, "did you mean 'include_usage'"),
    ("stop", [""], 'stop[0]="": allowed: str of length >= 1'),
    ("stop", ["a"] * 17, "length <= 16"),
    ("stop", 7, "allowed: str | array"),
    ("stop", "a" * 2000, "length <= 1024"),
    ("mode", "fast", "allowed: ar, sd, ssd"),
    ("prompt", ["a", 7], "prompt=7: allowed: a text"),
    ("prompt", [-1], "a list of token ids"),
    ("prompt", [], "a list of token ids"),
    ("speculation", {"lookahead": -1}, "speculation.lookahead=-1: allowed: int >= 0"),
    ("speculation", {"K": 1}, "unknown speculation field 'K': allowed: lookahead"),
    ("prompt", "\ud800", "no JSON object"),
    ("prompt", {"a": 1}, "allowed: a text"),
    ("best_of", 2, "best_of=2: allowed: 1, n"),
    ("best_of", True, "best_of=true"),
    ("bad_words", ["x"], 'bad_words=["x"]: allowed: [], logit_bias'),
    ("guided_grammar", "root ::= x", "allowed: guided_json, guided_regex, guided_choice"),
    ("structured_outputs", {"grammar": "x"}, 'structured_outputs.grammar="x": allowed: null'),
    ("max_token", 5, "did you mean 'max_tokens'"),
    ("messages", [USER], "unknown field"),
    ("é\n", 1, "unknown field"),
    ("x - at `$.foo", 1, "unknown field"),
    ("mode", "x - at `$.foo", "mode="),
    ("stream_options", {"x - at `$.foo": 1}, "unknown stream_options field"),
    ("stream_options", {"include_sources": True}, "allowed: with stream=true"),
    ("cache_salt", "x", "allowed: --prefix_cache=false"),
]
CONVERSATIONS: list[tuple[Any, str]] = [
    ([], "messages=[]: allowed: array of length >= 1"),
    ([7], "messages[0]=7: allowed: object"),
    ([{"role": "user"}], "messages[0].content: needed"),
    ([{"role": "robot", "content": "x"}], 'role="robot": allowed: assistant, developer'),
    ([{**USER, "names": "x"}], "unknown messages[0] field 'names': did you mean 'name'"),
    ([{"role": "assistant", "tool_calls": [CALLED]}], "arguments"),
    ([{"role": "tool", "content": None}], "content: needed"),
    ([{"role": "assistant", "refusal": "no"}], "messages[0].refusal"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "output_text, text"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text: needed"),
    ([{"role": "user", "content": "a\udfffb"}], "no JSON object"),
    ([{"role": "assistant", "content": False}], "content=false: allowed: str | array | null"),
]
BODIES = [
    (b"{", "no JSON"),
    (b"[]", "no JSON object"),
    (b'{"prompt": "\xff"}', "no JSON object: Invalid UTF-8"),
    (b'{"prompt": "x", "temperature": NaN}', "(byte 31)"),
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
        0 < ask.sampling.top_p <= 1 <= ask.asked.n <= 8,
        0 <= (ask.sampling.seed or 0) < 2**63,
        ask.asked.deadline_s is None or 0 < ask.asked.deadline_s <= 86400,
        all(isinstance(stop, str) and stop for stop in ask.asked.stops),
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
        for tokens in ask.encode(words):
            assert tokens and min(tokens) >= 0
    except Problem as problem:
        assert problem.status == 400 and problem.message
        json.dumps(problem.to_dict()).encode()


ITEMS = (
    "input instructions max_output_tokens text format reasoning effort include tools tool_choice "
    "type role content call_id name arguments output function parameters $defs message "
    "function_call function_call_output stream metadata"
).split()
ANY = st.recursive(
    SCALARS | st.sampled_from(ITEMS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(ITEMS), inner, max_size=4)
    ),
    max_leaves=10,
)
SOUND = {"type": "function", "name": "f", "parameters": {"$defs": [1]}}


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(ITEMS), ANY, max_size=5))
@example({"input": "x", "tools": [SOUND], "tool_choice": "required"})
@example({"input": [{"type": "function_call_output", "output": {"a": 1}}]})
@example({"input": "x", "tools": [{"type": "function", "name": "f"}], "tool_choice": "required"})
def test_a_response_is_sound_or_refused(words: Tokenizer, body: dict[str, Any]) -> None:
    try:
        fields = read_object(json.dumps({"input": "x", **body}).encode())
        ask = parse_response(fields, GREEDY)
        assert is_sound(ask) and ask.encode(words)
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


def test_a_prompt_that_was_not_scored_in_time_has_nulls(words: Tokenizer) -> None:
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 1}
    asked = parse(json.dumps(body).encode(), is_chat=False)
    asked.prompts = asked.encode(words)
    (choice,) = asked.begin(words, Ready("tiny", 400, (1,), 1, "ssd", 9), "tiny")
    choice.add(PromptTokens(0, 1, [Logprob(-0.5)]))
    choice.close(End(0, "deadline"))
    told = choice.choice()
    assert told["logprobs"]["token_logprobs"] == [None, -0.5, None]
    assert told["finish_reason"] == "deadline" and told["text"] == words.decode([5, 6, 7])


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
    asked = parse(json.dumps(body).encode(), is_chat=True)
    asked.prompts = [[5]]
    (choice,) = asked.begin(words, Ready("tiny", 400, (1,), 1, "ssd", 9), "tiny")
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
