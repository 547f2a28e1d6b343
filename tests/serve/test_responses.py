"""/v1/responses over a fake lead, asked by OpenAI's own client."""

import json
from pathlib import Path
from typing import Any

import pytest

from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.needs import module
from tests.serve.fake_lead import Script
from tests.serve.rig import Rig, serving
from tests.serve.test_openai import QUESTION, STOP, TOOLS, client, rig
from tests.text import tiny

__all__ = ["rig"]  # a fixture
openai = module("openai", "the openai client")
TOOL = {"type": "function", "name": "rain", "parameters": {"type": "object"}}


def ask(rig: Rig, **asked: Any) -> Any:
    return client(rig).responses.create(**{"model": "tiny", "input": "hello?", **asked})


def test_a_response_and_its_stream(rig: Rig, words: Tokenizer) -> None:
    answer = ask(rig, instructions="Be brief.", temperature=0.5, top_p=0.9, store=False)
    assert answer.output_text == "hello wörld\nand more" and answer.status == "completed"
    used, said = answer.usage, len(rig.script.answer)
    assert used.output_tokens == said and used.total_tokens == used.input_tokens + said
    asked = rig.script.submitted[0]
    conversation = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert list(asked.prompt) == words.chat(conversation)
    assert (asked.sampling.temperature, asked.sampling.top_p) == (0.5, 0.9)
    events = list(ask(rig, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    done = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds[-4:] == done and set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(e.delta for e in events if e.type.endswith("delta")) == answer.output_text
    assert events[-1].response.output_text == answer.output_text
    assert [event.sequence_number for event in events] == [*range(len(events))]
    with client(rig).responses.stream(model="tiny", input="hello?") as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == answer.output_text


def test_a_response_that_is_cut(rig: Rig) -> None:
    answer = ask(rig, max_output_tokens=3)
    assert answer.status == "incomplete" and answer.output_text == "hello w\ufffd"
    assert answer.incomplete_details.reason == "max_output_tokens"
    (*_, last) = ask(rig, max_output_tokens=3, stream=True)
    assert last.type == "response.incomplete" and last.response.output_text == "hello w\ufffd"
    told = ask(rig, include=["message.output_text.logprobs"], top_logprobs=2)
    found = told.output[0].content[0].logprobs
    assert len(found) == len(rig.script.answer) and len(found[0].top_logprobs) == 2
    scored = {"include": ["message.output_text.logprobs"], "stream": True}
    *events, last = ask(rig, **scored)
    deltas = [one for e in events if e.type.endswith("delta") for one in e.logprobs]
    assert len(last.response.output[0].content[0].logprobs) == len(rig.script.answer)
    assert len(deltas) >= len(rig.script.answer) - 1, "also of half a character"


def test_an_empty_answer_is_a_message(words: Tokenizer) -> None:
    with serving(words, Script([STOP])) as rig:
        assert ask(rig).output_text == ""
        with client(rig).responses.stream(model="tiny", input="x") as stream:
            kinds = [event.type.removeprefix("response.") for event in stream]
    assert kinds[2:4] == ["output_item.added", "content_part.added"]
    assert kinds[4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"previous_response_id": "resp_1"}, "allowed: input with all earlier items"),
        ({"background": True}, "background=true: allowed: false"),
        ({"store": True}, "store=true: allowed: false"),
        ({"truncation": "auto"}, 'truncation="auto": allowed: "disabled"'),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type="),
        ({"max_output_tokens": 0}, "allowed: int >= 1"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"include": ["file_search_call.results"]}, r"include\[0\]=.*: allowed: message"),
        ({"extra_body": {"messages": []}}, "messages: allowed: input"),
        ({"extra_body": {"logprobs": True}}, "logprobs: allowed: include"),
        ({"extra_body": {"max_output_tokens": {}}}, "max_output_tokens={}: allowed: int"),
        ({"tool_choice": {}}, "tool_choice"),
        ({"input": [{"role": "x", "content": "x"}]}, r"input\[…\].role="),
        ({"input": [{"role": "user"}]}, r"input\[…\].content: needed"),
        ({"stream_options": {"include_sources": True}}, "unknown stream_options field"),
        ({"text": {"verbosity": "low"}}, 'verbosity="low": allowed: "medium", max_tokens'),
    ],
)
def test_what_cannot_be_is_refused(rig: Rig, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=said):
        ask(rig, **wrong)
    assert not rig.script.submitted


def test_tools_are_called_and_answered(tmp_path: Path) -> None:
    words = load_tokenizer(str(tiny.write(tmp_path / "tools", chat_template=TOOLS)))
    call = '<tool_call>\n{"name": "rain", "arguments": {"in": "Köln"}}\n</tool_call>'
    with serving(words, Script([*words.encode(f"so <\n{call}"), STOP], burst=3)) as rig:
        told = ask(rig, tools=[TOOL])
        text, called = told.output
        assert text.content[0].text == "so <\n" and called.type == "function_call"
        assert (called.name, json.loads(called.arguments)) == ("rain", {"in": "Köln"})
        events = list(ask(rig, tools=[TOOL], stream=True))
        items = [e.item for e in events if e.type == "response.output_item.done"]
        assert [item.type for item in items] == ["message", "function_call"]
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "no"}
        said = [{"role": "user", "content": "hello?"}, *told.output, result]
        ask(rig, tools=[TOOL], input=said)
        prompts = [words.decode(one.prompt) for one in rig.script.submitted]
        assert prompts[2] == f"{prompts[0]}|so <\n<tool_call>Köln|no"


def test_a_form_of_a_response(tmp_path: Path, words: Tokenizer) -> None:
    module("llguidance", "grammars")
    pydantic = module("pydantic", "the openai client")
    kind = pydantic.create_model("Rain", city=(str, ...), mm=(int, ...))
    text = '{"city": "Köln", "mm": 7}'
    with serving(words, Script([*words.encode(text), STOP])) as rig:
        told = client(rig).responses.parse(model="tiny", input="x", text_format=kind)
        assert told.output_parsed == kind(city="Köln", mm=7)
        assert '"city"' in rig.script.submitted[0].sampling.grammar
        forced = {"type": "function", "name": "rain"}
        ask(rig, tools=[TOOL], tool_choice=forced)
        assert '"rain"' in rig.script.submitted[1].sampling.grammar
