"""Decides when a draft stores rounds that draft nothing, and how it catches up afterwards.

A target that shares cores or memory with its draft is slowed by each forward of the draft: with K =
0 throughout, on two CPU cores, 11.5 ms with a draft that stores each token at once, 10.4 with one
that stores in parts, 9.5 without a draft. Such a draft rests after many rounds without drafting.
Later it stores the lacking tokens in parts while the target verifies, so that no outcome waits for
all of them. Meanwhile it drafts for the sequences that lack few tokens, and grows no branches.
"""

from __future__ import annotations

# While rounds draft nothing, tokens to store wait until they are worth a forward: a sequence's
# tokens until they are more than LAG, opened prompts until PART rows are due.
LAG, PART = 7, 24
_SHARE, _LONG = 1 / 32, 0.9  # weight of a round; a draft rests after some 70 without drafting


class Upkeep:
    """Decides how much a draft stores now. It counts tokens, and stores none itself."""

    def __init__(self, *, rests: bool = False) -> None:
        """rests: whether storing slows the target, so that the draft rests while K = 0."""
        self._rests, self._drafts = rests, True
        self._idle = 0.0  # share of late rounds that drafted nothing
        self._due = 0  # rows of opened prompts that the target stored, and this draft did not
        self.has_rested = False  # whether it ever rested; if not, it stores each round or in parts
        self.is_behind = False  # whether it lacks too much to store all of it before it drafts

    def open_round(self, *, drafts: bool) -> None:
        """Takes whether the round that begins drafts."""
        self._drafts = drafts
        self._idle += _SHARE * ((not drafts) - self._idle)
        self.has_rested = self.has_rested or self.is_resting
        self.is_behind = self.is_behind or self.is_resting

    @property
    def is_resting(self) -> bool:
        """Whether this round stores nothing."""
        return self._rests and not self._drafts and self._idle > _LONG

    @property
    def is_catching_up(self) -> bool:
        """Whether this round stores a part of the lacking tokens, while the target verifies."""
        return self.is_behind and self._drafts

    def check(self, lacking: int) -> None:
        """Takes how many tokens the draft lacks: no more than a part are stored before it
        drafts."""
        self.is_behind = lacking > PART

    def opened(self, rows: int) -> int:
        """Takes that the target stores so many rows of opened prompts; returns how many the draft
        stores now. The tokens not stored during a rest are lacking once the sequence joins."""
        if self.is_resting:
            self._due = 0
            return 0
        self._due += rows
        if not self._drafts and self._due < PART:
            return 0
        due, self._due = self._due, 0
        return due
