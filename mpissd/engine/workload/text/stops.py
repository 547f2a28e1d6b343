"""Ends an answer at a stop token, or at a stop string, which may begin in one token and end in
another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mpissd.common.errors import ConfigError
from mpissd.engine.workload.base import Endings
from mpissd.engine.workload.text.tokenizer import Tokenizer


class AnswerText:
    """The text of one answer while its tokens arrive, up to its end.

    `ended` is the finish reason: "stop_token", "stop" (a stop string), or None so far. The token
    that ends an answer belongs to its tokens, but no stop belongs to its text.
    """

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], stop_ids: Collection[int]
    ) -> None:
        self._stream, self._cut = TextStream(tokenizer), Cut(strings)
        self._stop_ids = stop_ids
        self.ended: str | None = None

    def push(self, token: int) -> str:
        """Takes one token; returns the text that can be shown now."""
        if self.ended is not None:
            return ""
        if token in self._stop_ids:
            self.ended = "stop_token"
            return self._cut.push(self._stream.flush()) + self._cut.flush()
        text = self._cut.push(self._stream.push(token))
        if self._cut.stopped:
            self.ended = "stop"
        return text

    def flush(self) -> str:
        """Returns the text that still waits, of an answer that ends without a stop."""
        if self.ended is not None:
            return ""
        return self._cut.push(self._stream.flush()) + self._cut.flush()


class Cut:
    """Cuts a text that arrives in pieces in front of its first stop string.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def push(self, piece: str) -> str:
        """Takes a piece of text; returns the text to show. After a stop, that is ""."""
        if self.stopped:
            return ""
        text = self._held + piece
        if (at := self._first(text)) is not None:
            self.stopped, self._held = True, ""
            return text[:at]
        keep = self._longest_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that was held back, at the end of a sequence."""
        text, self._held = self._held, ""
        return text

    def _first(self, text: str) -> int | None:
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return min(places, default=None)

    def _longest_beginning(self, text: str) -> int:
        """Returns the length of the longest end of the text that begins a stop string."""
        sizes = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        )
        return max(sizes, default=0)


class TextEndings(Endings):
    """Ends an answer at a stop token or a stop string, or when the context is full."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        strings: Sequence[str],
        stop_ids: Collection[int],
        room: Mapping[int, int],
    ) -> None:
        """room: the tokens that each request may emit within the context, by request id. Raises
        ConfigError for stop strings without a tokenizer."""
        super().__init__(*stop_ids)
        if tokenizer is None and strings:
            raise ConfigError("stop: needs a tokenizer: allowed: stop_token")
        self._tokenizer, self._strings, self._room = tokenizer, strings, room
        self._texts: dict[int, AnswerText] = {}

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        kept, left = self._stopped(request_id, before, tokens), self._room[request_id] - before
        if kept is None:
            return left if len(tokens) >= left else None
        return min(kept, left)

    def _stopped(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        """Returns how many of these tokens belong to the answer if a stop ends it, or None."""
        if self._tokenizer is None or not self._strings:  # then no text is needed
            return super().kept(request_id, before, tokens)
        new = AnswerText(self._tokenizer, self._strings, self._stop)
        text = self._texts.setdefault(request_id, new)
        for n, token in enumerate(tokens, 1):
            text.push(token)
            if text.ended is not None:
                del self._texts[request_id]
                return n
        return None


_PARTIAL = "\ufffd"  # the character to which incomplete UTF-8 bytes are decoded


class TextStream:
    """Decodes the tokens of one sequence as they arrive.

    The pieces of `push`, and `flush` at the end, add up to the text of all tokens. A piece never
    holds a part of a character: its bytes wait for the tokens that complete it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoders may treat the first token differently, so a piece is a difference of two texts
        # that start at the same token.
        self._context: list[int] = []
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """Takes one token; returns the text that is complete now."""
        self._waiting.append(token)
        text = self._new_text()
        if text.endswith(_PARTIAL):
            return ""
        return self._leave(text)

    def flush(self) -> str:
        """Returns the text that still waits; the bytes of a character that was never completed are
        U+FFFD."""
        return self._leave(self._new_text())

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._waiting])[len(known) :]

    def _leave(self, text: str) -> str:
        if text:
            self._context, self._waiting = self._waiting, []
        return text
