"""One HTTP request: its parsed body, its prompt, and its answer while tokens arrive.

A field of OpenAI's API that is not supported and would change the answer is refused. `deadline_s`,
`mode` and `speculation` are fields of this server only.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import MODES
from mpissd.common.rounds import GREEDY, Biases, Logprob, Sampling
from mpissd.engine.text.answer import AnswerText
from mpissd.engine.text.grammar import make_grammar
from mpissd.engine.text.prompts import check_text
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.serve.protocol import End, Tokens

Parser = Callable[[str, Any], Any]  # makes a value of a field's name and JSON value (not null)
MOST_STOPS, LONGEST_STOP = 16, 1024
MOST_BIASES, MOST_CHOICES = 1024, 8
MOST_TOP = 5  # the most alternatives that are returned with each token
_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# {role: fields that messages of this role may have besides role and content}
_MORE = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
# Fields of OpenAI's answers that clients may send back in messages; empty ones are ignored.
_EMPTY = ("refusal", "annotations", "audio", "function_call")
CALL = "<tool_call>"  # begins a tool call in most models' answers
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class Problem(Exception):
    """Ends a request with an HTTP status and an error message. param: the name of the field at
    fault. code: a machine-readable name of the error. headers: further response headers."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Returns the body of the response, {"error": …} as in OpenAI's API."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


class Piece(NamedTuple):
    """A token of an answer with its text. token: None for text that remains at the end. source:
    what drafted the token, or the target. logprob: that of the token and the likeliest ones, if
    asked for."""

    text: str
    token: int | None = None
    source: str = ""
    logprob: Logprob | None = None


@dataclass(eq=False)
class Exchange:
    """A request and its answer so far. A request for n answers has n such objects ("choices").

    The first fields are those of the body; None means that a default is still to be filled in.
    subject: messages, a text, or token ids. form: the form that answers must have: (the field of
    the body that asks for it, kind and value for make_grammar). prompt: token ids. id: names the
    choice in messages to the lead (the target's rank 0), set by `Lead.submit`. messages: the lead's
    messages about any of the n choices; a Problem says why the lead is gone. index: the number of
    the choice. is_sent: whether the lead has the choice. ends_s, first_s: the times of the deadline
    and of the first token. num_tokens: tokens in the text; the lead may have decoded more. end: the
    lead's last message about the choice.
    """

    is_chat: bool
    subject: Any
    model: str | None = None
    max_tokens: int | None = None
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    include_sources: bool = False
    deadline_s: float | None = None
    n: int = 1
    tools: Sequence[Any] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    form: tuple[str, str, Any] | None = None

    prompt: list[int] = field(default_factory=list)
    id: int = 0
    messages: asyncio.Queue[Tokens | End | Problem] = field(default_factory=asyncio.Queue)
    num_tokens: int = 0
    num_rounds: int = 0
    num_hits: int = 0
    index: int = 0
    is_sent: bool = False
    ends_s: float = math.inf
    first_s: float = 0.0
    end: End | None = None
    _new: list[Piece] = field(default_factory=list)  # tokens that are not in a response yet
    _held: str = ""  # text of a stream that may begin a tool call
    _has_role: bool = False  # whether the stream's first response was made
    _text: AnswerText = field(init=False)
    _head: dict[str, Any] = field(init=False)
    _tokenizer: Tokenizer = field(init=False)

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the prompt's tokens, and stores the grammar that `form` asks for. Raises Problem
        if there are no tokens, or if no answer can match the grammar."""
        subject = self.subject
        if self.form is not None:
            try:
                grammar = make_grammar(*self.form, tokenizer)
            except ConfigError as error:
                raise Problem(400, str(error), self.form[0]) from error
            self.sampling = replace(self.sampling, grammar=grammar)
        try:
            if self.is_chat:
                begins, continues = self.add_generation_prompt, self.continue_final_message
                tokens = tokenizer.chat(subject, self.tools, begins=begins, continues=continues)
            elif isinstance(subject, str):
                tokens = tokenizer.encode(subject)
            else:
                tokens = list(subject)
        except ConfigError as error:
            raise Problem(400, str(error), "messages" if self.is_chat else "prompt") from error
        if not tokens:
            raise Problem(400, "prompt: has no tokens", "prompt")
        return tokens

    def begin(self, tokenizer: Tokenizer, stop_ids: Collection[int], model: str) -> list[Exchange]:
        """Prepares and returns the n choices (answers). stop_ids: tokens that end an answer. model:
        the model's name for responses."""
        self._tokenizer = tokenizer
        self._head = {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}",
            "object": "chat.completion" if self.is_chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        if self.is_chat and self.stream:
            self._head["object"] += ".chunk"
        choices = [self, *(copy(self) for _ in range(1, self.n))]
        for index, choice in enumerate(choices):
            choice.index, choice._new = index, []
            choice._text = AnswerText(tokenizer, self.stop, stop_ids, self.prompt)
            if index and self.sampling.seed is not None:
                seed = (self.sampling.seed + index) % 2**63
                choice.sampling = replace(self.sampling, seed=seed)
        return choices

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended at a stop token or stop string."""
        return self._text.ended is not None

    def add(self, message: Tokens) -> None:
        """Appends the tokens of one round to the answer, up to its end."""
        for place, token in enumerate(message.tokens):
            if self.is_stopped:
                break
            source = message.sources[place] if message.sources else ""
            logprob = None if message.logprobs is None else message.logprobs[place]
            self._new.append(Piece(self._text.push(token), token, source, logprob))
            self.num_tokens += 1
        self.num_rounds, self.num_hits = self.num_rounds + 1, message.hits

    def close(self, end: End) -> None:
        """Ends the answer; adds text that was held back as the possible start of a stop string."""
        if rest := self._text.flush():
            self._new.append(Piece(rest))
        self.end = end

    def to_dict(self) -> dict[str, Any]:
        """Returns OpenAI's response object for the text since the last call, a part of a stream."""
        new = self._new
        answer = {**self._head, "choices": [self.choice()]}
        if self.include_sources:
            answer["speculation"] = {
                "pieces": [(piece.text, piece.source) for piece in new],
                "tokens": self.num_tokens,
                "rounds": self.num_rounds,
                "hits": self.num_hits,
            }
        return answer

    def choice(self) -> dict[str, Any]:
        """Returns the text since the last call as an element of OpenAI's list `choices`."""
        new, self._new = self._new, []
        text, calls = self._held + "".join(piece.text for piece in new), list[dict[str, Any]]()
        if self.tools and CALL in (self._tokenizer.template or ""):
            if self.end is not None:
                text, calls = called(text)
            else:
                ends = (len(text) - n for n in range(len(CALL), -1, -1) if text.endswith(CALL[:n]))
                at = text.find(CALL) if CALL in text else next(ends)
                text, self._held = text[:at], text[at:]
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            said: dict[str, Any] = {} if self._has_role else {"role": "assistant"}
            said |= {"content": text} if text or said else {}
            said |= {"content": text or None, "tool_calls": calls} if calls else {}
            content, self._has_role = {"delta" if self.stream else "message": said}, True
        logprobs, finish = self._logprobs(new), None
        if self.end is not None:
            finish = "stop" if self.is_stopped else self.end.reason
            finish = "tool_calls" if calls else finish
        return {"index": self.index, **content, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(self, new: Sequence[Piece]) -> dict[str, Any] | None:
        """Returns log-probabilities in OpenAI's form for a chat or a completion; None if no token
        has any. `bytes` is None for a token that is only a part of a character."""

        def named(token: int, value: float) -> dict[str, Any]:
            name = self._tokenizer.piece(token)
            raw = None if "\N{REPLACEMENT CHARACTER}" in name else list(name.encode())
            return {"token": name, "logprob": value, "bytes": raw}

        content = [
            {**named(token, found[0]), "top_logprobs": [named(*each) for each in found[1]]}
            for _, token, _, found in new
            if token is not None and found is not None
        ]
        if not content or self.is_chat:
            return {"content": content, "refusal": None} if content else None
        names, values = ([each[key] for each in content] for key in ("token", "logprob"))
        known = ([*each["top_logprobs"], each] for each in content)
        tops = [{one["token"]: one["logprob"] for one in each} for each in known]
        parts = {"tokens": names, "token_logprobs": values, "text_offset": None}
        return {**parts, "top_logprobs": tops if self.sampling.logprobs else None}


def whole(choices: Sequence[Exchange]) -> dict[str, Any]:
    """Returns OpenAI's response object for choices that have ended, with their numbers of tokens.
    `speculation` is a field of this server only."""
    first, ends = choices[0], [one.end for one in choices if one.end is not None]
    prompt, tokens = len(first.prompt), sum(one.num_tokens for one in choices)
    names = ("drafted", "accepted", "hits", "rounds", "forced")
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": tokens,
        "total_tokens": prompt + tokens,
        "prompt_tokens_details": {"cached_tokens": ends[0].cached},
        "speculation": {name: sum(getattr(end, name) for end in ends) for name in names},
    }
    return {**first._head, "choices": [one.choice() for one in choices], "usage": usage}


def called(text: str) -> tuple[str, list[dict[str, Any]]]:
    """Splits an answer into its text and its tool calls, each of which is CALL and a JSON object of
    name and arguments. If a call has another form, or is not valid Unicode, everything is text."""
    content, *parts = text.split(CALL)
    calls = list[dict[str, Any]]()
    try:
        for part in parts:
            call = json.loads(part.partition("</tool_call>")[0])
            json.dumps(call, ensure_ascii=False).encode()
            arguments = json.dumps(call["arguments"], allow_nan=False)
            function = {"name": str(call["name"]), "arguments": arguments}
            name = {"index": len(calls), "id": f"call_{secrets.token_hex(12)}"}
            calls.append({**name, "type": "function", "function": function})
    except (ValueError, TypeError, LookupError, RecursionError):
        return text, []
    return content, calls


def shown(value: Any) -> str:
    """Returns a JSON value as text for an error message, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except RecursionError:  # the parser accepts deeper nesting than json.dumps
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}…"


def _refused(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name}={shown(value)}: allowed: {allowed}")


def _field(is_allowed: Callable[[Any], bool], allowed: str, make: type | None = None) -> Parser:
    """Returns a parser that raises ConfigError unless is_allowed(value); `allowed` describes the
    allowed values. make: a type that converts the value (None: no conversion)."""

    def parse(name: str, value: Any) -> Any:
        if not is_allowed(value):
            raise _refused(name, value, allowed)
        return value if make is None else make(value)

    return parse


def _integer(low: int, high: float = math.inf) -> Parser:
    allowed = f">= {low}" if high == math.inf else f"in [{low}, {high}]"
    return _field(lambda v: type(v) is int and low <= v <= high, f"a whole number {allowed}")


def _real(low: float, high: float, *, is_open: bool = False) -> Parser:
    def is_allowed(value: Any) -> bool:
        return type(value) in (int, float) and low <= value <= high and not (is_open and not value)

    least = f"{'above' if is_open else '>='} {low:g}"
    return _field(is_allowed, f"a number {least}, at most {high:g}", float)


def _only(*neutral: Any) -> Parser:
    """Returns a parser of an unsupported API field: it accepts only values without effect."""
    return _field(
        lambda value: any(value == each and type(value) is type(each) for each in neutral),
        ", ".join(map(json.dumps, neutral)),
    )


def _stops(name: str, value: Any) -> tuple[str, ...]:
    """Parses `stop`: one stop string or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts
    ):
        raise _refused(name, value, f"a string, or up to {MOST_STOPS} strings, none empty")
    if len(texts) > MOST_STOPS:
        raise ConfigError(f"{name}: {len(texts)} strings: allowed: at most {MOST_STOPS}")
    return tuple(check_text(name, text) for text in texts)


def _bias(name: str, value: Any) -> Biases:
    """Parses `logit_bias`, an object {token id: addend to its logit}."""
    is_map = isinstance(value, dict) and len(value) <= MOST_BIASES
    if not is_map or not all(re.fullmatch("0|[1-9][0-9]{0,8}", token) for token in value):
        raise _refused(name, value, f'{{"TOKEN ID": NUMBER}} of at most {MOST_BIASES} tokens')
    return tuple((int(token), _real(-100, 100)(name, bias)) for token, bias in value.items())


def _members(name: str, value: Any, known: Mapping[str, Parser]) -> dict[str, Any]:
    """Parses an object whose fields have the parsers `known`; null fields count as absent."""
    if not isinstance(value, dict):
        raise _refused(name, value, "an object")
    for each in value:
        if each not in known:
            raise unknown("field", shown(each)[1:-1], known)
    return {each: known[each](each, part) for each, part in value.items() if part is not None}


def _messages(name: str, value: Any) -> list[dict[str, str]]:
    """Parses `messages`: a list of {"role", "content"}, whose content is text."""
    if not isinstance(value, list) or not value:
        raise _refused(name, value, "a list of at least one message")
    messages = []
    for place, each in enumerate(value):
        here = f"{name}[{place}]"
        if not isinstance(each, dict):
            raise _refused(here, each, '{"role": "…", "content": "…"}')
        given = {k: v for k, v in each.items() if v is not None and (v or k not in _EMPTY)}
        role, content = given.get("role"), given.get("content")
        known = ("role", "content", *(_MORE.get(role, ()) if isinstance(role, str) else ()))
        if extra := given.keys() - {*known}:
            raise unknown(f"{here} field", min(extra), known)
        if not isinstance(role, str) or role not in _ROLES:
            raise _refused(f"{here}.role", role, ", ".join(_ROLES))
        if isinstance(content, list):
            texts = [
                part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
                for part in content
            ]
            if not all(isinstance(text, str) for text in texts):
                allowed = 'text, or parts {"type": "text", "text": "…"}'
                raise _refused(f"{here}.content", content, allowed)
            content = "".join(map(str, texts))
        if calls := given.pop("tool_calls", None):  # templates read an empty list as calls
            _read_arguments(f"{here}.tool_calls", calls)
            given["tool_calls"] = calls
        if content is None and role == "assistant":  # an answer may be only tool calls, or empty
            content = ""
        is_blank = isinstance(content, str) and not content.strip()
        if not is_blank:  # an answer or a tool's result may be blank, so it is not checked
            check_text(f"{here}.content", content)
        messages.append({**given, "role": _ROLES[role], "content": content})
    return messages


def _read_arguments(name: str, calls: Any) -> None:
    """Replaces the arguments of tool calls, JSON texts, by the objects that templates expect."""
    try:
        for call in calls:
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    except (TypeError, LookupError, ValueError, RecursionError) as error:
        allowed = '[{"function": {"name": "…", "arguments": "{…}"}}, …]'
        raise _refused(name, calls, allowed) from error


def _is_tool(value: Any) -> bool:
    function = value.get("function") if isinstance(value, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _prompt(name: str, value: Any) -> str | list[int]:
    """Parses `prompt`: a text, a list of token ids, or a list with one text or one such list."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if not isinstance(value, list):
        return check_text(name, value)
    if not value or not all(type(token) is int and token >= 0 for token in value):
        raise _refused(name, value, "one text, or one list of token ids")
    return value


def _response_format(name: str, value: Any) -> tuple[str, str, Any] | None:
    """Parses `response_format`; returns the value of Exchange.form (None for {"type": "text"})."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        inner = value.get(kind)
        schema = inner.get("schema") if isinstance(inner, dict) else None
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        allowed = '{"type": "text"}, "json_object", or "json_schema" with {"schema": {…}}'
        raise _refused(name, value, allowed)
    return name, "json", json.dumps(schema)


def _guided(kind: str, is_allowed: Callable[[Any], bool], allowed: str) -> Parser:
    """Returns a parser of guided_regex or guided_choice, which makes a value of Exchange.form.
    kind: the kind of grammar, as make_grammar names it."""
    parse = _field(is_allowed, allowed)
    return lambda name, value: (name, kind, parse(name, value))


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) and v for v in value)


_boolean = _field(lambda value: isinstance(value, bool), "true, false")
_text = _field(lambda value: isinstance(value, str), "a string")
_STREAM_OPTIONS = {"include_usage": _boolean, "include_sources": _boolean}
_SPECULATION = {"lookahead": _integer(0)}
_COMMON: dict[str, Parser] = {
    "model": _text,
    "max_tokens": _integer(1),
    "stream": _boolean,
    "stream_options": lambda name, value: _members(name, value, _STREAM_OPTIONS),
    "temperature": _real(0, 2),
    "top_p": _real(0, 1, is_open=True),
    "seed": _integer(0, 2**63 - 1),
    "stop": _stops,
    "deadline_s": _real(0, 86400, is_open=True),
    "mode": _field(lambda value: value in MODES, ", ".join(MODES)),
    "speculation": lambda name, value: _members(name, value, _SPECULATION),
    "user": _text,
    "n": _integer(1, MOST_CHOICES),
    "presence_penalty": _real(-2, 2),
    "frequency_penalty": _real(-2, 2),
    "logit_bias": _bias,
    "response_format": _response_format,
    "guided_regex": _guided("regex", lambda value: isinstance(value, str), "a string"),
    "guided_choice": _guided("choice", _are_texts, "a list of strings, none empty"),
}
_FORMS = "response_format", "guided_regex", "guided_choice"

_CHAT: dict[str, Parser] = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": _integer(1),
    "logprobs": _boolean,
    "top_logprobs": _integer(0, MOST_TOP),
    "tools": _field(
        lambda value: isinstance(value, list) and all(map(_is_tool, value)),
        '[{"type": "function", "function": {"name": "…", …}}, …]',
    ),
    "tool_choice": _field(lambda value: value in ("auto", "none"), "auto, none"),
    "parallel_tool_calls": _only(True),
    "add_generation_prompt": _boolean,
    "continue_final_message": _boolean,
    "store": _only(False),
}
_COMPLETION: dict[str, Parser] = {
    **_COMMON,
    "prompt": _prompt,
    "logprobs": _integer(0, MOST_TOP),
    "best_of": _only(1),
    "echo": _only(False),
    "suffix": _only(""),
}


def parse(body: bytes, *, is_chat: bool, defaults: Sampling = GREEDY) -> Exchange:
    """Makes an Exchange from a request's body. defaults: sampling values for fields that are
    absent. Raises Problem(400) for a body that is not allowed."""
    known, subject = (_CHAT, "messages") if is_chat else (_COMPLETION, "prompt")
    try:
        fields = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is no UTF-8 text (byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise Problem(400, "the body is no JSON object")
    values: dict[str, Any] = {}
    for name, value in fields.items():
        try:
            values |= _members("body", {name: value}, known)
        except ConfigError as error:
            raise Problem(400, str(error), shown(name)[1:-1]) from error
    if subject not in values:
        raise Problem(400, f"{subject}: needed", subject)
    logprobs = values.get("logprobs")
    forms = [values[name] for name in _FORMS if values.get(name) is not None]
    if len(forms) > 1:
        raise Problem(400, f"{forms[1][0]} with {forms[0][0]}: allowed: one of them", forms[1][0])
    if is_chat:
        top = values.get("top_logprobs")
        if top and not logprobs:
            raise Problem(400, f"top_logprobs={top}: allowed: with logprobs=true", "top_logprobs")
        logprobs = (top or 0) if logprobs else None
    values |= {**values.get("speculation", {}), "logprobs": logprobs}
    names = Sampling.__dataclass_fields__.keys() & values.keys()
    sampling = replace(defaults, **{name: values[name] for name in names})
    if not sampling.temperature:
        sampling = replace(sampling, top_p=1.0)  # top_p has no effect at temperature 0
    own = Exchange.__dataclass_fields__.keys() - {subject, "max_tokens"}
    if values.get("tool_choice") == "none":
        values["tools"] = ()
    if values.get("add_generation_prompt") and values.get("continue_final_message"):
        message = "continue_final_message=true: allowed: add_generation_prompt=false"
        raise Problem(400, message, "continue_final_message")
    return Exchange(
        is_chat,
        values[subject],
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens")),
        sampling=sampling,
        form=forms[0] if forms else None,
        **values.get("stream_options", {}),
        **{name: value for name, value in values.items() if name in own},
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
