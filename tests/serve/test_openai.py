"""The server over a fake lead, asked by OpenAI's own client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.rounds import GREEDY, Sampling
from mpissd.engine.text.grammar import make_grammar
from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.serve.request import event
from tests.needs import module
from tests.scripts import until
from tests.serve.fake_lead import Script
from tests.serve.rig import Rig, serving
from tests.text import tiny

openai = module("openai", "the openai client")
STOP = 1
QUESTION = [{"role": "user", "content": "hello?"}]


@pytest.fixture
def rig(words: Tokenizer) -> Iterator[Rig]:
    answer = [*words.encode("hello wörld\nand more"), STOP]
    with serving(words, Script(answer, pace_s=0.005)) as found:
        yield found


def client(rig: Rig, **given: Any) -> Any:
    return openai.OpenAI(base_url=f"{rig.url}/v1", max_retries=0, **{"api_key": "none", **given})


def chat(rig: Rig, **asked: Any) -> Any:
    return client(rig).chat.completions.create(**{"model": "tiny", "messages": QUESTION, **asked})


def completion(rig: Rig, **asked: Any) -> Any:
    return client(rig).completions.create(**{"model": "tiny", "prompt": "x", **asked})


def test_a_chat(rig: Rig, words: Tokenizer) -> None:
    answer = chat(rig)
    assert answer.choices[0].message.content == "hello wörld\nand more"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop" and answer.object == "chat.completion"
    prompt, said = len(words.chat(QUESTION)), len(rig.script.answer)
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens) == (prompt, said)
    assert used.total_tokens == prompt + said
    assert used.prompt_tokens_details.cached_tokens == 2
    assert used.speculation == {"drafted": 8, "accepted": 5, "hits": 3, "rounds": 4, "forced": 0}
    asked = rig.script.submitted[0]
    assert list(asked.prompt) == words.chat(QUESTION)
    assert asked.sampling == GREEDY
    assert asked.max_tokens == rig.script.context - prompt
    assert asked.deadline_s is not None and 570 < asked.deadline_s < 600  # from the arrival on


def test_a_stream_adds_up_and_characters_arrive_whole(rig: Rig) -> None:
    chunks = list(chat(rig, stream=True, stream_options={"include_usage": True}))
    pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(pieces) == "hello wörld\nand more" and len(pieces) > 3
    assert not any("\ufffd" in piece for piece in pieces)
    assert chunks[0].choices[0].delta.role == "assistant"
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    used = chunks[-1].usage
    assert not chunks[-1].choices and used.speculation["accepted"] == 5
    assert used.prompt_tokens_details.cached_tokens == 2
    assert len({c.id for c in chunks}) == 1


def test_a_completion_of_a_text_or_of_tokens(rig: Rig, words: Tokenizer) -> None:
    told: dict[str, Any] = {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    told |= {"logit_bias": {"7": -100, "8": 2.5}, "temperature": 0.5, "top_p": 0.9, "seed": 7}
    for prompt in ("hello", ["hello"], words.encode("hello"), [words.encode("hello")]):
        answer = completion(rig, model="nick", prompt=prompt, max_tokens=3, **told)
        assert answer.choices[0].text == "hello w\ufffd"  # half of ö is no character
        assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 3
        asked = rig.script.submitted[-1]
        assert list(asked.prompt) == words.encode("hello")
        bias = ((7, -100.0), (8, 2.5))
        assert asked.sampling == Sampling(0.5, 0.9, 7, None, bias, 0.5, -0.5)
        assert asked.max_tokens == 3
    with pytest.raises(openai.BadRequestError, match="logit_bias: token 70000: allowed: 0"):
        completion(rig, logit_bias={"70000": 1})
    streamed = completion(rig, prompt="hello", stream=True)
    assert "".join(c.choices[0].text for c in streamed) == "hello wörld\nand more"


def test_a_stop_string_ends_the_answer_and_the_leads_work(words: Tokenizer) -> None:
    script = Script([*words.encode("one two three " * 2000), STOP], pace_s=0.01, context=99_999)
    with serving(words, script) as rig:
        answer = completion(rig, stop=["o th", "zzz"], max_tokens=9999)
        assert answer.choices[0].text == "one tw" and answer.choices[0].finish_reason == "stop"
        until(lambda: script.ended)
        assert script.ended == {1: "cancelled"}
        assert answer.usage.completion_tokens == len(words.encode("one two th"))
        until(lambda: rig.lead.outstanding == 0)


def test_the_probabilities_of_the_chosen_tokens(rig: Rig, words: Tokenizer) -> None:
    ids = list(rig.script.answer)
    found = chat(rig, logprobs=True).choices[0].logprobs.content
    assert [each.logprob for each in found] == [-0.25] * len(ids)
    assert [each.token for each in found] == [words.decode([i], specials=True) for i in ids]
    assert found[0].token == "hello" and found[0].bytes == list(b"hello")
    assert found[0].top_logprobs == [] and rig.script.submitted[-1].sampling.logprobs == 0
    tops = chat(rig, logprobs=True, top_logprobs=2).choices[0].logprobs.content[3].top_logprobs
    assert [each.logprob for each in tops] == [-0.25, -2.0]
    assert rig.script.submitted[-1].sampling.logprobs == 2
    assert [each.token for each in tops] == [words.decode([n]) for n in (20, 21)]
    told = completion(rig, logprobs=2)
    told = told.choices[0].logprobs.top_logprobs[0]
    assert told == {words.decode([20]): -0.25, words.decode([21]): -2.0, "hello": -0.25}
    told = completion(rig, logprobs=0)
    assert told.choices[0].logprobs.token_logprobs == [-0.25] * len(ids)
    assert completion(rig).choices[0].logprobs is None
    chunks = list(chat(rig, logprobs=True, stream=True))
    streamed = [c.choices[0].logprobs for c in chunks if c.choices]
    assert sum(len(each.content) for each in streamed if each is not None) == len(ids)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_forms_reach_the_lead_as_grammars(rig: Rig) -> None:
    module("llguidance", "grammars")
    strict = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    for form in ({"type": "json_object"}, strict):
        chat(rig, response_format=form)
    for form in ({"guided_regex": "a+"}, {"guided_choice": ["yes", "n|o"]}, {}):
        completion(rig, extra_body=form)
    made = [make_grammar("", "json", json.dumps(each)) for each in ({"type": "object"}, SCHEMA)]
    made += [make_grammar("", "regex", "a+"), make_grammar("", "choice", ["yes", "n|o"]), ""]
    assert [asked.sampling.grammar for asked in rig.script.submitted] == made


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"response_format": {"type": "xml"}}, r"response_format\.type=.*: allowed: "),
        ({"response_format": {"type": "json_schema"}}, "response_format: .*: allowed: with"),
        ({"guided_choice": []}, r"guided_choice=\[\]: allowed: array of length >= 1"),
        ({"guided_regex": "(a"}, "guided_regex: .*unclosed group"),
        *(({"guided_regex": f"(a{{1000}}){{{n}}}"}, "too costly: too many") for n in (300, 1000)),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice with guided_regex"),
        ({"guided_regex": "a" * 40_000}, "guided_regex: .* bytes: allowed: at most 32768"),
        ({"schema": {"type": "wat"}}, "response_format: Invalid type: wat"),
        ({"schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "Unsatisfiable schema"),
        ({"schema": {"type": "array", "uniqueItems": True}}, "Unimplemented keys"),
    ],
)
def test_a_form_that_cannot_be_is_refused(rig: Rig, form: dict[str, Any], said: str) -> None:
    module("llguidance", "grammars")
    if "schema" in form:
        form = {"response_format": {"type": "json_schema", "json_schema": form}}
    with pytest.raises(openai.BadRequestError) as caught:
        completion(rig, extra_body=form)
    error = caught.value.body
    assert re.match(said, error["message"]) or said in error["message"]
    assert error["type"] == "invalid_request_error" and error["param"] in error["message"]
    assert "\n" not in error["message"] and not rig.script.submitted


def test_choices_are_answers_of_their_own(rig: Rig) -> None:
    """The others are sent when the first one's prompt is stored, and count before."""
    text, said = "hello wörld\nand more", len(rig.script.answer)
    asked = {"n": 3, "seed": 7, "temperature": 1.0}
    answer = chat(rig, **asked)
    assert [(c.index, c.message.content) for c in answer.choices] == [(n, text) for n in range(3)]
    assert answer.usage.completion_tokens == 3 * said and answer.usage.speculation["accepted"] == 15
    asked_first = rig.script.submitted[0]
    assert answer.usage.prompt_tokens == len(asked_first.prompt)
    assert [one.sampling.seed for one in rig.script.submitted] == [7, 8, 9]
    streamed: dict[int, str] = {}
    for chunk in chat(rig, **asked, stream=True, max_tokens=said):
        (choice,) = chunk.choices
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert streamed == dict.fromkeys(range(3), text)
    rig.script.gate = lambda: False
    with rig.send(b'{"prompt": "x", "n": 8}'):
        until(lambda: rig.lead.outstanding == 8)
        with pytest.raises(openai.RateLimitError):  # 4 run and 8 wait at most
            completion(rig, n=5)
    until(lambda: not rig.lead.outstanding)
    assert len(rig.script.submitted) == 7


TOOL = {"type": "function", "function": {"name": "rain", "parameters": {"type": "object"}}}
TOOLS = (
    "{{ tools | tojson }}{% for message in messages %}|{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.arguments.in }}{% endfor %}"
    "{% endfor %}"
)


def test_tools_are_described_and_called(tmp_path: Path) -> None:
    words = load_tokenizer(str(tiny.write(tmp_path / "tools", chat_template=TOOLS)))
    call = '<tool_call>\n{"name": "rain", "arguments": {"in": "Köln"}}\n</tool_call>'
    script = Script([*words.encode(f"so <\n{call}\n{call}"), STOP], burst=3)
    asked = {"model": "tiny", "messages": QUESTION, "tools": [TOOL]}
    with serving(words, script) as rig:
        create = client(rig).chat.completions.create
        told = create(**asked).choices[0]
        assert (told.message.content, told.finish_reason) == ("so <\n", "tool_calls")
        functions = [each.function for each in told.message.tool_calls]
        assert [(f.name, json.loads(f.arguments)) for f in functions] == [
            ("rain", {"in": "Köln"})
        ] * 2
        chunks = [chunk.choices[0] for chunk in create(**asked, stream=True)]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == "so <\n"
        assert chunks[-1].finish_reason == "tool_calls" and len(chunks[-1].delta.tool_calls) == 2
        result = {"role": "tool", "tool_call_id": "x", "name": "rain", "content": "no"}
        create(**asked | {"messages": [*QUESTION, told.message, result]})
        assert create(**asked, tool_choice="none").choices[0].finish_reason == "stop"
        prompts = [words.decode(one.prompt) for one in script.submitted]
    described = json.dumps([TOOL])
    assert prompts[0] == f"{described}|hello?" and prompts[3] == "null|hello?"
    assert prompts[2] == f"{prompts[0]}|so <\n<tool_call>Köln<tool_call>Köln|no"


def test_an_answer_continues_the_final_message(rig: Rig, words: Tokenizer) -> None:
    asked = {"model": "tiny", "messages": [*QUESTION, {"role": "assistant", "content": "s|>"}]}
    for how in ({"continue_final_message": True}, {"add_generation_prompt": False}):
        client(rig).chat.completions.create(**asked, extra_body=how)
    prompts = [words.decode(one.prompt, specials=True) for one in rig.script.submitted]
    begun = "<|s|>user\nhello?<|e|><|s|>assistant\ns|>"
    assert prompts == [begun, f"{begun}<|e|>"]
    with pytest.raises(openai.BadRequestError, match="chat template ignores them"):
        client(rig).chat.completions.create(**asked, tools=[TOOL])


def test_an_event_is_one_line_for_clients_that_split_at_any_line_end() -> None:
    data = {"text": "".join(map(chr, range(0xD800))) + "\u2028\u2029"}
    line, empty = event(data).decode().splitlines()
    assert empty == "" and json.loads(line.removeprefix("data: ")) == data


def test_the_models(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [model.id for model in client(rig).models.list()] == ["tiny", "nick"]
    with pytest.raises(openai.NotFoundError, match="model='gpt': allowed: tiny, nick"):
        completion(rig, model="gpt")
    monkeypatch.setattr(rig.lead, "ready", None)  # as before the lead's first message
    with pytest.raises(openai.InternalServerError, match="the models are being loaded"):
        client(rig).models.list()


def test_a_key(words: Tokenizer) -> None:
    with serving(words, Script([STOP]), api_key="sesame") as rig:
        assert client(rig, api_key="sesame").models.list().data
        for wrong in ("sesam", "sesame2", "x"):
            with pytest.raises(openai.AuthenticationError):
                client(rig, api_key=wrong).models.list()
        assert rig.post(b"{}")[0] == 401


def test_the_leads_refusal_has_its_status(words: Tokenizer) -> None:
    with serving(words, Script([STOP], refuses=True)) as rig:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError, match="refused by the lead"):
                completion(rig, stream=stream)


def test_the_job_dies_under_its_answers(words: Tokenizer) -> None:
    script = Script([tiny.of_byte(65)] * 390, pace_s=0.02, dies_after=3)
    with serving(words, script) as rig:
        stream = completion(rig, stream=True)
        with pytest.raises(openai.APIError, match="the job is gone"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            completion(rig)
        assert refused.value.status_code == 503
        with pytest.raises(openai.InternalServerError, match="the job is gone"):
            client(rig).models.list()
        until(lambda: rig.lead.outstanding == 0)
