"""Tracks the places of a worker's rows in its model's KV cache.

A sequence's committed tokens have positions 0, 1, …; of the last one only the token is known, and
its K and V are stored by the forward that reads it. `filled` positions of a slot are stored and
valid: a rollback is a smaller number. Rows of the trunk (the committed tokens and those that are
served) write the cache; branches that a draft grows write scratch, so a hit copies nothing: the
next glue (the draft's forward over the trunk) writes it again, with equal bits.

Workloads without prompts have `context` tokens before their first one, which are never computed:
the attention still reads their bytes, and no token depends on their values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Batch, Ints, Request
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.shard import ForwardOptions

Index = NDArray[np.int64]
LEAST_CHUNK = 256  # tokens of a prompt that are worth a chunk of their own
TRUNK = -1  # the lane of a row that writes the cache


@dataclass(frozen=True)
class LanePlaces:
    """Places where a rollout's lanes (branch slots) grow; all are [lanes].

    slots: the cache slot. first: the position of the token that the first step reads. ids: the
    lane's scratch, or TRUNK for a lane that continues the committed tokens in the cache.
    """

    slots: Index
    first: Index
    ids: Index

    def keep(self, lanes: Index) -> LanePlaces:
        """Returns the places of only these lanes."""
        return LanePlaces(self.slots[lanes], self.first[lanes], self.ids[lanes])


class Gap(NamedTuple):
    """Committed tokens of a slot that are not in its cache: positions start … stop − 1."""

    slot: int
    start: int
    stop: int


class Placement:
    """The positions of all live sequences of one worker."""

    def __init__(
        self,
        slots: int,
        context: int = 0,
        window: int | None = None,
        *,
        pooled: bool = False,
        keeps: bool = False,
    ) -> None:
        """Starts empty.

        slots: sequences at once. context: tokens before the first of a sequence without a prompt.
        window: the committed tokens after which such a sequence's positions begin again, so that a
        run of any length stays within the cache (None: never). pooled: whether sequences share the
        pages, so that a sequence that leaves frees its pages. keeps: whether sequences reuse pages
        that store the same first tokens.
        """
        self.pooled, self.keeps = pooled, keeps
        self._occupied = np.zeros(0, np.int64)  # slots of the batch that was seen last
        self._context, self._window = context, window
        self._base = np.zeros(slots, np.int64)  # position of the first counted token
        self.filled = np.zeros(slots, np.int64)

    def admit(self, slot: int, request: Request, shared: int = 0) -> None:
        """Takes a new sequence, of whose prompt the first `shared` tokens are in the slot."""
        if request.prompt:
            self._base[slot] = len(request.prompt) - 1
            self.filled[slot] = shared
        else:
            self._base[slot] = self.filled[slot] = self._context

    def opened_gaps(self, opened: Mapping[int, Request], most: int) -> list[Gap]:
        """Returns the next `most` tokens of opened prompts that the cache lacks, by slot; the last
        token of a prompt is never one of them, since its first round reads it."""
        found = []
        for slot, request in opened.items():
            start, end = int(self.filled[slot]), len(request.prompt) - 1
            stop = min(end, start + most)
            if stop > start:
                found.append(Gap(slot, start, stop))
                most -= stop - start
        return found

    def vacate(self, slots: Index) -> list[tuple[int, int]]:
        """Follows the slots of the batch; returns those that were left, whose cache is void, with
        the positions that were filled."""
        if slots is self._occupied or not self.pooled:
            return []
        left = np.setdiff1d(self._occupied, slots)
        self._occupied = slots
        found = list(zip(left.tolist(), self.filled[left].tolist(), strict=True))
        self.filled[left] = 0
        return found

    def roll_back(self, batch: Batch) -> None:
        """Forgets the positions stored after the last committed token of each sequence."""
        slots = batch.slots
        self.filled[slots] = np.minimum(self.filled[slots], self.last(batch))

    def last(self, batch: Batch) -> Index:
        """Returns the position of each sequence's last committed token, [b]."""
        behind = batch.lengths - 1
        if self._window is not None:
            behind %= self._window
        position: Index = self._base[batch.slots] + behind
        return position

    def gaps(self, batch: Batch, rows: Index, spare: int = 0) -> list[Gap]:
        """Returns the committed tokens that the cache lacks, without each row's last one.

        Sequences that lack at most `spare` tokens are left out.
        """
        slots, last = batch.slots[rows], self.last(batch)[rows]
        filled = self.filled[slots]
        short = np.flatnonzero(last - filled > spare)
        return [Gap(int(slots[n]), int(filled[n]), int(last[n])) for n in short]

    def fill(self, gaps: Sequence[Gap]) -> Places:
        """Returns the places of all tokens of these gaps, which are filled from then on."""
        for gap in gaps:
            self.filled[gap.slot] = gap.stop
        return self.places_of(gaps)

    @staticmethod
    def places_of(gaps: Sequence[Gap]) -> Places:
        """Returns the places of all tokens of these gaps, in their order."""
        slots = np.repeat([gap.slot for gap in gaps], [gap.stop - gap.start for gap in gaps])
        return _trunk(slots, np.concatenate([np.arange(gap.start, gap.stop) for gap in gaps]))

    def trunk(self, batch: Batch, num_draft: Ints) -> Places:
        """Returns the places of each sequence's last token and its num_draft served tokens."""
        if len(num_draft) == 1:
            return self._trunk_of_one(batch, int(num_draft[0]) + 1)
        counts = num_draft + 1
        last = self.last(batch)
        rows, ahead = _consecutive(counts)
        assert (self.filled[batch.slots] >= last).all(), "a trunk behind tokens that are missing"
        self.filled[batch.slots] = last + counts
        return _trunk(batch.slots[rows], last[rows] + ahead)

    def _trunk_of_one(self, batch: Batch, count: int) -> Places:
        """Returns `trunk` of a batch of one sequence in a third of its time, for which every round
        waits: Python's integers instead of arrays of one."""
        slot, behind = int(batch.slots[0]), int(batch.lengths[0]) - 1
        first = int(self._base[slot]) + (behind if self._window is None else behind % self._window)
        assert self.filled[slot] >= first, "a trunk behind tokens that are missing"
        self.filled[slot] = first + count
        positions = np.arange(first, first + count, dtype=np.int32)
        slots, lanes = np.full(count, slot, np.int32), np.full(count, TRUNK, np.int32)
        return Places(slots, positions, lanes, positions)

    def grow(self, batch: Batch, count: int) -> None:
        """Notes that the tokens from each sequence's last one on are stored, `count` of them."""
        last = self.last(batch)
        assert (self.filled[batch.slots] >= last - 1).all(), "tokens behind some that are missing"
        self.filled[batch.slots] = last + count

    def room(self, batch: Batch, capacity: int) -> Index:
        """Returns how many positions follow each sequence's last token, [b], before the cache
        ends, or before its positions begin again."""
        last = self.last(batch)
        if self._window is None:
            return capacity - 1 - last
        return np.minimum(capacity, self._base[batch.slots] + self._window) - 1 - last

    def lanes(self, batch: Batch, rows: Index, k: Ints) -> LanePlaces:
        """Returns the places of branches after k accepted tokens of batch rows `rows`.

        Imposed tokens also make branches after tokens that a short trunk lacks. These never hit.
        They are placed at its end, so that they read only stored positions.
        """
        slots = batch.slots[rows]
        first = np.minimum(self.last(batch)[rows] + k + 1, self.filled[slots])
        return LanePlaces(slots, first, np.arange(len(rows)))

    def restart(self, batch: Batch, rows: Index) -> LanePlaces:
        """Returns the places of lanes that continue batch rows `rows` in the cache."""
        return LanePlaces(batch.slots[rows], self.last(batch)[rows], np.full(len(rows), TRUNK))

    def step(self, lanes: LanePlaces, steps: int) -> Places:
        """Returns the places of the next step of these lanes, which have grown `steps` tokens."""
        positions = lanes.first + steps
        in_trunk = lanes.ids == TRUNK
        self.filled[lanes.slots[in_trunk]] = positions[in_trunk] + 1
        return _places(lanes.slots, positions, lanes.ids, lanes.first)

    def missing(self, lanes: LanePlaces, steps: int) -> list[Gap]:
        """Returns the gaps that lanes in the trunk have to fill before their first token."""
        if steps or not len(lanes.ids) or lanes.ids[0] != TRUNK:
            return []
        filled = self.filled[lanes.slots]
        short = np.flatnonzero(lanes.first > filled).tolist()
        return [Gap(int(lanes.slots[n]), int(filled[n]), int(lanes.first[n])) for n in short]


class StatelessPlacement(Placement):
    """The positions of a draft without keys and values, which never lacks a token."""

    def gaps(self, batch: Batch, rows: Index, spare: int = 0) -> list[Gap]:
        return []

    def missing(self, lanes: LanePlaces, steps: int) -> list[Gap]:
        return []


def timed_places(rows: int, sequences: int, options: ForwardOptions) -> Places | None:
    """Returns places of `rows` rows after the mean context, for timing; None without a cache.

    Rows are grouped by sequence as in a verification, so that neighbours read the same keys and
    values. Their results are not used.
    """
    if not options.capacity:
        return None
    number = np.arange(rows)
    slots = number * min(sequences, rows) // rows
    behind = number - np.searchsorted(slots, slots)
    return _trunk(slots, np.minimum(options.context + behind, options.capacity - 1))


def cut(gaps: Sequence[Gap], rows: int) -> Iterator[tuple[Gap, bool]]:
    """Cuts gaps at absolute multiples of `rows` (0: not at all); yields (part, is a chunk).

    A chunk begins at such a multiple, so that how a position is computed depends only on its
    sequence. Parts of fewer than LEAST_CHUNK tokens are no chunks, because a chunk is computed
    whole.
    """
    for gap in gaps:
        start = gap.start
        while rows and start < gap.stop:
            stop = min(gap.stop, start // rows * rows + rows)
            yield Gap(gap.slot, start, stop), start % rows == 0 and stop - start >= LEAST_CHUNK
            start = stop
        if not rows:
            yield gap, False


def joined(parts: Sequence[Places]) -> Places:
    """Returns the concatenated places of several groups of rows."""
    if len(parts) == 1:
        return parts[0]
    return Places(
        np.concatenate([part.slots for part in parts]),
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.lanes for part in parts]),
        np.concatenate([part.trunks for part in parts]),
    )


def chunk(places: Places, part: slice) -> Places:
    """Returns the places of some rows of a prompt, whose candidates are not read."""
    rows = places.slots[part], places.positions[part], places.lanes[part], places.trunks[part]
    return Places(*rows, False)


def _consecutive(counts: NDArray[np.integer[Any]]) -> tuple[Index, Index]:
    """Returns (n, i) of each row, of consecutive groups: group n has counts[n] rows, i = 0 …."""
    groups = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return groups, np.arange(len(groups)) - starts[groups]


def _trunk(slots: Index, positions: Index) -> Places:
    return _places(slots, positions, np.full(len(slots), TRUNK), positions)


def _places(slots: Index, positions: Index, lanes: Index, trunks: Index) -> Places:
    return Places(_ints(slots), _ints(positions), _ints(lanes), _ints(trunks))


def _ints(values: Index) -> Ints:
    return values.astype(np.int32)
