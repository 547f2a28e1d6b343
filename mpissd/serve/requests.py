"""The body of a request: its fields, their allowed values, and the prompt's tokens.

A field of OpenAI's API that would change an answer and is not supported is refused, unless its
value changes nothing. `deadline_s` and `mode` are this server's own.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from mpissd.common.errors import ConfigError, unknown
from mpissd.common.flags import MODES
from mpissd.engine.workload.text.prompts import check_text
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.lead import Problem

Parser = Callable[[str, Any], Any]  # takes a field's name and its JSON value, which is never null
MOST_STOPS, LONGEST_STOP = 16, 1024
_ROLES = {role: role for role in ("system", "user", "assistant")} | {"developer": "system"}


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


_boolean = _field(lambda value: isinstance(value, bool), "true, false")
_text = _field(lambda value: isinstance(value, str), "a string")
_mode = _field(lambda value: value in MODES, ", ".join(MODES))


def _is_stop(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_STOP


def _stops(name: str, value: Any) -> tuple[str, ...]:
    """Parses a stop string or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(map(_is_stop, texts)):
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


def _stream_options(name: str, value: Any) -> dict[str, bool]:
    return _members(name, value, {"include_usage": _boolean, "include_sources": _boolean})


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
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ConfigError(f"{name}.role={shown(role)}: allowed: {', '.join(_ROLES)}")
    content = message.get("content")
    if isinstance(content, list):
        parts = [each.get("text") if _is_text_part(each) else None for each in content]
        if not parts or not all(isinstance(part, str) for part in parts):
            allowed = 'text, or parts {"type": "text", "text": "…"}'
            raise ConfigError(f"{name}.content={shown(content)}: allowed: {allowed}")
        content = "".join(map(str, parts))
    return {"role": _ROLES[role], "content": check_text(f"{name}.content", content)}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text"


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


_COMMON: dict[str, Parser] = {
    "model": _text,
    "max_tokens": _whole(1),
    "stream": _boolean,
    "stream_options": _stream_options,
    "temperature": _real(0, 2),
    "top_p": _real(0, 1, open_low=True),
    "seed": _whole(0, 2**63 - 1),
    "stop": _stops,
    "deadline_s": _real(0, 86400, open_low=True),
    "mode": _mode,
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


@dataclass(frozen=True)
class Ask:
    """A request: its subject (a conversation, a text or token ids), and how to answer it."""

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

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens of the subject; raises Problem if there are none."""
        try:
            tokens = self._encoded(tokenizer)
        except ConfigError as error:
            raise Problem(400, str(error), "messages" if self.is_chat else "prompt") from error
        if not tokens:
            raise Problem(400, "prompt: has no tokens", "prompt")
        return tokens

    def _encoded(self, tokenizer: Tokenizer) -> list[int]:
        if self.is_chat:
            return tokenizer.chat(self.subject)
        if isinstance(self.subject, str):
            return tokenizer.encode(self.subject)
        if max(self.subject) >= tokenizer.vocab_size:
            allowed = f"0..{tokenizer.vocab_size - 1}"
            raise ConfigError(f"prompt: token {max(self.subject)}: allowed: {allowed}")
        return list(self.subject)


def parse(body: bytes, *, is_chat: bool) -> Ask:
    """Returns the request of a body; raises Problem(400)."""
    known, subject = (_CHAT, "messages") if is_chat else (_COMPLETION, "prompt")
    values: dict[str, Any] = {}
    for name, value in _object(body).items():
        try:
            values |= _members("body", {name: value}, known)
        except ConfigError as error:
            raise Problem(400, str(error), shown(name)[1:-1]) from error
    if subject not in values:
        raise Problem(400, f"{subject}: needed", subject)
    logprobs = values.get("logprobs")
    names = ("model", "temperature", "top_p", "seed", "stop", "stream", "deadline_s", "mode")
    return Ask(
        is_chat=is_chat,
        subject=values[subject],
        max_tokens=values.get("max_completion_tokens", values.get("max_tokens")),
        logprobs=bool(logprobs) if is_chat else logprobs is not None,
        **values.get("stream_options", {}),
        **{name: values[name] for name in names if name in values},
    )


def _object(body: bytes) -> dict[str, Any]:
    """Parses a body; raises Problem for bad UTF-8, bad JSON, and JSON that is no object."""
    try:
        value = json.loads(body.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is no UTF-8 text (byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise Problem(400, "the body is no JSON object")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
