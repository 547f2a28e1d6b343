"""The text of an answer while its tokens arrive, and where each token came from."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from mpissd.common.rounds import Source
from mpissd.engine.text.tokenizer import Tokenizer

BONUS = "bonus"
# The origin of a token, as answers name it; NONE: the target's own.
SOURCES = {int(source): source.name.lower() for source in Source} | {int(Source.NONE): BONUS}
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_MOST_BYTES = 16  # tokens of single bytes that are enough, if no other token is near


def sources_of(num_accepted: int, source: int) -> list[str]:
    """Returns the source of each token of one round: the accepted ones, then the target's."""
    return [SOURCES[int(source)]] * num_accepted + [BONUS]


class AnswerText:
    """The text of one answer while its tokens arrive, up to its end.

    The text is what the answer adds to the prompt's: a decoder may drop the first space of a text,
    and an answer has none to drop. The pieces that `push` and `flush` return add up to it. Bytes
    that can still complete a character wait for the next tokens, and text that may be the beginning
    of a stop string is held back until that is decided. `ended` is the finish reason: "stop_token",
    "stop" (a stop string), or None so far. The token that ends an answer belongs to its tokens, but
    no stop belongs to its text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        stop_ids: Collection[int],
        prompt: Sequence[int],
    ) -> None:
        """prompt: the tokens that the answer follows."""
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._stops = [stop for stop in strings if stop]
        # A piece is a difference of two texts: of the context, and of context and waiting tokens.
        self._context = _end_of(prompt, tokenizer)
        self._waiting: list[int] = []
        # The bytes at the end that may begin a character.
        self._partial = _unfinished(b"".join(map(tokenizer.bytes_of, self._context)))[1]
        self._held = ""
        self.ended: str | None = None

    def push(self, token: int) -> str:
        """Takes one token; returns the text that can be shown now."""
        if self.ended is not None:
            return ""
        if token in self._stop_ids:
            text = self.flush()
            self.ended = "stop_token"
            return text
        added = self._tokenizer.bytes_of(token)
        if not added:
            return ""
        new, (count, rest) = "", _unfinished(self._partial + added[:1])
        if self._partial and count and (count > 1 or rest):  # this token does not continue it
            new, self._partial = self._advance(), b""
        self._waiting.append(token)
        self._partial = _unfinished(self._partial + added)[1]
        if not self._partial:
            new += self._advance()
        if not new:
            return ""
        text, is_cut = self._cut(self._held + new)
        if is_cut:
            self.ended = "stop"
            return text
        sizes = (
            size
            for stop in self._stops
            for size in range(min(len(stop) - 1, len(text)), 0, -1)
            if text.endswith(stop[:size])
        )
        shown = len(text) - max(sizes, default=0)  # the rest may begin a stop string
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Returns the text that still waits, of an answer that ends without a stop; the bytes of a
        character that was never completed are U+FFFD."""
        if self.ended is not None:
            return ""
        text, _ = self._cut(self._held + self._advance())
        self._held, self._partial = "", b""
        return text

    def _advance(self) -> str:
        """Returns the text of the waiting tokens; makes them the context if they have one.

        Tokens of single bytes become none if possible, since one invalid byte changes the text of
        all that precede it.
        """
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *self._waiting])
        if not text.startswith(before):  # the answer completes the prompt's last character
            before = before.rstrip("\ufffd")
        if new := text[len(before) :]:
            words = [token for token in self._waiting if not self._tokenizer.is_byte(token)]
            self._context = words or self._context or self._waiting
            self._waiting = []
        return new

    def _cut(self, text: str) -> tuple[str, bool]:
        """Returns the text in front of its first stop string, and whether there is one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)], bool(places)


def _unfinished(data: bytes) -> tuple[int, bytes]:
    """Returns (the number of whole or invalid characters, the bytes after them, which may begin
    another one)."""
    text, size = codecs.utf_8_decode(data, "replace", False)
    return len(text), data[size:]


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the last tokens of a prompt that have a text: a word, and a whole character."""
    context = list[int]()
    for token in reversed(prompt):
        if tokenizer.bytes_of(token):
            context.insert(0, token)
            is_enough = len(context) >= _LONGEST_CHARACTER and not tokenizer.is_byte(token)
            if is_enough or len(context) >= _MOST_BYTES:
                break
    return context
