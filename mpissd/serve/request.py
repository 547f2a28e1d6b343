"""One request at the front: its parsed body, its prompt, and its answer while that arrives.

A field of OpenAI's API that would change an answer and is not supported is refused, unless its
value changes nothing. `deadline_s` and `mode` are this server's own.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import MODES
from mpissd.engine.workload.text.prompts import check_text
from mpissd.engine.workload.text.stops import AnswerText
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.protocol import End, RefusedRequest, Tokens

Parser = Callable[[str, Any], Any]  # takes a field's name and its JSON value, which is never null
MOST_STOPS, LONGEST_STOP = 16, 1024
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class Problem(Exception):
    """Ends a request with a status. param: the field at fault. headers: of the response."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def to_dict(self) -> dict[str, Any]:
        """Returns {"error": …} as clients of OpenAI's API expect it."""
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _KINDS.get(self.status, default)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Piece:
    """New text of an answer.

    logprobs: (token, natural logarithm of its probability) pairs. sources: (text, origin of its
    token) pairs.
    """

    text: str = ""
    logprobs: Sequence[tuple[int, float]] = ()
    sources: Sequence[tuple[str, str]] = ()

    def __add__(self, other: Piece) -> Piece:
        return Piece(
            self.text + other.text,
            [*self.logprobs, *other.logprobs],
            [*self.sources, *other.sources],
        )


@dataclass(eq=False)
class Request:
    """A request and the state of its answer.

    The first fields are the body's; None means that the server's default is missing yet. subject: a
    conversation, a text, or token ids. prompt: its tokens. id: of the lead's messages, chosen by
    `Lead.submit`. is_cancelled: whether the lead was asked to end it. is_left: whether its client
    is gone. num_tokens: up to the end of the text, also if the lead decoded further. finish: the
    finish reason, None until the end.
    """

    is_chat: bool
    subject: Any
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    include_sources: bool = False
    deadline_s: float | None = None
    mode: str | None = None

    arrived_s: float = field(default_factory=time.monotonic)
    prompt: list[int] = field(default_factory=list)
    id: int = 0
    is_cancelled: bool = False
    is_left: bool = False
    num_tokens: int = 0
    num_rounds: int = 0
    num_hits: int = 0
    first_s: float = 0.0  # when its first token arrived
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    _text: AnswerText = field(init=False)
    _tokenizer: Tokenizer = field(init=False)
    _created: float = field(default_factory=time.time)
    _name: str = field(default_factory=lambda: secrets.token_hex(12))
    _messages: asyncio.Queue[Tokens | End | RefusedRequest | Problem] = field(
        default_factory=asyncio.Queue
    )

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens of the subject; raises Problem if there are none."""
        subject = self.subject
        try:
            if self.is_chat:
                tokens = tokenizer.chat(subject)
            elif isinstance(subject, str):
                tokens = tokenizer.encode(subject)
            elif max(subject) >= tokenizer.vocab_size:
                allowed = f"0..{tokenizer.vocab_size - 1}"
                raise ConfigError(f"prompt: token {max(subject)}: allowed: {allowed}")
            else:
                tokens = list(subject)
        except ConfigError as error:
            raise Problem(400, str(error), "messages" if self.is_chat else "prompt") from error
        if not tokens:
            raise Problem(400, "prompt: has no tokens", "prompt")
        return tokens

    def begin(self, tokenizer: Tokenizer, stop_ids: Collection[int], model: str) -> None:
        """Prepares the answer. model: the name that it carries."""
        self._tokenizer, self.model = tokenizer, model
        self._text = AnswerText(tokenizer, self.stop, stop_ids)

    def put(self, message: Tokens | End | RefusedRequest | Problem) -> None:
        """Adds a message of the lead, or the reason why the lead is gone."""
        if not self.is_left:
            self._messages.put_nowait(message)

    async def take(self) -> Tokens | End:
        """Waits for the next message; raises Problem if the lead refused or is gone."""
        message = await self._messages.get()
        if isinstance(message, RefusedRequest):
            raise Problem(message.status, message.message)
        if isinstance(message, Problem):
            raise message
        return message

    @property
    def has_more(self) -> bool:
        """Whether `take` returns at once."""
        return not self._messages.empty()

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended by itself."""
        return self._text.ended is not None

    def add(self, message: Tokens) -> Piece:
        """Adds the tokens of a round; returns the text that can be shown now."""
        sources, logprobs = [], []
        for place, token in enumerate(message.tokens):
            if self.is_stopped:
                break
            source = message.sources[place] if message.sources else ""
            sources.append((self._text.push(token), source))
            self.num_tokens += 1
            if message.logprobs is not None:
                logprobs.append((token, message.logprobs[place]))
        self.num_rounds, self.num_hits = self.num_rounds + 1, message.hits
        return Piece("".join(text for text, _ in sources), logprobs, sources)

    def close(self, end: End) -> Piece:
        """Ends the answer; returns the text that was held back.

        `usage` then holds the counts of the whole request; its `speculation` is this server's own.
        """
        self.finish = "stop" if self.is_stopped else end.reason
        prompt, answer = len(self.prompt), self.num_tokens
        self.usage = {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": end.cached},
            "speculation": {
                name: getattr(end, name) for name in ("drafted", "accepted", "hits", "rounds")
            },
        }
        rest = self._text.flush()
        return Piece(rest, sources=[(rest, "")] if rest else [])

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns OpenAI's object of a whole answer."""
        content: dict[str, Any] = {"text": piece.text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": piece.text}}
        return {**self._object("", content, piece), "usage": self.usage}

    def chunk(self, piece: Piece, *, is_first: bool = False) -> dict[str, Any]:
        """Returns OpenAI's object of a part of an answer."""
        content: dict[str, Any] = {"text": piece.text}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            text = {"content": piece.text} if piece.text or is_first else {}
            content = {"delta": {**role, **text}}
        chunk = self._object(".chunk", content, piece)
        if self.include_sources:
            counts = "tokens", "rounds", "hits"
            speculation = {name: getattr(self, f"num_{name}") for name in counts}
            chunk["speculation"] = {"pieces": piece.sources, **speculation}
        return chunk

    def last(self) -> dict[str, Any]:
        """Returns the object that ends a stream with its usage."""
        return {**self._object(".chunk", {}, Piece()), "choices": [], "usage": self.usage}

    def _object(self, part: str, content: Mapping[str, Any], piece: Piece) -> dict[str, Any]:
        choice = {
            "index": 0,
            **content,
            "logprobs": self._logprobs(piece),
            "finish_reason": self.finish,
        }
        return {
            "id": f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self._name}",
            "object": f"chat.completion{part}" if self.is_chat else "text_completion",
            "created": int(self._created),
            "model": self.model,
            "choices": [choice],
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        """Returns the probabilities; `bytes` is None for a token that is a part of a character."""
        if not piece.logprobs:
            return None
        decode = self._tokenizer.decode
        named = [(decode([token], specials=True), p) for token, p in piece.logprobs]
        if not self.is_chat:
            parts = {"tokens": [name for name, _ in named], "token_logprobs": [p for _, p in named]}
            return {**parts, "top_logprobs": None, "text_offset": None}
        content = [
            {
                "token": name,
                "logprob": p,
                "bytes": None if "\N{REPLACEMENT CHARACTER}" in name else list(name.encode()),
                "top_logprobs": [],
            }
            for name, p in named
        ]
        return {"content": content, "refusal": None}


def shown(value: Any) -> str:
    """Returns a JSON value as text, cut to a length that fits a message."""
    try:
        text = json.dumps(value)
    except RecursionError:  # nested as deep as the parser just accepts
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:57]}…"


def _field(
    is_allowed: Callable[[Any], bool],
    allowed: str,
    make: Callable[[Any], Any] = lambda value: value,
) -> Parser:
    """Returns a parser of the values that are allowed; `allowed` describes them."""

    def parse(name: str, value: Any) -> Any:
        if not is_allowed(value):
            raise ConfigError(f"{name}={shown(value)}: allowed: {allowed}")
        return make(value)

    return parse


def _whole(low: int, high: int | None = None) -> Parser:
    allowed = f"a whole number >= {low}" if high is None else f"a whole number in [{low}, {high}]"
    most = math.inf if high is None else high
    return _field(lambda value: type(value) is int and low <= value <= most, allowed)


def _real(low: float, high: float, *, open_low: bool = False) -> Parser:
    def is_allowed(value: Any) -> bool:
        is_number = type(value) in (int, float)
        return is_number and low <= value <= high and not (open_low and value == low)

    allowed = f"a number {'above' if open_low else '>='} {low:g}, at most {high:g}"
    return _field(is_allowed, allowed, float)


def _only(*neutral: Any) -> Parser:
    """Parses a field that is not supported, and whose neutral values change nothing."""
    return _field(
        lambda value: any(value == each and type(value) is type(each) for each in neutral),
        ", ".join(map(json.dumps, neutral)),
    )


def _stops(name: str, value: Any) -> tuple[str, ...]:
    """Parses a stop string or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(
        isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in texts
    ):
        allowed = f"a string, or up to {MOST_STOPS} strings, none empty"
        raise ConfigError(f"{name}={shown(value)}: allowed: {allowed}")
    if len(texts) > MOST_STOPS:
        raise ConfigError(f"{name}: {len(texts)} strings: allowed: at most {MOST_STOPS}")
    return tuple(check_text(name, text) if text.strip() else text for text in texts)


def _members(name: str, value: Any, known: Mapping[str, Parser]) -> dict[str, Any]:
    """Parses an object's fields; fields that are null count as absent."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={shown(value)}: allowed: an object")
    for each in value:
        if each not in known:
            raise unknown("field", shown(each)[1:-1], known)
    return {each: known[each](each, part) for each, part in value.items() if part is not None}


def _messages(name: str, value: Any) -> list[dict[str, str]]:
    """Parses a conversation: a list of {"role", "content"} with text content."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{name}={shown(value)}: allowed: a list of at least one message")
    return [_message(f"{name}[{place}]", each) for place, each in enumerate(value)]


def _message(name: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        allowed = '{"role": "…", "content": "…"}'
        raise ConfigError(f"{name}={shown(value)}: allowed: {allowed}")
    message = {each: part for each, part in value.items() if part is not None}
    if extra := message.keys() - {"role", "content"}:
        raise unknown(f"{name} field", min(extra), ("role", "content"))
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise ConfigError(f"{name}.role={shown(role)}: allowed: {', '.join(_ROLES)}")
    if isinstance(content, list):
        texts = [
            part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
            for part in content
        ]
        if not texts or not all(isinstance(text, str) for text in texts):
            allowed = 'text, or parts {"type": "text", "text": "…"}'
            raise ConfigError(f"{name}.content={shown(content)}: allowed: {allowed}")
        content = "".join(map(str, texts))
    return {"role": _ROLES[role], "content": check_text(f"{name}.content", content)}


def _prompt(name: str, value: Any) -> str | list[int]:
    """Parses a text or a list of token ids; a list of one of them counts as that one."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, list):
        if not value or not all(type(token) is int and token >= 0 for token in value):
            allowed = "one text, or one list of token ids"
            raise ConfigError(f"{name}={shown(value)}: allowed: {allowed}")
        return value
    return check_text(name, value)


_boolean = _field(lambda value: isinstance(value, bool), "true, false")
_text = _field(lambda value: isinstance(value, str), "a string")
_STREAM_OPTIONS = {"include_usage": _boolean, "include_sources": _boolean}
_COMMON: dict[str, Parser] = {
    "model": _text,
    "max_tokens": _whole(1),
    "stream": _boolean,
    "stream_options": lambda name, value: _members(name, value, _STREAM_OPTIONS),
    "temperature": _real(0, 2),
    "top_p": _real(0, 1, open_low=True),
    "seed": _whole(0, 2**63 - 1),
    "stop": _stops,
    "deadline_s": _real(0, 86400, open_low=True),
    "mode": _field(lambda value: value in MODES, ", ".join(MODES)),
    "user": _text,
    "n": _only(1),
    "presence_penalty": _only(0, 0.0),
    "frequency_penalty": _only(0, 0.0),
    "logit_bias": _only({}),
}
_CHAT: dict[str, Parser] = {
    **_COMMON,
    "messages": _messages,
    "max_completion_tokens": _whole(1),
    "logprobs": _boolean,
    "top_logprobs": _only(0),
    "response_format": _only({"type": "text"}),
    "tools": _only([]),
    "store": _only(False),
}
_COMPLETION: dict[str, Parser] = {
    **_COMMON,
    "prompt": _prompt,
    "logprobs": _only(0),
    "best_of": _only(1),
    "echo": _only(False),
    "suffix": _only(""),
}


def parse(body: bytes, *, is_chat: bool) -> Request:
    """Returns the request of a body; raises Problem(400)."""
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
    names = ("model", "temperature", "top_p", "seed", "stop", "stream", "deadline_s", "mode")
    return Request(
        is_chat,
        values[subject],
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens")),
        logprobs=bool(logprobs) if is_chat else logprobs is not None,
        **values.get("stream_options", {}),
        **{name: values[name] for name in names if name in values},
    )


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
