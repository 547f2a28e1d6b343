"""The text of an answer while its tokens arrive, and where it ends: at a stop token, or at a stop
string, which may begin in one token and end in another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from mpissd.common.errors import ConfigError
from mpissd.common.rounds import Source
from mpissd.engine.workload.base import Endings
from mpissd.engine.workload.text.tokenizer import Tokenizer

BONUS = "bonus"
# The origin of a token, as answers name it; NONE: the target's own.
SOURCES = {int(source): source.name.lower() for source in Source} | {int(Source.NONE): BONUS}
_PARTIAL = "\ufffd"  # the character to which incomplete UTF-8 bytes are decoded


def sources_of(num_accepted: int, source: int) -> list[str]:
    """Returns the source of each token of one round: the accepted ones, then the target's."""
    return [SOURCES[int(source)]] * num_accepted + [BONUS]


class AnswerText:
    """The text of one answer while its tokens arrive, up to its end.

    The pieces that `push` and `flush` return add up to the answer's text. Bytes of a part of a
    character wait for the tokens that complete it, and text that may be the beginning of a stop
    string is held back until that is decided. `ended` is the finish reason: "stop_token", "stop" (a
    stop string), or None so far. The token that ends an answer belongs to its tokens, but no stop
    belongs to its text.
    """

    def __init__(
        self, tokenizer: Tokenizer, strings: Sequence[str], stop_ids: Collection[int]
    ) -> None:
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._stops = [stop for stop in strings if stop]
        # Decoders may treat the first token differently, so a piece is a difference of two texts
        # that start at the same token.
        self._context: list[int] = []
        self._waiting: list[int] = []
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
        self._waiting.append(token)
        new = self._new_text()
        if new.endswith(_PARTIAL):
            return ""
        if new:
            self._context, self._waiting = self._waiting, []
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
        text, _ = self._cut(self._held + self._new_text())
        self._held, self._context, self._waiting = "", self._waiting, []
        return text

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._waiting])[len(known) :]

    def _cut(self, text: str) -> tuple[str, bool]:
        """Returns the text in front of its first stop string, and whether there is one."""
        places = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        return text[: min(places, default=None)], bool(places)


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
        left = self._room[request_id] - before
        if self._tokenizer is None or not self._strings:  # then no text is needed
            kept = super().kept(request_id, before, tokens)
        else:
            kept, text = None, self._texts.get(request_id)
            if text is None:
                text = AnswerText(self._tokenizer, self._strings, self._stop)
                self._texts[request_id] = text
            for n, token in enumerate(tokens, 1):
                text.push(token)
                if text.ended is not None:
                    del self._texts[request_id]
                    kept = n
                    break
        if kept is None:
            return left if len(tokens) >= left else None
        return min(kept, left)
