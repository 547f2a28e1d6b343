"""A request's body, judged and encoded: what OpenAI's API says, where this server can do it.

A field that would change an answer and is not supported is refused, unless its value changes
nothing. `deadline_s` alone is this server's own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.http import fields
from mpissd.serve.http.problem import Problem

_COMMON: dict[str, fields.Parser] = {
    "model": fields.text,
    "max_tokens": fields.whole(1),
    "stream": fields.boolean,
    "stream_options": fields.stream_options,
    "temperature": fields.real(0, 2),
    "top_p": fields.real(0, 1, open_low=True),
    "seed": fields.whole(0, 2**63 - 1),
    "stop": fields.stops,
    "deadline_s": fields.real(0, 86400, open_low=True),
    "user": fields.text,
    "n": fields.only(1),
    "presence_penalty": fields.only(0, 0.0),
    "frequency_penalty": fields.only(0, 0.0),
    "logit_bias": fields.only({}),
}
_CHAT: dict[str, fields.Parser] = {
    **_COMMON,
    "messages": fields.messages,
    "max_completion_tokens": fields.whole(1),
    "logprobs": fields.boolean,
    "top_logprobs": fields.only(0),
    "response_format": fields.only({"type": "text"}),
    "tools": fields.only([]),
    "store": fields.only(False),
}
_COMPLETION: dict[str, fields.Parser] = {
    **_COMMON,
    "prompt": fields.prompt,
    "logprobs": fields.only(0),
    "best_of": fields.only(1),
    "echo": fields.only(False),
    "suffix": fields.only(""),
}


@dataclass(frozen=True)
class Ask:
    """A request: what it is about (a conversation, a text or token ids), and how to answer."""

    is_chat: bool
    about: Any
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    deadline_s: float | None = None

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """Returns the tokens of what it is about; raises Problem where there are none."""
        try:
            found = self._encoded(tokenizer)
        except ConfigError as refused:
            raise Problem(400, str(refused), "messages" if self.is_chat else "prompt") from refused
        if not found:
            raise Problem(400, "prompt: has no tokens", "prompt")
        return found

    def _encoded(self, tokenizer: Tokenizer) -> list[int]:
        if self.is_chat:
            return tokenizer.chat(self.about)
        if isinstance(self.about, str):
            return tokenizer.encode(self.about)
        if max(self.about) >= tokenizer.vocab_size:
            raise ConfigError(
                f"prompt: token {max(self.about)}: allowed: 0..{tokenizer.vocab_size - 1}"
            )
        return list(self.about)


def parse(body: bytes, *, is_chat: bool) -> Ask:
    """Returns the request of a body; raises Problem(400)."""
    known = _CHAT if is_chat else _COMPLETION
    found: dict[str, Any] = {}
    for name, value in _object(body).items():
        try:
            found |= fields.members("body", {name: value}, known)
        except ConfigError as refused:
            raise Problem(400, str(refused), fields.shown(name)[1:-1]) from refused
    subject = "messages" if is_chat else "prompt"
    if subject not in found:
        raise Problem(400, f"{subject}: needed", subject)
    return _ask(found, subject, is_chat=is_chat)


def _ask(found: dict[str, Any], subject: str, *, is_chat: bool) -> Ask:
    longest = found.get("max_completion_tokens", found.get("max_tokens"))
    logprobs = found.get("logprobs")
    names = ("model", "temperature", "top_p", "seed", "stop", "stream", "deadline_s")
    return Ask(
        is_chat=is_chat,
        about=found[subject],
        max_tokens=longest,
        logprobs=bool(logprobs) if is_chat else logprobs is not None,
        include_usage=found.get("stream_options", False),
        **{name: found[name] for name in names if name in found},
    )


def _object(body: bytes) -> dict[str, Any]:
    """Parses a body; raises Problem for bad UTF-8, bad JSON, and JSON that is no object."""
    try:
        found = json.loads(body.decode(), parse_constant=_no_number)
    except UnicodeDecodeError as error:
        raise Problem(400, f"the body is no UTF-8 text (byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise Problem(400, f"the body is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise Problem(400, "the body is no JSON object")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")
