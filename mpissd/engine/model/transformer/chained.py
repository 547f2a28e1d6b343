"""Rounds of greedy decoding that the device decides by itself (`ChainedForwards`).

A round is K forwards of the draft (none in AR) and one of the target on the same device. Between
two of them a tiny operation (*stage*) writes the next forward's tokens and places, and behind the
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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray, Program
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.ops import Ops
from mpissd.engine.model.transformer.stack import TransformerStack

Index = NDArray[np.int64]
SLOT, POSITION, LAST, BEFORE = range(4)  # columns of Sheet.state
NOBODY = -1  # the slot of no sequence; a token that is not given
NOT_FINITE = -2  # the accepted tokens of a sequence with a logit that is not finite
_IN_FLIGHT = 2  # rounds at once: one that runs, and the one behind it
_RING = 3  # and the one before them, whose clocks are still read


class Sheet:
    """Host arrays that stages read and write, views of one int32 buffer.

    state: [S, 4], of each sequence its slot, the position of its last committed token, that token,
    and the token before it (NOBODY: its keys and values are stored). By round modulo 2: forced
    [2, S, 2K + 1], tokens that replace those of the draft's forwards and of the target's rows
    (NOBODY: none); told [2, S, K + 2], the accepted tokens, the bonus and the drafted tokens; spent
    [2], the nanoseconds of a round's stages on a GPU.
    """

    def __init__(self, ints: HostArray, sequences: int, lookahead: int) -> None:
        """Lays the arrays out in `ints`, which has `size(sequences, lookahead)` elements."""
        self.ints, self.sequences, self.lookahead = ints, sequences, lookahead
        widths = 4, _RING * (2 * lookahead + 1), _RING * (lookahead + 2)
        ends = np.cumsum([sequences * width for width in widths]).tolist()
        self.state: Ints = ints[: ends[0]].reshape(sequences, 4)
        self.forced: Ints = ints[ends[0] : ends[1]].reshape(_RING, sequences, -1)
        self.told: Ints = ints[ends[1] : ends[2]].reshape(_RING, sequences, -1)
        self.spent: Ints = ints[ends[2] : ends[2] + _RING]
        ints[...] = NOBODY

    @staticmethod
    def size(sequences: int, lookahead: int) -> int:
        """Returns the number of elements of the buffer."""
        return sequences * (4 + _RING * (3 * lookahead + 3)) + _RING


@dataclass(frozen=True)
class Stage:
    """One stage of a round: what an Ops needs to compute it.

    number: 0 … K + 1. turn: the round modulo 3. ids: the tokens of the draft's outputs on the
    device (None: output n is token n).
    """

    number: int
    turn: int
    sheet: Sheet
    draft: TransformerStack | None
    target: TransformerStack
    ids: Any = None


def run_stage(stage: Stage) -> None:
    """Computes a stage on host arrays; the twin of chained.cu."""
    sheet, ahead = stage.sheet, stage.sheet.lookahead
    for row in range(sheet.sequences):
        if stage.number == 0:
            _place(stage, row)
        elif stage.number <= ahead:
            _draft(stage, row)
        else:
            _judge(stage, row)


def _place(stage: Stage, row: int) -> None:
    slot, position, last, before = stage.sheet.state[row].tolist()
    if stage.draft is not None:
        _put(stage.draft, 2 * row, before, NOBODY if before < 0 else slot, position - 1)
        _put(stage.draft, 2 * row + 1, last, slot, position)
    first = row * (stage.sheet.lookahead + 1)
    for j in range(stage.sheet.lookahead + 1):
        _put(stage.target, first + j, 0 if j else last, slot, position + j)


def _draft(stage: Stage, row: int) -> None:
    sheet, number = stage.sheet, stage.number
    assert stage.draft is not None
    token = int(sheet.forced[stage.turn, row, number - 1])
    if token < 0:
        from_row = 2 * row + 1 if number == 1 else row
        token = int(stage.draft.candidates.by_k[1].ids[from_row, 0])
        token = token if stage.ids is None else int(stage.ids[token])
    sheet.told[stage.turn, row, 1 + number] = token
    stage.target.buffers.tokens[row * (sheet.lookahead + 1) + number] = token
    if number < sheet.lookahead:
        slot, position = sheet.state[row, :LAST].tolist()
        _put(stage.draft, row, token, slot, position + number)


def _judge(stage: Stage, row: int) -> None:
    sheet, ahead = stage.sheet, stage.sheet.lookahead
    first, told = row * (ahead + 1), sheet.told[stage.turn, row]
    found = stage.target.candidates.by_k[1]
    rows = slice(first, first + ahead + 1)
    forced = sheet.forced[stage.turn, row, ahead:]
    best = np.where(forced >= 0, forced, found.ids[rows, 0])
    accepted = 0
    while accepted < ahead and told[2 + accepted] == best[accepted]:
        accepted += 1
    slot, position, last, _ = sheet.state[row].tolist()
    is_finite = bool(np.isfinite(found.values[rows, 0]).all())
    told[:2] = accepted if is_finite or slot < 0 else NOT_FINITE, best[accepted]
    before = int(told[1 + accepted]) if accepted else last
    sheet.state[row] = slot, position + accepted + 1, best[accepted], before


def _put(stack: TransformerStack, row: int, token: int, slot: int, position: int) -> None:
    stack.buffers.tokens[row] = token
    stack.pages.seats.rows[:, row] = slot, position, NOBODY, position


class ChainedForwards:
    """The programs of such rounds, over the steppers of a draft (None: AR) and of its target.

    Two rounds may be under way, of which the second takes its state from the first. Nobody may use
    the steppers meanwhile.
    """

    is_on = False  # whether the present round is chained; its speculator says

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
            [self._program(number, turn) for number in every] for turn in range(_RING)
        ]
        self._flying: list[int] = []  # rounds that are launched and not yet told

    @property
    def _ops(self) -> Ops:
        ops = self._target.weights.ops
        assert ops is not None
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
        stage = Stage(number, turn, self.sheet, self._draft, self._target, self._ids)
        return lambda: self._ops.chained(stage)

    def begin(self, state: Ints) -> None:
        """Sets where the sequences stand, [S, 4] like Sheet.state; no round may be under way."""
        assert not self._flying, f"rounds {self._flying} are under way"
        self.sheet.state[...] = state

    def hold(self, slots: Index, positions: Index) -> None:
        """Reserves the pages of both caches up to these positions, those included."""
        for stack in (self._draft, self._target):
            if stack is not None:
                stack.pages.hold(slots, positions)

    def launch(self, round_: int, forced: Ints) -> None:
        """Launches a round behind those under way; forced: [S, 2K + 1] like Sheet.forced."""
        assert len(self._flying) < _IN_FLIGHT, f"rounds {self._flying} are under way"
        self.sheet.forced[round_ % _RING] = forced
        for program in self._programs[round_ % _RING]:
            program.launch()
        self._flying.append(round_)

    @property
    def lookahead(self) -> int:
        """K, 0 in AR."""
        return self.sheet.lookahead

    def is_flying(self, round_: int) -> bool:
        """Returns whether a round was launched, and neither told nor dropped."""
        return round_ in self._flying

    def last_of(self, round_: int) -> Program:
        """Returns the target's forward of a round, the last of its programs."""
        return self._programs[round_ % _RING][-1]

    def told(self, round_: int) -> Ints:
        """Returns what a finished round told, a copy of [S, K + 2] (Sheet.told)."""
        assert round_ == self._flying.pop(0), f"round {round_} out of turn"
        told: Ints = self.sheet.told[round_ % _RING].copy()
        return told

    def dropped(self) -> list[Program]:
        """Forgets all rounds under way; returns the programs to wait for."""
        last = [self.last_of(round_) for round_ in self._flying]
        self._flying.clear()
        return last

    def draft_s(self, round_: int) -> float:
        """Returns the device time of a finished round before its target's forward, in seconds."""
        programs = self._programs[round_ % _RING]
        return programs[-1].after_s(programs[0]) + programs[0].elapsed_s()

    def idle_s(self, round_: int) -> float:
        """Returns the time without a forward from the round before's to this one's verification.

        In seconds: between programs, and in stages, which compute no forward. Both rounds must be
        over, one launched behind the other.
        """
        programs, before = self._programs[round_ % _RING], self.last_of(round_ - 1)
        gaps = sum(b.after_s(a) for a, b in zip([before, *programs], programs, strict=False))
        return gaps + max(0, int(self.sheet.spent[round_ % _RING])) * 1e-9

    def close(self) -> None:
        """Frees the programs."""
        for programs in self._programs:
            for program in programs:
                program.close()


def _stack_of(stepper: Stepper) -> TransformerStack:
    assert isinstance(stepper.stack, TransformerStack)
    return stepper.stack
