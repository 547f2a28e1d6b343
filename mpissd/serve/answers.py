"""An answer from the lead's tokens: its text, probabilities and usage, in OpenAI's objects."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpissd.engine.workload.text.stops import AnswerText
from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve.protocol import End, Tokens
from mpissd.serve.requests import Ask

DONE = b"data: [DONE]\n\n"


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


class Written:
    """The text of one answer while its tokens arrive.

    `finish` is the finish reason ("stop", "length", …), or None until the end. num_tokens counts to
    the end of the text, also if the lead decoded further.
    """

    def __init__(self, tokenizer: Tokenizer, ask: Ask, stop_ids: Collection[int]) -> None:
        self._text = AnswerText(tokenizer, ask.stop, stop_ids)
        self.num_tokens = self.num_rounds = self.num_hits = 0
        self.finish: str | None = None

    @property
    def is_stopped(self) -> bool:
        """Whether the text has ended by itself."""
        return self._text.ended is not None

    def take(self, message: Tokens) -> Piece:
        """Takes the new tokens of a round; returns the text that can be shown now."""
        sources, logprobs = [], []
        for place, token in enumerate(message.tokens):
            if self._text.ended is not None:
                break
            source = message.sources[place] if message.sources else ""
            sources.append((self._text.push(token), source))
            self.num_tokens += 1
            if message.logprobs is not None:
                logprobs.append((token, message.logprobs[place]))
        self.num_rounds, self.num_hits = self.num_rounds + 1, message.hits
        return Piece("".join(text for text, _ in sources), logprobs, sources)

    def close(self, end: End) -> Piece:
        """Takes the end; returns the text that was held back."""
        self.finish = "stop" if self._text.ended is not None else end.reason
        rest = self._text.flush()
        return Piece(rest, sources=[(rest, "")] if rest else [])


@dataclass(frozen=True)
class Form:
    """How the objects of one answer are written: of a chat, or of a completion.

    include_sources: whether chunks have `speculation`: [text, source] pairs, and the answer's
    tokens, rounds and hits so far.
    """

    is_chat: bool
    model: str
    tokenizer: Tokenizer = field(repr=False)
    include_sources: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(12))
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, piece: Piece, written: Written, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the object of a whole answer."""
        content: dict[str, Any] = {"text": piece.text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": piece.text}}
        choice = {**content, **self._logprobs(piece), "finish_reason": written.finish}
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self._head(kind), "choices": [{"index": 0, **choice}], "usage": usage}

    def chunk(self, piece: Piece, written: Written, *, is_first: bool = False) -> dict[str, Any]:
        """Returns the object of a part of an answer."""
        content: dict[str, Any] = {"text": piece.text}
        if self.is_chat:
            role = {"role": "assistant"} if is_first else {}
            text = {"content": piece.text} if piece.text or is_first else {}
            content = {"delta": {**role, **text}}
        choice = {**content, **self._logprobs(piece), "finish_reason": written.finish}
        chunk = {**self._head(self._chunk_kind), "choices": [{"index": 0, **choice}]}
        if self.include_sources:
            counts = "tokens", "rounds", "hits"
            speculation = {name: getattr(written, f"num_{name}") for name in counts}
            chunk["speculation"] = {"pieces": piece.sources, **speculation}
        return chunk

    def last(self, usage: dict[str, Any]) -> dict[str, Any]:
        """Returns the object that ends a stream with its usage."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": usage}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.is_chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        name = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.id}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model}

    def _logprobs(self, piece: Piece) -> dict[str, Any]:
        if not piece.logprobs:
            return {"logprobs": None}
        named = [(self.tokenizer.decode([token], specials=True), p) for token, p in piece.logprobs]
        if not self.is_chat:
            parts = {"tokens": [name for name, _ in named], "token_logprobs": [p for _, p in named]}
            return {"logprobs": {**parts, "top_logprobs": None, "text_offset": None}}
        content = [
            {"token": name, "logprob": p, "bytes": _bytes(name), "top_logprobs": []}
            for name, p in named
        ]
        return {"logprobs": {"content": content, "refusal": None}}


def _bytes(name: str) -> list[int] | None:
    """Returns a token's bytes; None if it is only a part of a character."""
    return None if "\N{REPLACEMENT CHARACTER}" in name else list(name.encode())


def usage(prompt_tokens: int, written: Written, end: End) -> dict[str, Any]:
    """Returns the usage; `speculation` is this server's own and counts the whole request."""
    counts = {"prompt_tokens": prompt_tokens, "completion_tokens": written.num_tokens}
    counts["total_tokens"] = sum(counts.values())
    names = ("drafted", "accepted", "hits", "rounds")
    speculation = {name: getattr(end, name) for name in names}
    cached = {"cached_tokens": end.cached}
    return {**counts, "prompt_tokens_details": cached, "speculation": speculation}


def event(data: dict[str, Any]) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
