"""/v1/responses of OpenAI's API, without state: a body becomes a chat's, and its answer an object
with `output` items. A conversation is sent whole each time; nothing is stored."""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from msgspec import Struct

from mpissd.common.rounds import Sampling
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.serve.fields import ChatBody, Positive, Problem, Strict, read_fields, refused, shown
from mpissd.serve.request import Exchange, accounts, event, made

_PARAMS = {  # {a chat's field: the response's}
    "logprobs": "include",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
}


@dataclass(eq=False)
class Response(Exchange):
    """A request to /v1/responses, and its answer so far. given: the body."""

    given: Mapping[str, Any] = field(default_factory=dict)
    _count: int = 0  # events so far
    _item: str = field(default_factory=lambda: f"msg_{secrets.token_hex(12)}")  # the message's id
    _said: str | None = None  # the text so far, if there is a message
    _calls: list[dict[str, Any]] = field(default_factory=list)
    _scores: list[dict[str, Any]] = field(default_factory=list)  # log-probabilities of its tokens
    _num_sent: int = 0  # of these in events

    def encode(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Returns the tokens of the conversation, as a list of one; raises as Exchange's."""
        with _named_as_given():
            return super().encode(tokenizer)

    def _event(self, kind: str, **told: Any) -> bytes:
        self._count += 1
        data = {"type": f"response.{kind}", "sequence_number": self._count - 1, **told}
        return f"event: response.{kind}\n".encode() + event(data)

    def _object(self, status: str, output: Sequence[Any] = ()) -> dict[str, Any]:
        """Returns the response object. output: its items."""
        asked, end = self.given, self.end
        reason = "max_output_tokens" if end and end.reason == "length" else "deadline"
        told = {name: asked.get(name) for name in ("instructions", "metadata", "max_output_tokens")}
        return {
            "id": self._head["id"].replace("chatcmpl-", "resp_"),
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "output": list(output),
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "tools": asked.get("tools", []),
            "tool_choice": asked.get("tool_choice", "auto"),
            "text": asked.get("text", {"format": {"type": "text"}}),
            "temperature": self.sampling.temperature,
            "top_p": self.sampling.top_p,
            "store": False,
            **told,
        }

    def _message(self, status: str, *content: dict[str, Any]) -> dict[str, Any]:
        head = {"type": "message", "id": self._item, "role": "assistant"}
        return {**head, "status": status, "content": list(content)}

    def _take(self) -> str:
        """Adds the text, scores and calls since the last time to the answer; returns the text."""
        told = self.choice()
        new = told["delta" if self.asked.stream else "message"]
        text = new.get("content") or ""
        self._scores += (told["logprobs"] or {"content": ()})["content"]
        self._calls += new.get("tool_calls", ())
        if text or (self.end is not None and not self._calls):  # an answer may be empty
            self._said = (self._said or "") + text
        return text

    def part(self) -> bytes:
        """Returns the events of the text since the last call."""
        was_said, text = self._said is not None, self._take()
        place = {"item_id": self._item, "output_index": 0, "content_index": 0}
        events = b""
        if not self._count:
            for kind in ("created", "in_progress"):
                events += self._event(kind, response=self._object("in_progress"))
        if self._said is not None and not was_said:
            item = self._message("in_progress")
            events += self._event("output_item.added", output_index=0, item=item)
            events += self._event("content_part.added", **place, part=_text_part(""))
        if text:
            told = {"delta": text, "logprobs": self._scores[self._num_sent :]}
            self._num_sent = len(self._scores)
            events += self._event("output_text.delta", **place, **told)
        return events

    def ending(self, choices: Sequence[Exchange]) -> bytes:
        """Returns the last events."""
        whole = self.whole(choices)
        events = b""
        for index, item in enumerate(whole["output"]):
            place = {"item_id": item["id"], "output_index": index}
            if item["type"] == "message":
                inner = {**place, "content_index": 0}
                part = item["content"][0]
                told = {"text": part["text"], "logprobs": part["logprobs"]}
                events += self._event("output_text.done", **inner, **told)
                events += self._event("content_part.done", **inner, part=part)
            else:
                begun = {**item, "arguments": "", "status": "in_progress"}
                events += self._event("output_item.added", output_index=index, item=begun)
                kind, text = "function_call_arguments", item["arguments"]
                events += self._event(f"{kind}.delta", **place, delta=text)
                events += self._event(f"{kind}.done", **place, name=item["name"], arguments=text)
            events += self._event("output_item.done", output_index=index, item=item)
        return events + self._event(whole["status"], response=whole)

    def failed(self, problem: Problem) -> bytes:
        """Returns the last event of a stream that failed."""
        error = {"code": "server_error", "message": problem.message}
        return self._event("failed", response={**self._object("failed"), "error": error})

    def whole(self, choices: Sequence[Exchange]) -> dict[str, Any]:
        """Returns the response object of an answer that has ended."""
        assert self.end is not None, "an answer that goes on"
        self._take()
        is_whole = self.is_stopped or self.end.reason == "stop"
        status = "completed" if is_whole else "incomplete"
        items = list[dict[str, Any]]()
        if self._said is not None:
            items.append(self._message(status, _text_part(self._said, self._scores)))
        for call in self._calls:
            name = {"id": call["id"].replace("call_", "fc_"), "call_id": call["id"]}
            items.append({"type": "function_call", **name, **call["function"], "status": status})
        told = accounts(choices)
        used = told["usage"]
        told["usage"] = {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": used["prompt_tokens_details"],
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": used["total_tokens"],
        }
        return {**self._object(status, items), **told}


def _text_part(text: str, scores: Sequence[Any] = ()) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


class _Text(Strict):
    """The form of the answer's text."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _Reasoning(Struct):
    """How much a model reasons, if its template asks."""

    effort: str | None = None


class _StreamOptions(Strict):
    """A stream always has usage, and no padding."""

    include_obfuscation: Literal[False] | None = None


class ResponseBody(Struct):
    """The fields of /v1/responses that a chat does not have, or has in another form."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    stream_options: _StreamOptions | None = None
    text: _Text = msgspec.field(default_factory=_Text)
    reasoning: _Reasoning = msgspec.field(default_factory=_Reasoning)
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] = []
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    n: Literal[1] = 1


def parse_response(given: Mapping[str, Any], defaults: Sampling) -> Response:
    """Makes a Response from a body's fields; raises Problem for a body that is not allowed."""
    for name in sorted(_PARAMS.keys() & given.keys()):
        raise refused(name, _PARAMS[name])
    own = read_fields(given, ResponseBody)
    fields = {k: v for k, v in given.items() if k not in ResponseBody.__struct_fields__}
    said = [{"role": "user", "content": own.input}] if isinstance(own.input, str) else own.input
    fields["messages"] = _messages(said)
    if own.instructions is not None:
        fields["messages"].insert(0, {"role": "system", "content": own.instructions})
    fields["logprobs"] = "message.output_text.logprobs" in own.include or "top_logprobs" in fields
    form = own.text.format
    if form and (schema := {name: value for name, value in form.items() if name != "type"}):
        form = {"type": form.get("type"), "json_schema": schema}
    further = {
        "max_completion_tokens": own.max_output_tokens,
        "response_format": form,
        "verbosity": own.text.verbosity,
        "reasoning_effort": own.reasoning.effort,
        "tools": [_tool(tool) for tool in own.tools],
        "tool_choice": _tool(own.tool_choice),
    }
    fields |= {name: value for name, value in further.items() if value is not None}
    with _named_as_given():
        made_of = made(fields, ChatBody, defaults, Response)
    assert isinstance(made_of, Response)
    made_of.given = given
    return made_of


@contextmanager
def _named_as_given() -> Iterator[None]:
    """Has a Problem name the field of the response that became a chat's."""
    try:
        yield
    except Problem as problem:
        problem.message = re.sub(r"messages\[\d+\]", "input[…]", problem.message, count=1)
        problem.param = _PARAMS.get(problem.param or "", problem.param)
        raise


def _tool(tool: Any) -> Any:
    """Returns a tool as chats describe it."""
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" in tool:
        return tool
    inner = {name: value for name, value in tool.items() if name != "type"}
    return {"type": "function", "function": inner}


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the items of `input` as messages of a chat, an answer's text and its calls as one."""
    messages = list[dict[str, Any]]()
    for place, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({k: v for k, v in item.items() if k in ("role", "content", "name")})
        elif kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant"})
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, (str, list)) else json.dumps(output)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            allowed = "message, function_call, function_call_output"
            raise refused(f"input[{place}].type={shown(kind)}", allowed)
    return messages
