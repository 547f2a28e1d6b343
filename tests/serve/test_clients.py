"""What clients of other servers send, over a fake lead: every body is answered, with what it asked
for. tests/data/clients.jsonl holds bodies as tools sent them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpissd.engine.text.grammar import make_grammar
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.needs import module
from tests.serve.fake_lead import Script
from tests.serve.rig import Rig, serving
from tests.serve.test_openai import QUESTION, STOP, TOOL, chat, completion
from tests.text import tiny

openai = module("openai", "the openai client")
BODIES = Path(__file__).parents[1] / "data" / "clients.jsonl"


@pytest.fixture
def rig(words: Tokenizer) -> Iterator[Rig]:
    answer = [*words.encode("hello wörld"), STOP]
    with serving(words, Script(answer)) as found:
        yield found


def body(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_bodies_of_tools_are_answered(rig: Rig) -> None:
    module("llguidance", "grammars")
    for line in BODIES.read_text().splitlines():
        told = json.loads(line)
        with rig.send(body(**told["body"]), path=told["path"]) as connection:
            status = connection.recv(12)
        assert status == b"HTTP/1.1 200", (told["tool"], connection)


NEUTRAL = {
    "top_k": -1, "min_p": 0, "repetition_penalty": 1, "min_tokens": 0, "ignore_eos": False,
    "best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "bad_words": [], "store": False,
    "skip_special_tokens": True, "guided_json": None, "structured_outputs": None, "priority": 0,
    "service_tier": "auto", "metadata": {"a": "b"}, "prompt_cache_key": "x", "stop_token_ids": [],
    "stream_options": None, "truncate_prompt_tokens": None, "return_token_ids": False,
}  # fmt: skip


def test_values_that_change_nothing_pass(rig: Rig) -> None:
    assert rig.post(body(prompt="x", **NEUTRAL, suffix=""))[0] == 200
    more = {"verbosity": "medium", "reasoning_effort": "none", "parallel_tool_calls": True}
    more |= {"chat_template_kwargs": {"enable_thinking": False}, "modalities": ["text"]}
    said = [{**QUESTION[0], "name": "ann"}]
    form = {"json": None, "grammar": None, "disable_fallback": False, "whitespace_pattern": None}
    more |= {"add_special_tokens": False, "structured_outputs": form}
    chatted = body(messages=said, **{**NEUTRAL, **more})
    assert rig.post(chatted, path="/v1/chat/completions")[0] == 200
    plain, other = (one.sampling for one in rig.script.submitted)
    assert plain == other == type(plain)()


def test_fields_of_vllm_reach_the_lead(rig: Rig) -> None:
    told = {"top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "stop_token_ids": [9]}
    completion(rig, temperature=0.5, extra_body={**told, "min_tokens": 3})
    asked = rig.script.submitted[-1].sampling
    assert (asked.top_k, asked.min_p, asked.repetition_penalty) == (7, 0.1, 1.2)
    assert (asked.stop_ids, asked.min_tokens) == ((1, 9), 3)
    answer = completion(rig, extra_body={"ignore_eos": True, "min_tokens": 5}, max_tokens=20)
    asked = rig.script.submitted[-1].sampling
    assert (asked.stop_ids, asked.min_tokens) == ((), 0)
    assert answer.usage.completion_tokens == len(rig.script.answer), "the end counts as a token"
    completion(rig, extra_body={"top_k": 7, "min_p": 0.1})
    assert rig.script.submitted[-1].sampling == type(asked)(), "greedy"
    cases = [
        ({"min_tokens": 9, "max_tokens": 8}, "allowed: at most max_tokens=8"),
        ({"min_tokens": 500}, "min_tokens=500: allowed: 400 together"),
        ({"min_tokens": 9, "guided_regex": "a"}, "min_tokens with guided_regex"),
        ({"ignore_eos": True, "structured_outputs": {"regex": "a"}}, "ignore_eos with"),
        ({"stop_token_ids": [70000]}, "stop_token_ids: token 70000: allowed: 0"),
    ]
    for wrong, said in cases:
        with pytest.raises(openai.BadRequestError, match=said):
            completion(rig, extra_body=wrong)


def test_stop_strings_count_after_the_least_tokens(rig: Rig) -> None:
    assert completion(rig, stop="l").choices[0].text == "he"
    told = {"min_tokens": len(rig.script.answer) - 3}
    assert completion(rig, stop="l", extra_body=told).choices[0].text == "hello wör"


def test_prompts_are_answered_in_their_order(rig: Rig, words: Tokenizer) -> None:
    prompts = ["one", "two three", words.encode("four")]
    answer = completion(rig, prompt=prompts, n=2, seed=5, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [*range(6)]
    sent = sorted(rig.script.submitted, key=lambda one: one.id)
    assert [words.decode(one.prompt) for one in sent] == [
        text for text in ("one", "two three", "four") for _ in range(2)
    ]
    assert [one.sampling.seed for one in sent] == [*range(5, 11)]
    assert answer.usage.prompt_tokens == sum(len(one.prompt) for one in sent[::2])
    with pytest.raises(openai.BadRequestError, match="13 answers: allowed: 12"):
        completion(rig, prompt=["x"] * 13)


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_comes_back_with_its_log_probabilities(
    rig: Rig, words: Tokenizer, stream: bool
) -> None:
    """As lm-eval asks for them: of token ids, several at once."""
    prompts = [words.encode("one"), words.encode("two three")]
    told = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1}
    if stream:
        chunks = completion(rig, **told, stream=True)
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.text]
    else:
        choices = completion(rig, **told).choices
    for choice in choices:
        prompt = prompts[choice.index]
        assert choice.text == words.decode(prompt) + "hello"[: len(choice.text)] or stream
        found = choice.logprobs
        assert found.tokens[: len(prompt)] == [words.piece(token) for token in prompt]
        assert found.token_logprobs[: len(prompt)] == [None, *(-0.5 - t for t in prompt[1:])]
        assert found.top_logprobs[0] is None and words.decode([20]) in found.top_logprobs[1]
    plain = completion(rig, prompt="one", echo=True)
    assert plain.choices[0].text == "onehello wörld" and plain.choices[0].logprobs is None
    control = words.decode([STOP], specials=True)
    (echoed,) = completion(rig, prompt=f" a{control}", echo=True).choices
    assert echoed.text.startswith(f" a{control}")


def test_usage_goes_along(rig: Rig) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(rig, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[0] and counts[-1] == len(rig.script.answer)


def test_acceptance_has_the_names_of_the_field(rig: Rig) -> None:
    want = {
        "mean_acceptance_length": 2.25, "draft_acceptance_rate": 0.625, "num_spec_steps": 4,
        "acceptance_histogram": [1, 1, 2, 0, 0], "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 8, "num_spec_tokens": 4,
    }  # fmt: skip
    assert chat(rig).metrics == {"speculative_decoding": want}
    last = list(completion(rig, stream=True, stream_options={"include_usage": True}))[-1]
    assert last.metrics == {"speculative_decoding": want}
    assert not hasattr(chat(rig, n=2), "metrics")


def test_tokens_and_texts(rig: Rig, words: Tokenizer) -> None:
    told = rig.post(body(prompt="one two", return_token_strs=True), path="/tokenize")[1]
    assert told["tokens"] == words.encode("one two") and told["count"] == len(told["tokens"])
    assert "".join(told["token_strs"]) == "one two" and told["max_model_len"] == 400
    assert rig.post(body(tokens=told["tokens"]), path="/detokenize")[1] == {"prompt": "one two"}
    asked = rig.post(body(messages=QUESTION), path="/tokenize")[1]
    assert asked["tokens"] == words.chat(QUESTION)
    assert rig.post(body(tokens=[-1]), path="/detokenize")[0] == 400
    assert rig.post(body(tokens=[1 << 16]), path="/detokenize")[0] == 400
    for wrong in ({}, {"prompt": "x", "messages": QUESTION}):
        assert rig.post(body(**wrong), path="/tokenize")[0] == 400
    assert rig.post(body(prompt="x", model="gpt"), path="/tokenize")[0] == 404


def test_a_template_s_own_variables(tmp_path: Path) -> None:
    template = "{% if enable_thinking %}think{% endif %}{{ reasoning_effort }}|{# tone #}"
    words = load_tokenizer(str(tiny.write(tmp_path / "own", chat_template=template)))
    with serving(words, Script([STOP])) as rig:
        own = {"chat_template_kwargs": {"enable_thinking": True}}
        chat(rig, reasoning_effort="high", extra_body=own)
        assert words.decode(rig.script.submitted[0].prompt) == "thinkhigh|"
        with pytest.raises(openai.BadRequestError, match=r"tone=.*template does not read it"):
            chat(rig, extra_body={"chat_template_kwargs": {"tone": "dry"}})
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            chat(rig, extra_body={"chat_template_kwargs": {"messages": []}})


def test_calls_that_must_be(rig: Rig, words: Tokenizer) -> None:
    """By a grammar, which a template without tools cannot describe."""
    module("llguidance", "grammars")
    other = {"type": "function", "function": {"name": "sun"}}
    call = {"name": "rain", "arguments": {"in": "Köln"}}
    named = {"type": "function", "function": {"name": "rain"}}
    cases: list[tuple[Any, dict[str, Any], Any, list[str]]] = [
        (named, {}, call, ["rain"]),
        ("required", {"parallel_tool_calls": False}, call, ["rain", "sun"]),
        ("required", {}, [call, {"name": "sun", "arguments": {}}], ["rain", "sun"]),
    ]
    for choice, more, said, names in cases:
        text = json.dumps(said, ensure_ascii=False)
        with serving(words, Script([*words.encode(text), STOP])) as caller:
            asked: dict[str, Any] = {"tools": [TOOL, other], "tool_choice": choice, **more}
            told = chat(caller, **asked).choices[0]
            assert told.finish_reason == "tool_calls" and told.message.content is None
            want = said if isinstance(said, list) else [said]
            found = [one.function for one in told.message.tool_calls]
            assert [{"name": f.name, "arguments": json.loads(f.arguments)} for f in found] == want
            grammar = caller.script.submitted[0].sampling.grammar
            assert [name for name in ("rain", "sun") if f'"{name}"' in grammar] == names
            chunks = [chunk.choices[0] for chunk in chat(caller, **asked, stream=True)]
            assert not any(chunk.delta.content for chunk in chunks)
            assert len(chunks[-1].delta.tool_calls) == len(want)
    for wrong, text in (
        ({"tool_choice": "required"}, "tool_choice: allowed: one of the tools"),
        ({"tools": [other], "tool_choice": named}, "tool_choice: allowed: one of the tools"),
        ({"tools": [TOOL], "tool_choice": named, "extra_body": {"guided_regex": "a"}}, "one of"),
    ):
        with pytest.raises(openai.BadRequestError, match=text):
            chat(rig, **wrong)


def test_schemas_of_tools_keep_their_definitions(rig: Rig) -> None:
    module("llguidance", "grammars")
    inner = {"$ref": "#/$defs/City"}
    city = {"City": {"type": "object", "properties": {"name": {"type": "string"}}}}
    schema = {"type": "object", "properties": {"city": inner}, "$defs": city}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name in ("rain", "sun")
    ]
    chat(rig, tools=tools, tool_choice="required")
    other = {**schema, "$defs": {"City": {"type": "string"}}}
    tools[1] = {"type": "function", "function": {"name": "sun", "parameters": other}}
    with pytest.raises(openai.BadRequestError, match="two definitions of"):
        chat(rig, tools=tools, tool_choice="required")
    whole = {"type": "object", "properties": {"inner": {"$ref": "#"}}}  # it is not the root there
    tools[1] = {"type": "function", "function": {"name": "sun", "parameters": whole}}
    with pytest.raises(openai.BadRequestError, match=r"\$ref=\"#\": allowed: #/"):
        chat(rig, tools=tools, tool_choice="required")


def test_strict_tools_hold_to_their_schemas(rig: Rig, tmp_path: Path) -> None:
    module("llguidance", "grammars")
    mm = {"type": "object", "properties": {"mm": {"type": "integer"}}}
    strict = {"name": "rain", "parameters": mm, "strict": True}
    tools = [{"type": "function", "function": strict}, TOOL]
    template = "{{ tools }}<tool_call>"
    words = load_tokenizer(str(tiny.write(tmp_path / "strict", chat_template=template)))
    with serving(words, Script([STOP])) as caller:
        for asked in (tools, [TOOL]):
            chat(caller, tools=asked)
        chat(caller, tools=tools, response_format={"type": "json_object"})
        chat(caller, tools=tools, tool_choice="none")
        held, *others = (one.sampling.grammar for one in caller.script.submitted)
        assert '"mm"' in held and "[lazy]" in held
        assert others == ["", make_grammar("", "json", '{"type": "object"}'), ""]
        tools[0] = {"type": "function", "function": {**strict, "parameters": {"type": "wat"}}}
        with pytest.raises(openai.BadRequestError, match=r"tools: .*wat"):
            chat(caller, tools=tools)
    with pytest.raises(openai.BadRequestError, match="tools: strict=true: allowed: with a chat"):
        chat(rig, tools=tools)


def test_at_most_one_call(tmp_path: Path) -> None:
    template = "{{ tools }}<tool_call>"
    words = load_tokenizer(str(tiny.write(tmp_path / "one", chat_template=template)))
    call = '<tool_call>{"name": "rain", "arguments": {}}</tool_call>'
    with serving(words, Script([*words.encode(call + call), STOP])) as rig:
        for wanted, count in ((True, 2), (False, 1)):
            told = chat(rig, tools=[TOOL], parallel_tool_calls=wanted)
            assert len(told.choices[0].message.tool_calls) == count
