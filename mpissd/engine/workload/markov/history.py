"""The committed tokens of every live sequence, as a worker that models contexts needs them.

Each rank keeps its own, from what every rank hears anyway: the speculation that was served, and
how many of its tokens the next outcome accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Batch, Request, Speculation
from mpissd.engine.workload.base import Admissions
from mpissd.engine.workload.markov.model import MarkovModel

_ROUND = 512  # draws that a round may use of a stream: a lookahead is at most 256
_EPOCH = 1 << 32  # rounds that an epoch may have
Prompt = Callable[[Request], Sequence[int]]


@dataclass
class History:
    """One sequence: its tokens, prompt included, and how many rounds it has been through."""

    request: Request
    tokens: list[int]
    committed: int  # Batch.lengths, which counts the prompt as one token
    age: int = 0
    served: list[int] = field(default_factory=list)

    def first_draw(self, later: int = 0) -> int:
        """Where the draws of its round, or one `later`, begin in its streams: no two rounds of a
        sequence, nor of its epochs, share a draw."""
        return (self.request.epoch * _EPOCH + self.age + later) * _ROUND


class Histories:
    """By slot."""

    def __init__(self, prompt: Prompt) -> None:
        """prompt: the tokens of a request, of which the last is its first_token."""
        self._prompt = prompt
        self._by_slot: dict[int, History] = {}

    def begin_round(self, batch: Batch, admissions: Admissions) -> None:
        """Follows an applied outcome: k served tokens and the bonus join each sequence."""
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
        """Remembers what each sequence's target verifies now."""
        for history, tokens, count in zip(
            self.rows(batch),
            speculation.tokens.tolist(),
            speculation.num_draft.tolist(),
            strict=True,
        ):
            history.served = tokens[:count]

    def rows(self, batch: Batch) -> list[History]:
        """The histories of the batch, in its order."""
        return [self._by_slot[slot] for slot in batch.slots.tolist()]


def trunk(
    model: MarkovModel, tokens: Sequence[int], served: Sequence[int]
) -> list[tuple[int, ...]]:
    """The contexts behind 0, 1, … len(served) served tokens."""
    recent = [*tokens[-model.order :], *served]
    known = len(recent) - len(served)
    return [model.context(recent[: known + n]) for n in range(len(served) + 1)]


def looked_up(tokens: Sequence[int], longest: int, count: int) -> list[int]:
    """Prompt lookup: up to `count` tokens that followed the latest earlier occurrence of the
    sequence's last n tokens, of the largest n ≤ longest that has one; [] where there is none."""
    best = start = 0
    for end in range(len(tokens) - 1, 0, -1):
        if tokens[end - 1] != tokens[-1]:
            continue
        n = 1
        while n < min(longest, end) and tokens[end - 1 - n] == tokens[-1 - n]:
            n += 1
        if n > best:
            best, start = n, end
            if n == longest:
                break
    return list(tokens[start : start + count]) if best else []
