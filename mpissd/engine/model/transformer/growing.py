"""Growth of greedy branches whose steps the device joins by itself (`ChainedGrowth`).

A step's likeliest tokens are the inputs of the next one. Between two forwards a small kernel, a
*stage* (grow.cu, and `GrowthSheet.run` on a host), takes them over and moves each row's place on.
So the next step is launched before the host has read this one's tokens, and the first one before it
has read the glue's candidates: the first stage picks the branches' first tokens from them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.model.forwards import Places
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import PADDING
from mpissd.engine.model.transformer.chained import Ends
from mpissd.engine.model.transformer.trees import NOBODY

_AT_ONCE = 2  # programs that may be under way


class GrowthSheet:
    """Host arrays that stages read and write, views of `ints`, which has 1 + R · (8 + K) elements.

    step: [1], the number of the next stage. places: [4, R], of the next step's rows (Places).
    picks: [3, R], of each lane the row of the last forward that has its next token, the token's
    rank among those that were not served there, and the served one (NOBODY: none). tokens:
    [K + 1, R], the lanes' first tokens, and those of each step; NOBODY: the stage decides.
    """

    def __init__(self, ints: HostArray, rows: int) -> None:
        self.ints, self.step = ints, ints[:1]
        self.places, self.picks, self.tokens = np.split(ints[1:].reshape(-1, rows), (4, 7))
        self.places[...] = PADDING

    def run(self, rows: int, draft: Ends, ids: Ints | None) -> None:
        """Computes a stage before a forward of `rows` rows, as grow.cu does on a device.

        draft: the ends of the forwards. ids: the tokens of their outputs (None: all).
        """
        part, every = slice(rows), np.arange(rows)
        lines, ranks, served = self.picks[:, part]
        found = draft.best.ids[lines] if ids is None else ids[draft.best.ids[lines]]
        order = np.argsort(found == served[:, None], axis=1, kind="stable")
        decided = self.tokens[self.step[0], part]
        decided[...] = np.where(decided < 0, found[every, order[every, ranks]], decided)
        draft.tokens[part], draft.seats.rows[:, part] = decided, self.places[:, part]
        self.places[1, part] += 1
        lines[...], ranks[...], served[...] = every, 0, NOBODY
        self.step[0] += 1


class ChainedGrowth:
    """The programs of such growth: the first stage, then a step and the stage after it each.

    The next one is launched while one runs. The stepper, whose stack is a transformer's, waits for
    the oldest one; it must not be used otherwise until `left`, the programs that are launched and
    not yet read, is 0.
    """

    def __init__(self, stepper: Stepper, lanes: Collection[int], steps: int) -> None:
        """Compiles the programs for these numbers of lanes; steps: K."""
        self._stepper, self.left = stepper, 0
        stack: Any = stepper.stack
        most, ids, ops = max(map(stepper.bucket, lanes)), stack.weights.head_ids, stack.weights.ops
        self.sheet = GrowthSheet(stepper.backend.host_ints(1 + most * (8 + steps)), most)
        device_ids = None if ids is None else ops.ids(ids)
        stack.place(None)

        def program(rows: int, k: int) -> Program:
            forward, ends = stack.body(rows, 1), Ends.of(stack, k)

            def body() -> None:
                if k == 1:
                    stack.steer()
                    forward()
                ops.grow(self.sheet, rows, ends, device_ids)

            self.sheet.step[0] = 0
            return stepper.backend.program(body, stepper.cost(rows))

        self._first = program(most, stepper.options.top_k)
        sizes = {stepper.bucket(count) for count in lanes}
        self._steps = {rows: [program(rows, 1) for _ in range(_AT_ONCE)] for rows in sizes}

    def begin(self, lanes: Any, places: Places, picks: Any, steps: int) -> bool:
        """Launches the first of `steps` steps of Branches behind the glue, launched last.

        places: of that step. picks: of the lanes, as GrowthSheet has them, as their tokens are.
        Returns False if so many lanes have no programs.
        """
        sheet, count, part = self.sheet, len(lanes), slice(len(lanes))
        if not count or (turns := self._steps.get(self._stepper.bucket(count))) is None:
            return False
        sheet.places[...], sheet.step[0] = PADDING, 0
        sheet.places[:, part] = places.slots, places.positions, places.lanes, places.trunks
        sheet.tokens[0, part], sheet.tokens[1:, part] = lanes.first, lanes.tokens.T
        sheet.picks[:, part] = picks
        self._programs = [self._first, *(turns[n % _AT_ONCE] for n in range(steps))]
        self._lanes, self._collected = lanes, 0
        self.launch()
        return True

    def launch(self) -> None:
        """Launches the next program, unless it was the last one or two are under way."""
        first = self._collected
        for program in self._programs[first + self.left : first + _AT_ONCE]:
            program.launch()
            self.left += 1
        self._stepper.current = self._programs[first]

    def collect(self) -> None:
        """Stores the tokens of the oldest stage, which is over, in the lanes."""
        number, lanes = self._collected, self._lanes
        tokens = self.sheet.tokens[number, : len(lanes)]
        if number:
            lanes.append(tokens)
        else:
            lanes.begin(tokens.copy())
        self._collected, self.left = number + 1, self.left - 1
        if self.left:
            self._stepper.current = self._programs[self._collected]
