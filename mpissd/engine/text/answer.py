"""The text of an answer while its tokens arrive, and what drafted each token."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence

from mpissd.common.rounds import Source
from mpissd.engine.text.tokenizer import Tokenizer

BONUS = "bonus"
# The names of Source in answers. NONE is the target's own token, the bonus token of a round.
SOURCES = {int(source): source.name.lower() for source in Source} | {int(Source.NONE): BONUS}
_LONGEST_CHARACTER = 4  # bytes of UTF-8
_MOST_BYTES = 16  # the longest context, for a text whose tokens are all single bytes


def sources_of(num_accepted: int, source: int) -> list[str]:
    """Returns the names of the sources of a round's accepted tokens, and of its bonus token."""
    return [SOURCES[int(source)]] * num_accepted + [BONUS]


class AnswerText:
    """The text of one answer while its tokens arrive, up to its end.

    strings: stop strings; the text ends before the first one. stop_ids: tokens that end an answer.
    prompt: the tokens before it, to whose text it adds, as a decoder drops a text's first space.
    The pieces that `push` and `flush` return add up to the text. Bytes of an incomplete character,
    and text that may begin a stop string, are held back until that is decided. ended: the finish
    reason, "stop_token", "stop" (a stop string), or None so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        stop_ids: Collection[int],
        prompt: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stops = [stop for stop in strings if stop]
        # A piece is a difference of two texts: of the context, and of context and waiting tokens.
        self._context = _end_of(prompt, tokenizer)
        self._waiting: list[int] = []
        # The bytes at the end that may begin a character.
        self._partial = _unfinished(b"".join(map(tokenizer.bytes_of, self._context)))[1]
        self._held = ""
        self.ended: str | None = None

    def push(self, token: int) -> str:
        """Appends a token to the answer; returns the text that can be shown now."""
        if self.ended is not None:
            return ""
        if token in self._stop_ids:
            text = self.flush()
            self.ended = "stop_token"
            return text
        added = self._tokenizer.bytes_of(token)
        if not added:
            return ""
        new = ""
        count, rest = _unfinished(self._partial + added[:1])
        if self._partial and count and (count > 1 or rest):  # this token does not continue it
            new = self._advance()
            self._partial = b""
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
        """Ends an answer without a stop; returns the text that was held back, with U+FFFD for the
        bytes of an incomplete character."""
        if self.ended is not None:
            return ""
        text, _ = self._cut(self._held + self._advance())
        self._held = ""
        self._partial = b""
        return text

    def _advance(self) -> str:
        """Returns the text of the waiting tokens; if they have any, they become the context. Of
        them only tokens of several bytes do, if there are some, since one invalid byte changes the
        text of all that precede it."""
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
        """Returns `text` up to its first stop string, and whether there is one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)], bool(places)


def _unfinished(data: bytes) -> tuple[int, bytes]:
    """Returns (the number of characters in UTF-8 `data`, the bytes of an incomplete last one)."""
    text, size = codecs.utf_8_decode(data, "replace", False)
    return len(text), data[size:]


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the last tokens of a prompt that have a text, at least a character's."""
    context = list[int]()
    for token in reversed(prompt):
        if tokenizer.bytes_of(token):
            context.insert(0, token)
            is_enough = len(context) >= _LONGEST_CHARACTER and not tokenizer.is_byte(token)
            if is_enough or len(context) >= _MOST_BYTES:
                break
    return context
