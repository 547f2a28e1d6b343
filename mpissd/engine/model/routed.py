"""Forwards of several drafts of one shape: each sequence's rows are computed by its own draft.

A worker sees one model. The sequences of a slot are given to a draft when they begin; a forward's
rows are then computed draft by draft. Each draft has a KV cache of its own, so that weights and
caches take as much memory as that many drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Places, Results
from mpissd.engine.model.stacks import Stacks
from mpissd.engine.model.stepper import Stepper

_Part = tuple[int, NDArray[np.int64]]  # a draft, and the forward's rows that it computes


class RoutedStepper(Stepper):
    """A stepper of draft 0 that hands rows of other drafts' slots to theirs.

    What has no place in the cache, and whatever asks for costs or programs, is of draft 0.
    """

    is_routed = True

    def __init__(
        self,
        *parts: Any,
        members: Sequence[Stacks],
        num_sequences: int,
        compiled: bool = True,
        weights: Any = None,
        stacks: Stacks,
        **told: Any,
    ) -> None:
        """Takes the arguments of Stepper; members: the factories of drafts 1 …."""
        told |= {"num_sequences": num_sequences, "compiled": False}
        self._others = [Stepper(*parts, stacks=member, **told) for member in members]
        self._routes = np.zeros(num_sequences, np.int64)  # the draft of each slot
        self._parts: list[_Part] = []
        super().__init__(*parts, stacks=stacks, weights=weights, **told)
        if compiled:
            self.compile()

    def compile(self) -> None:
        super().compile()
        for other in self._others:
            other.compile()

    def only(self, buckets: Iterable[int]) -> RoutedStepper:
        part = super().only(wanted := list(buckets))
        assert isinstance(part, RoutedStepper)
        part._others = [other.only(wanted) for other in self._others]
        part._routes = np.zeros_like(self._routes)
        return part

    def route(self, slot: int, draft: int) -> None:
        """Gives the sequence that begins in a slot to a draft; its cache holds nothing yet."""
        self._routes[slot] = draft

    def routed(self, slot: int) -> int:
        """Returns the draft of a slot's sequence."""
        return int(self._routes[slot])

    @property
    def chunk_rows(self) -> int:
        """0: rows of several drafts share no chunk."""
        return 0

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        drafts = np.zeros(len(tokens), np.int64) if places is None else self._routes[places.slots]
        self._parts = [(int(n), np.flatnonzero(drafts == n)) for n in np.unique(drafts)]
        if len(self._parts) == 1:
            self._of(self._parts[0][0]).upload(rows, tokens, places, lists=lists)
            return
        assert places is not None
        for draft, mine in self._parts:
            self._of(draft).upload(len(mine), tokens[mine], _taken(places, mine), lists=lists)

    def _of(self, draft: int) -> Stepper:
        """Returns the forwards of one draft."""
        return self._others[draft - 1] if draft else super()  # type: ignore[return-value]

    def launch(self) -> None:
        for draft, _ in self._parts:
            self._of(draft).launch()

    def done(self) -> bool:
        return all(self._of(draft).done() for draft, _ in self._parts)

    def wait(self, waiter: Waiter) -> None:
        for draft, _ in self._parts:
            self._of(draft).wait(waiter)

    def elapsed_s(self) -> float:
        return sum(self._of(draft).elapsed_s() for draft, _ in self._parts)

    def results(self) -> Results:
        found = [self._of(draft).results() for draft, _ in self._parts]
        if len(found) == 1:
            return found[0]
        values = [one.values for one in found if one.values is not None]
        return Results(
            self._joined([one.ids for one in found]), self._joined(values) if values else None
        )

    def _joined(self, found: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """Returns [heads, rows, k] of what each draft found for its own rows."""
        heads, _, k = found[0].shape
        count = sum(len(mine) for _, mine in self._parts)
        every = np.empty((heads, count, k), found[0].dtype)
        for (_, mine), part in zip(self._parts, found, strict=True):
            every[:, mine] = part
        return every

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        wanted = np.asarray(rows, np.int64)
        every = np.zeros((len(wanted), 0), np.float32)
        for draft, mine in self._parts:
            asked = np.flatnonzero(np.isin(wanted, mine))
            if len(asked):
                found = self._of(draft).logits(np.searchsorted(mine, wanted[asked]).tolist())
                if not every.shape[1]:
                    every = np.empty((len(wanted), found.shape[1]), np.float32)
                every[asked] = found
        return every

    def release(self, slots: Sequence[int]) -> None:
        super().release(slots)
        for other in self._others:
            other.release(slots)

    def close(self) -> None:
        super().close()
        for other in self._others:
            other.close()


def _taken(places: Places, rows: NDArray[np.int64]) -> Places:
    """Returns the places of some rows."""
    slots, positions = places.slots[rows], places.positions[rows]
    return Places(slots, positions, places.lanes[rows], places.trunks[rows], places.reads)


def stepper_of(*parts: Any, members: Sequence[Stacks] = (), **told: Any) -> Stepper:
    """Returns the stepper of one model, or of a draft and its members; arguments as Stepper's."""
    return RoutedStepper(*parts, members=members, **told) if members else Stepper(*parts, **told)
