"""Rules by which a sequence ends by itself, before any limit on its tokens."""

from __future__ import annotations

from collections.abc import Sequence


class Endings:
    """Ends sequences at their stop token; base class of other rules.

    The lead holds one object a pass. A rule may remember what each sequence has emitted.
    """

    def __init__(self, *stop_tokens: int) -> None:
        self._stop = frozenset(stop_tokens)

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        """Returns how many of a round's tokens count if the sequence ends with them, else None.

        before: the number of tokens that the sequence had emitted before this round.
        """
        for n, token in enumerate(tokens, 1):
            if token in self._stop:
                return n
        return None
