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

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.model.stacks import Best
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cache import RowPlaces
from mpissd.engine.model.transformer.stack import TransformerStack

Index = NDArray[np.int64]
SLOT, POSITION, LAST, BEFORE = range(4)  # columns of Sheet.state
NOBODY = -1  # an empty slot, or a token that is not given
NOT_FINITE = -2  # the accepted tokens of a sequence with a logit that is not finite
RING = 3  # rounds whose numbers are kept: the one that runs, the one before and the one after it
_IN_FLIGHT = 2  # rounds at once: one that runs, and the next one


class Sheet:
    """Host arrays that stages read and write, views of one int32 buffer.

    state: [S, 4], each sequence's slot, the position of its last committed token, that token, and
    the token before it (NOBODY: its keys and values are stored). forced: [RING, S, 2K + 1], by
    round modulo RING, imposed tokens of the draft's forwards and of the target's rows (NOBODY:
    none). decided: [RING, S, K + 2], also by round, num_accepted, the bonus and the drafts.
    """

    def __init__(self, ints: HostArray, sequences: int, lookahead: int) -> None:
        """Lays the arrays out in `ints`, which has `size(sequences, lookahead)` elements."""
        self.ints, self.sequences, self.lookahead = ints, sequences, lookahead
        widths = 4, RING * (2 * lookahead + 1), RING * (lookahead + 2)
        ends = np.cumsum([sequences * width for width in widths[:2]])
        state, forced, decided = np.split(ints, ends)
        self.state: Ints = state.reshape(sequences, 4)
        self.forced: Ints = forced.reshape(RING, sequences, -1)
        self.decided: Ints = decided.reshape(RING, sequences, -1)
        ints[...] = NOBODY

    @staticmethod
    def size(sequences: int, lookahead: int) -> int:
        """Returns the number of elements of the buffer."""
        return sequences * (4 + RING * (3 * lookahead + 3))


@dataclass(frozen=True)
class Ends:
    """Both ends of one model's forwards.

    tokens: host int32 [max_rows], which the next one computes; seats: their places; best: the
    likeliest token of each row of the last one, on the device.
    """

    tokens: HostArray
    seats: RowPlaces
    best: Best

    @classmethod
    def of(cls, stack: TransformerStack) -> Ends:
        """Returns the ends of a stack's forwards."""
        return cls(stack.buffers.tokens, stack.pages.seats, stack.candidates.by_k[1])

    def put(self, row: int, token: int, slot: int, position: int) -> None:
        """Sets a trunk row of the next forward."""
        self.tokens[row] = token
        self.seats.rows[:, row] = slot, position, NOBODY, position


@dataclass(frozen=True)
class Stage:
    """One stage of a round: what an Ops needs to compute it.

    number: 0 … K + 1. turn: the round modulo 3. ids: the tokens of the draft's outputs on the
    device (None: output n is token n).
    """

    number: int
    turn: int
    sheet: Sheet
    draft: Ends | None
    target: Ends
    ids: Any = None

    def run(self) -> None:
        """Computes the stage on host arrays, as chained.cu does on a device."""
        sheet, number, draft, target = self.sheet, self.number, self.draft, self.target
        ahead, forced, every = sheet.lookahead, sheet.forced[self.turn], sheet.decided[self.turn]
        for row, decided in enumerate(every):
            slot, position, last, before = sheet.state[row].tolist()
            first = row * (ahead + 1)
            if number == 0:
                if draft is not None:
                    draft.put(2 * row, before, NOBODY if before < 0 else slot, position - 1)
                    draft.put(2 * row + 1, last, slot, position)
                for j in range(ahead + 1):
                    target.put(first + j, 0 if j else last, slot, position + j)
            elif number <= ahead:
                assert draft is not None
                token = int(forced[row, number - 1])
                if token < 0:
                    token = int(draft.best.ids[2 * row + 1 if number == 1 else row, 0])
                    token = token if self.ids is None else int(self.ids[token])
                decided[1 + number] = target.tokens[first + number] = token
                if number < ahead:
                    draft.put(row, token, slot, position + number)
            else:
                rows, given = slice(first, first + ahead + 1), forced[row, ahead:]
                best = np.where(given >= 0, given, target.best.ids[rows, 0])
                accepted = 0
                while accepted < ahead and decided[2 + accepted] == best[accepted]:
                    accepted += 1
                is_finite = bool(np.isfinite(target.best.values[rows, 0]).all())
                decided[:2] = accepted if is_finite or slot < 0 else NOT_FINITE, best[accepted]
                before = int(decided[1 + accepted]) if accepted else last
                sheet.state[row] = slot, position + accepted + 1, best[accepted], before


class ChainedForwards:
    """The programs of such rounds, over the steppers of a draft (None: AR) and of its target.

    Two rounds may be under way, of which the second takes its state from the first. The steppers,
    whose stacks are transformers, must not be used meanwhile.
    """

    is_on = False  # whether the present round is chained; set by its speculator

    def __init__(
        self, draft: Stepper | None, target: Stepper, sequences: int, lookahead: int
    ) -> None:
        """Compiles the programs for `sequences` sequences; both steppers share a backend."""
        assert (draft is None) == (lookahead == 0), f"K={lookahead}"
        self._steppers = draft or target, target
        stacks: list[Any] = [None if draft is None else draft.stack, target.stack]
        self._draft, self._target = stacks
        ints = target.backend.host_ints(Sheet.size(sequences, lookahead))
        self.sheet, ops = Sheet(ints, sequences, lookahead), self._target.weights.ops
        ids = None if self._draft is None else self._draft.weights.head_ids
        self._ids = None if ids is None else ops.ids(ids)
        self._programs: list[list[Program]] = [
            [self._program(number, turn) for number in range(lookahead + 1)] for turn in range(RING)
        ]
        self._flying: list[int] = []  # rounds that are launched and not yet read

    def _program(self, number: int, turn: int) -> Program:
        """Compiles the draft's forward number + 1, or the target's, with the stages around it."""
        sheet, is_last = self.sheet, number == self.sheet.lookahead
        stepper = self._steppers[is_last]
        stack: Any = stepper.stack
        rows = sheet.sequences * (sheet.lookahead + 1 if is_last else 2 - (number > 0))
        forward, ops = stack.body(rows, 1), self._target.weights.ops
        ends = None if self._draft is None else Ends.of(self._draft), Ends.of(self._target)
        first, last = (Stage(n, turn, sheet, *ends, self._ids) for n in (0, number + 1))

        def body() -> None:
            if number == 0:
                ops.chained(first)
            stack.steer()
            forward()
            ops.chained(last)

        return stepper.backend.program(body, stepper.cost(rows))

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

    def outcome(self, round_: int) -> Ints:
        """Returns the outcome of a finished round, a copy of [S, K + 2] (Sheet.decided)."""
        first = self._flying.pop(0)
        assert round_ == first, f"round {round_} out of turn, {first} is the next one"
        outcome: Ints = self.sheet.decided[round_ % RING].copy()
        return outcome

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
