"""Histories of live sequences: the committed tokens that a context model reads.

Each rank keeps its own copy. It follows from messages that every rank receives: the speculation
that was served, and how many of its tokens the next outcome accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Batch, Ints, Request, Speculation
from mpissd.engine.spec.lookup import LONGEST, Lookup, make_lookup
from mpissd.engine.workload.workers import Admissions

_ROUND = 512  # draws of a stream reserved for a round; a lookahead is at most 256
_EPOCH = 1 << 32  # limit of rounds in an epoch
Prompt = Callable[[Request], Sequence[int]]


@dataclass
class History:
    """The state of one sequence: its tokens and the number of its rounds.

    tokens: committed tokens with the prompt. age: rounds so far. served: tokens under verification.
    lookups: by kind, the sequence's index that tokens are looked up in, once it has been asked.
    """

    request: Request
    tokens: list[int]
    committed: int  # Batch.lengths, which counts the prompt as one token
    age: int = 0
    served: list[int] = field(default_factory=list)
    lookups: dict[str, Lookup] = field(default_factory=dict)

    def first_draw(self, later: int = 0) -> int:
        """Returns the index of the round's first draw in the sequence's random streams.

        later: rounds from now. No two rounds of a sequence share a draw, in any of its epochs.
        """
        return (self.request.epoch * _EPOCH + self.age + later) * _ROUND

    def draws(self, seed: int) -> tuple[int, int]:
        """Returns (seed, sequence), the key of its random draws; seed: the job's."""
        own = self.request.seed
        return (seed, self.request.request_id) if own is None else (own, 0)

    def copied(
        self, count: int, kind: str = "prompt", longest: int = LONGEST, filler: int | None = None
    ) -> list[int]:
        """Returns the `count` tokens that a fast backup drafts, by this kind of lookup."""
        return self.lookup(kind, longest).padded(count, filler)

    def lookup(self, kind: str, longest: int = LONGEST) -> Lookup:
        """Returns this kind of index of the committed tokens; all calls give the same `longest`."""
        found = self.lookups.get(kind)
        if found is None:
            found = self.lookups[kind] = make_lookup(kind, longest)
        found.follow(self.tokens)
        return found


class Histories:
    """The histories of all live sequences, by slot."""

    def __init__(self, prompt: Prompt) -> None:
        """Starts empty; `prompt` returns a request's tokens, which end in its first_token."""
        self._prompt = prompt
        self._by_slot: dict[int, History] = {}

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Appends k served tokens and the bonus to each sequence, and admits new sequences.

        Raises ProtocolError if a prompt does not end in the request's first token.
        """
        admitted = {slot for slot, _ in admissions}
        slots = batch.slots.tolist()
        for slot in self._by_slot.keys() - set(slots):
            del self._by_slot[slot]
        for slot, request in admissions:
            tokens = list(self._prompt(request))
            if not tokens or tokens[-1] != request.first_token:
                raise ProtocolError(
                    f"sequence {request.request_id} begins behind token {request.first_token}, "
                    f"its prompt ends in {tokens[-1:]}"
                )
            self._by_slot[slot] = History(request, tokens, 1)
        rows = zip(slots, batch.lengths.tolist(), batch.last_tokens.tolist(), strict=True)
        for slot, length, bonus in rows:
            if slot in admitted:
                continue
            history = self._by_slot[slot]
            accepted = length - history.committed - 1
            history.tokens += [*history.served[:accepted], bonus]
            history.committed = length
            history.age += 1
            history.served = []

    def serve(self, batch: Batch, speculation: Speculation) -> None:
        """Records the drafted tokens that the target verifies now."""
        for history, tokens, count in zip(
            self.rows(batch),
            speculation.tokens.tolist(),
            speculation.num_draft.tolist(),
            strict=True,
        ):
            history.served = tokens[:count]

    def rows(self, batch: Batch) -> list[History]:
        """Returns the histories of the batch's sequences, in the order of its rows."""
        return [self._by_slot[slot] for slot in batch.slots.tolist()]


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
        """Returns the committed tokens of a slot's sequence; none if it has not joined."""
        history = self._by_slot.get(slot)
        return () if history is None else history.tokens

    def committed(self, slot: int, start: int, stop: int) -> Ints:
        """Returns tokens start … stop − 1 of a slot's sequence."""
        return np.array(self._by_slot[slot].tokens[start:stop], np.int32)
