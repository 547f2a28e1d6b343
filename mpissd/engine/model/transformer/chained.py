"""Rounds of greedy decoding that the device decides by itself (`ChainedForwards`).

A round is K forwards of the draft (none in AR) and one of the target on the same device. Between
two of them a tiny operation (*stage*) writes the next forward's tokens and places, and after the
last one it applies the acceptance rule; so all of a round is launched at once, and the next round
before this one is over. Nothing waits for the host.

Stage 0 places the draft's first forward, of two rows a sequence, and the target's. Its first row
computes the token before the last committed one once more: where all drafted tokens were accepted,
the draft lacks its keys and values, elsewhere they are equal, since a row's numbers never depend
on other rows. Stage j = 1 … K takes the j-th drafted token; stage K + 1 counts the accepted ones
and begins the next round's state.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import Program
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.ops import Ops
from mpissd.engine.model.transformer.stack import TransformerStack
from mpissd.engine.model.transformer.stages import RING, Ends, Sheet, Stage

Index = NDArray[np.int64]
_IN_FLIGHT = 2  # rounds at once: one that runs, and the next one


class ChainedForwards:
    """The programs of such rounds, over the steppers of a draft (None: AR) and of its target.

    Two rounds may be under way, of which the second takes its state from the first. The steppers
    must not be used meanwhile.
    """

    is_on = False  # whether the present round is chained; set by its speculator

    def __init__(
        self, draft: Stepper | None, target: Stepper, sequences: int, lookahead: int
    ) -> None:
        """Compiles the programs for `sequences` sequences; both steppers share a backend."""
        assert (draft is None) == (lookahead == 0), f"K={lookahead}"
        backend, self._steppers = target.backend, (draft or target, target)
        self._draft = None if draft is None else _stack_of(draft)
        self._target = _stack_of(target)
        self.sheet = Sheet(
            backend.host_ints(Sheet.size(sequences, lookahead)), sequences, lookahead
        )
        ids = None if self._draft is None else self._draft.weights.head_ids
        self._ids = None if ids is None else self._ops.ids(ids)
        every = range(lookahead + 1)
        self._programs: list[list[Program]] = [
            [self._program(number, turn) for number in every] for turn in range(RING)
        ]
        self._flying: list[int] = []  # rounds that are launched and not yet read

    @property
    def _ops(self) -> Ops:
        ops: Ops = self._target.weights.ops
        return ops

    def _program(self, number: int, turn: int) -> Program:
        """Compiles the draft's forward number + 1, or the target's, with the stages around it."""
        sheet, is_last = self.sheet, number == self.sheet.lookahead
        stepper = self._steppers[is_last]
        stack = _stack_of(stepper)
        rows = sheet.sequences * (sheet.lookahead + 1 if is_last else 2 - (number > 0))
        forward = stack.body(rows, 1)
        stages = [0, 1] if number == 0 else [number + 1]
        first, last = (self._stage(n, turn) for n in (stages[0], stages[-1]))

        def body() -> None:
            if number == 0:
                first()
            stack.steer()
            forward()
            last()

        return stepper.backend.program(body, stepper.cost(rows))

    def _stage(self, number: int, turn: int) -> Callable[[], None]:
        draft = None if self._draft is None else ends_of(self._draft)
        stage = Stage(number, turn, self.sheet, draft, ends_of(self._target), self._ids)
        return lambda: self._ops.chained(stage)

    def begin(self, state: Ints) -> None:
        """Sets the sequences' places, [S, 4] like Sheet.state; no round may be under way."""
        assert not self._flying, f"rounds {self._flying} are under way"
        self.sheet.state[...] = state

    def hold(self, slots: Index, positions: Index) -> None:
        """Reserves the pages of both caches up to these positions, those included."""
        for stack in (self._draft, self._target):
            if stack is not None:
                stack.pages.hold(slots, positions)

    def launch(self, round_: int, forced: Ints) -> None:
        """Launches a round after the rounds under way; forced: [S, 2K + 1] like Sheet.forced."""
        assert len(self._flying) < _IN_FLIGHT, f"rounds {self._flying} are under way"
        self.sheet.forced[round_ % RING] = forced
        for program in self._programs[round_ % RING]:
            program.launch()
        self._flying.append(round_)

    @property
    def lookahead(self) -> int:
        """K, 0 in AR."""
        return self.sheet.lookahead

    def is_flying(self, round_: int) -> bool:
        """Returns whether a round was launched, and neither read nor dropped."""
        return round_ in self._flying

    def last_of(self, round_: int) -> Program:
        """Returns the target's forward of a round, the last of its programs."""
        return self._programs[round_ % RING][-1]

    def told(self, round_: int) -> Ints:
        """Returns the outcome of a finished round, a copy of [S, K + 2] (Sheet.told)."""
        first = self._flying.pop(0)
        assert round_ == first, f"round {round_} out of turn, {first} is the next one"
        told: Ints = self.sheet.told[round_ % RING].copy()
        return told

    def dropped(self) -> list[Program]:
        """Forgets all rounds under way; returns the programs to wait for."""
        last = [self.last_of(round_) for round_ in self._flying]
        self._flying.clear()
        return last

    def draft_s(self, round_: int) -> float:
        """Returns the device time of a finished round before its target's forward, in seconds."""
        programs = self._programs[round_ % RING]
        return programs[-1].after_s(programs[0]) + programs[0].elapsed_s()

    def close(self) -> None:
        """Frees the programs."""
        for programs in self._programs:
            for program in programs:
                program.close()


def _stack_of(stepper: Stepper) -> TransformerStack:
    assert isinstance(stepper.stack, TransformerStack)
    return stepper.stack


def ends_of(stack: TransformerStack) -> Ends:
    """Returns what stages read and write of a model's forwards."""
    return Ends(stack.buffers.tokens, stack.pages.seats, stack.candidates.by_k[1])
