"""Stores draft trees in a model's KV cache.

The path of first children is stored in the sequence's slot, as a chain is. Each other path is
stored in a *lane*: scratch memory of the cache (law.tree). If the target accepts a path in a lane,
the path's K and V are copied from the lane to the slot before the next forward.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpissd.common.rounds import Event, Ints, Outcome
from mpissd.engine.law.tree import BranchLayout
from mpissd.engine.model.forwards import SPAN, Places
from mpissd.engine.round.branches import TRUNK, BranchPlaces
from mpissd.engine.round.sequence import Batch, Gap, Index, int32_places


class TreeBatch(Batch):
    """The live sequences of a rank whose drafts are trees, and are stored in a KV cache."""

    def __init__(self, *common: Any, layout: BranchLayout | None = None) -> None:
        """common: the parameters of Batch. layout: where the cache stores the tree's nodes and the
        branches that are drafted ahead after these nodes (None: nothing is drafted ahead)."""
        super().__init__(*common)
        self.layout = layout
        self._masks = () if self.placement is None else self.placement.masks
        self._has_leaves = False  # whether the last round stored nodes without children
        self._moves_itself = False  # whether the GPU itself moved the accepted paths' K and V

    def leave_moves(self, *, has_leaves: bool) -> None:
        """Tells the batch that the GPU itself copies K and V of this round's accepted paths from
        scratch memory to slots. has_leaves: whether nodes without children were stored, too."""
        self._has_leaves = has_leaves
        self._moves_itself = True

    def _moves(self, outcome: Outcome) -> Sequence[tuple[int, Gap]]:
        nodes = self.layout or self.shape
        moves = list[tuple[int, Gap]]()
        if self._masks and not self._has_leaves:
            return moves  # the last forward stored mask tokens, not drafted ones
        places = zip(self.slots.tolist(), self.last().tolist(), outcome.rows.tolist(), strict=False)
        for slot, last, (_, _, event, node, _) in places:
            if event == Event.COMMIT and nodes.lanes[node] >= 0:
                stop = last + int(nodes.depths[node]) + self._has_leaves
                gap = Gap(slot, last + int(nodes.forks[node]), stop)
                if not self._moves_itself:
                    moves.append((slot * nodes.num_lanes + int(nodes.lanes[node]), gap))
                self.filled[slot] = stop
        return moves

    def trunk(self, num_draft: Ints) -> Places:
        self._has_leaves = True
        return super().trunk(num_draft)

    def _trunk_of_one(self, count: int) -> Places:
        slots = np.repeat(self.slots, count)
        return self._served_places(slots, np.repeat(self.last(), count), np.arange(count))

    def _served_places(self, slots: Index, last: Index, nodes: Index) -> Places:
        """Returns where the KV cache stores n rows of a forward over tree nodes. nodes: the node of
        each row, or its place in the BranchLayout. slots: the slot of the row's sequence. last: the
        position of its last committed token, which is node 0. All are [n]."""
        self._moves_itself = False
        found = self.layout or self.shape
        lanes = found.lanes[nodes]
        positions = last + found.depths[nodes]
        in_trunk = lanes < 0
        self.filled[slots[in_trunk]] = positions[in_trunk] + 1  # later rows are deeper
        ids = slots * found.num_lanes + lanes + SPAN * (found.spans[nodes] - 1)
        lanes = np.where(in_trunk, TRUNK, ids)
        return int32_places(slots, positions, lanes, last + found.forks[nodes])

    def _branch_places(self, rows: Index, nodes: Ints, ranks: Ints) -> BranchPlaces:
        assert self.layout is not None, "branches of a batch that grows none"
        lanes = self.layout.firsts[nodes] + ranks * self.layout.size
        return BranchPlaces(self.slots[rows], self.last()[rows], lanes)

    def step(self, places: BranchPlaces, steps: int) -> Places:
        in_lanes = self.layout is not None and (places.lanes != TRUNK).all()
        if masks := len(self._masks):
            if not in_lanes:
                self._has_leaves = False
                return super().step(places, steps)
            slots, starts, lanes = (np.repeat(column, 1 + masks) for column in places)
            ahead = np.tile(np.arange(1 + masks), len(places.slots))
            return self._served_places(slots, starts, lanes + ahead)
        nodes = self.shape.inner[steps]
        slots = np.repeat(places.slots, len(nodes))
        starts = np.repeat(places.starts, len(nodes))
        if in_lanes and self.layout is not None:
            nodes = (places.lanes[:, None] + self.layout.inner[nodes]).reshape(-1)
        else:
            self._has_leaves = False
            nodes = np.tile(nodes, len(places.slots))
        return self._served_places(slots, starts, nodes)
