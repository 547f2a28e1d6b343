"""Turns the tokens of an answer into text as they arrive, and says what drafted each token."""

import codecs
from collections.abc import Collection, Sequence

from mpissd.common.rounds import Source
from mpissd.engine.text.tokenizer import Tokenizer

BONUS = "bonus"
# The name of each Source in answers. NONE is the name of the bonus token, which the target emits.
SOURCES = {int(source): source.name.lower() for source in Source} | {int(Source.NONE): BONUS}
_LONGEST_CHARACTER = 4  # bytes of the longest UTF-8 character
_MOST_BYTES = 16  # the most prompt tokens that are decoded with an answer, if all are single bytes


def sources_of(num_accepted: int, source: int) -> list[str]:
    """Returns the names of what drafted the tokens of a round: that of `source` (a Source) for each
    of the num_accepted accepted tokens, and "bonus" for the target's token after them."""
    return [SOURCES[int(source)]] * num_accepted + [BONUS]


class AnswerText:
    """The text of one answer, produced piece by piece while its tokens arrive.

    strings: stop strings; the text ends before the first one that occurs after the first min_tokens
    tokens. stop_ids: tokens that end an answer. prompt: the tokens before the answer, decoded along
    with it, because a decoder drops the first space of a text. The pieces that `push` and `flush`
    return add up to the text. Incomplete UTF-8 characters, and text that may begin a stop string,
    are held back until later tokens decide. ended: the finish reason, "stop_token" or "stop" (a
    stop string), or None so far.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        strings: Sequence[str],
        stop_ids: Collection[int],
        prompt: Sequence[int],
        min_tokens: int = 0,
    ) -> None:
        self._free = min_tokens  # the tokens to come in which no stop string is looked for
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._stops = [stop for stop in strings if stop]
        # The tokens in _waiting are not yet text; they are decoded together with those in _context.
        self._context = _end_of(prompt, tokenizer)
        self._waiting: list[int] = []
        # The bytes at the end of the text that may begin an incomplete UTF-8 character.
        self._partial = _unfinished(b"".join(map(tokenizer.bytes_of, self._context)))[1]
        self._held = ""
        self.ended: str | None = None

    def push(self, token: int) -> str:
        """Appends a token to the answer; returns the further text that can be shown now."""
        if self.ended is not None:
            return ""
        self._free -= 1
        if token in self._stop_ids:
            text = self.flush()
            self.ended = "stop_token"
            return text
        added = self._tokenizer.bytes_of(token)
        if not added:
            return ""
        new = ""
        count, rest = _unfinished(self._partial + added[:1])
        if self._partial and count and (count > 1 or rest):  # The token begins a new character.
            new = self._advance()
            self._partial = b""
        self._waiting.append(token)
        self._partial = _unfinished(self._partial + added)[1]
        if not self._partial:
            new += self._advance()
        if not new or self._free >= 0:
            return new
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
        shown = len(text) - max(sizes, default=0)  # Text from here on may begin a stop string.
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Ends an answer that met no stop; returns the text that was held back, with U+FFFD for the
        bytes of an incomplete character."""
        if self.ended is not None:
            return ""
        text, _ = self._cut(self._held + self._advance())
        self._held = ""
        self._partial = b""
        return text

    def _advance(self) -> str:
        """Returns the text that the tokens not yet decoded add. If they add any, they become the
        context: the tokens that are decoded together with the next ones. Single-byte tokens are
        left out of it if it has others, as one invalid byte changes the text of those before it."""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode([*self._context, *self._waiting])
        if not text.startswith(before):  # The answer completes the last character of the prompt.
            before = before.rstrip("\ufffd")
        if new := text[len(before) :]:
            words = [token for token in self._waiting if not self._tokenizer.is_byte(token)]
            self._context = words or self._context or self._waiting
            self._waiting = []
        return new

    def _cut(self, text: str) -> tuple[str, bool]:
        """Returns `text` up to its first stop string, and whether it contains one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)], bool(places)


def _unfinished(data: bytes) -> tuple[int, bytes]:
    """Returns (number of characters in UTF-8 `data`, the bytes of an incomplete last character)."""
    text, size = codecs.utf_8_decode(data, "replace", False)
    return len(text), data[size:]


def _end_of(prompt: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    """Returns the last tokens of a prompt that have a text, with at least one whole character."""
    context = list[int]()
    for token in reversed(prompt):
        if tokenizer.bytes_of(token):
            context.insert(0, token)
            is_enough = len(context) >= _LONGEST_CHARACTER and not tokenizer.is_byte(token)
            if is_enough or len(context) >= _MOST_BYTES:
                break
    return context
