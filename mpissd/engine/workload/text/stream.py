"""Turns tokens into text while they arrive: only whole characters leave."""

from __future__ import annotations

from mpissd.engine.workload.text.tokenizer import Tokenizer

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
        """Returns what still waits; the bytes of a character that was never completed are
        U+FFFD."""
        return self._leave(self._new_text())

    def _new_text(self) -> str:
        known = self._tokenizer.decode(self._context)
        return self._tokenizer.decode([*self._context, *self._waiting])[len(known) :]

    def _leave(self, text: str) -> str:
        if text:
            self._context, self._waiting = self._waiting, []
        return text
