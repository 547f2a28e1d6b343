"""One model's forwards for several users: their launches run together as one forward.

A draft that serves several target groups keeps the sequences and the lanes of each group in a range
of its own of one KV cache. Each group's worker sees a *seat*: forwards with slots and lanes from 0
on, and the results of its own rows only. Forwards are batch-invariant
(docs/transformer.md), so a seat computes the numbers of a model of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from time import perf_counter_ns

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.common.tape import SPILL_ROUNDS, Tape
from mpissd.common.wait import Waiter
from mpissd.engine.model.forwards import Forwards, Places, Results
from mpissd.engine.model.stepper import Stepper


class SharedForwards:
    """A stepper with seats: the forwards that they have launched run when one of them waits."""

    COLUMNS = ("begin_ns", "device_ns", "rows", "seats")

    def __init__(self, stepper: Stepper, seats: int, *, slots: int, lanes: int) -> None:
        """Divides the stepper; slots, lanes: of each seat."""
        self.stepper = stepper
        self.most_rows = stepper.most_rows // seats
        self.seats = [GroupView(self, n * slots, n * lanes) for n in range(seats)]
        self.launched: list[GroupView] = []
        self._log = Tape("q")  # the values of COLUMNS, forward after forward

    def wait(self, waiter: Waiter) -> None:
        """Runs the launched rows, then waits for them; chunks of prompts run separately."""
        launched, self.launched = self.launched, []
        for seat in launched:
            if seat.chunk is not None:
                self.stepper.upload_chunk(*seat.chunk)
                self._run(len(seat.chunk[2]), 1, waiter)
                seat.chunk = None
        together = [seat for seat in launched if seat.part is not None]
        if not together:
            return
        rows, tokens, placed = 0, list[Ints](), list[Places]()
        start = 0
        for seat in together:
            assert seat.part is not None
            count, own, places = seat.part
            seat.window, seat.part = slice(start, start + len(own)), None
            start, rows = start + len(own), rows + count
            tokens.append(own)
            placed += [] if places is None else [places]
        lists = any(seat.lists for seat in together)
        self.stepper.upload(rows, np.concatenate(tokens), _joined(placed), lists=lists)
        self._run(rows, len(together), waiter)

    def _run(self, rows: int, seats: int, waiter: Waiter) -> None:
        begin = perf_counter_ns()
        self.stepper.launch()
        self.stepper.wait(waiter)
        add = self._log.tail.append
        for value in (begin, round(self.stepper.elapsed_s() * 1e9), rows, seats):
            add(value)
        if len(self._log.tail) >= len(self.COLUMNS) * SPILL_ROUNDS:
            self._log.spill()

    def log(self) -> NDArray[np.int64]:
        """Returns COLUMNS of every forward so far, int64 [n, 4]; begin_ns: of perf_counter."""
        return self._log.read().reshape(-1, len(self.COLUMNS))


class GroupView(Forwards):
    """The part of a shared model that one user sees; its slots and lanes begin at 0.

    part, chunk: what was uploaded, and is not in a forward yet. window: the rows of this seat in
    the last forward. lists: whether lists of candidates are read.
    """

    def __init__(self, shared: SharedForwards, first_slot: int, first_lane: int) -> None:
        self.shared = shared
        self._first_slot, self._first_lane = first_slot, first_lane
        self.part: tuple[int, Ints, Places | None] | None = None
        self.chunk: tuple[int, int, Ints] | None = None
        self.window, self.lists = slice(0, 0), False

    @property
    def most_rows(self) -> int:
        return self.shared.most_rows

    def upload(
        self, rows: int, tokens: Ints, places: Places | None = None, *, lists: bool = False
    ) -> None:
        if places is not None:
            lanes = np.where(places.lanes < 0, places.lanes, places.lanes + self._first_lane)
            slots = places.slots + np.int32(self._first_slot)
            places = replace(places, slots=slots, lanes=lanes.astype(np.int32))
        self.part, self.lists = (rows, tokens, places), lists

    @property
    def chunk_rows(self) -> int:
        return self.shared.stepper.chunk_rows

    def upload_chunk(self, slot: int, start: int, tokens: Ints) -> None:
        self.part, self.chunk = None, (self._first_slot + slot, start, tokens)

    def launch(self) -> None:
        assert self not in self.shared.launched, "a second forward before the first one is over"
        self.shared.launched.append(self)

    def done(self) -> bool:
        return self not in self.shared.launched and self.shared.stepper.done()

    def wait(self, waiter: Waiter) -> None:
        self.shared.wait(waiter)

    def elapsed_s(self) -> float:
        """Returns the device time of the last finished forward, with the rows of all seats."""
        return self.shared.stepper.elapsed_s()

    def results(self) -> Results:
        whole = self.shared.stepper.results()
        window = slice(None), self.window, slice(None if self.lists else 1)
        return Results(whole.ids[window], None if whole.values is None else whole.values[window])

    def logits(self, rows: Sequence[int]) -> NDArray[np.float32]:
        return self.shared.stepper.logits([self.window.start + row for row in rows])

    def release(self, slots: Sequence[int]) -> None:
        self.shared.stepper.release([self._first_slot + slot for slot in slots])

    def close(self) -> None:
        """Does nothing: the owner of the stepper closes it."""


def _joined(parts: Sequence[Places]) -> Places | None:
    if not parts:
        return None
    names = "slots", "positions", "lanes", "trunks"
    columns = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
    return Places(**columns, reads=any(part.reads for part in parts))
