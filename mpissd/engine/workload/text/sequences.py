"""The sequences of text on one rank: their tokens, and what a slot's last one left in its cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpissd.common.rounds import Batch, Ints
from mpissd.engine.workload.endings import Endings
from mpissd.engine.workload.history import Histories
from mpissd.engine.workload.placed import Admissions
from mpissd.engine.workload.text.stops import Stops


class PromptHistories(Histories):
    """Histories of sequences with prompts, which remember the last sequence of each slot."""

    def __init__(self) -> None:
        super().__init__(lambda request: request.prompt)
        self._left: dict[int, list[int]] = {}  # by slot: the tokens of its last sequence

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        before = {slot: history.tokens for slot, history in self._by_slot.items()}
        super().begin_round(batch, admissions)
        self._left = {**self._left, **before}

    def shared(self, slot: int, prompt: Sequence[int]) -> int:
        """Returns how many tokens of a prompt begin the tokens of the slot's last sequence.

        The prompt's last token is never one of them, since the first round reads it.
        """
        history = self._by_slot.get(slot)
        tokens = self._left.get(slot, []) if history is None else history.tokens
        most = min(len(tokens), len(prompt) - 1)
        same = 0
        while same < most and tokens[same] == prompt[same]:
            same += 1
        return same

    def known(self, slot: int) -> Sequence[int]:
        """Returns the committed tokens of a slot's sequence; none where it has not joined."""
        history = self._by_slot.get(slot)
        return () if history is None else history.tokens

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        """Returns tokens start … stop − 1 of a slot's sequence."""
        return np.array(self._by_slot[slot].tokens[start:stop], np.int32)


class TextEndings(Endings):
    """Ends an answer at a stop token or a stop string, or where the context is full."""

    def __init__(self, stops: Stops, room: dict[int, int]) -> None:
        """Takes the tokens that each request may emit within the context, by request id."""
        super().__init__()
        self._stops, self._room = stops, room

    def kept(self, request_id: int, before: int, tokens: Sequence[int]) -> int | None:
        kept, left = self._stops.feed(request_id, tokens), self._room[request_id] - before
        if kept is None:
            return left if len(tokens) >= left else None
        return min(kept, left)
