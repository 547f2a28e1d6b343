"""The stages of chained rounds (`chained`): what they read and write; their work on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from mpissd.common.rounds import Ints
from mpissd.engine.backend.base import HostArray
from mpissd.engine.model.stacks import Best
from mpissd.engine.model.transformer.cache import RowPlaces

SLOT, POSITION, LAST, BEFORE = range(4)  # columns of Sheet.state
NOBODY = -1  # the slot of no sequence; a token that is not given
NOT_FINITE = -2  # the accepted tokens of a sequence with a logit that is not finite
RING = 3  # rounds whose numbers are kept: the one that runs, the one before and the one after it


class Sheet:
    """Host arrays that stages read and write, views of one int32 buffer.

    state: [S, 4], of each sequence its slot, the position of its last committed token, that token,
    and the token before it (NOBODY: its keys and values are stored). forced: [RING, S, 2K + 1], by
    round modulo RING, what replaces the tokens of the draft's forwards and of the target's rows
    (NOBODY: none). told: [RING, S, K + 2], likewise, the accepted tokens, the bonus and the drafts.
    """

    def __init__(self, ints: HostArray, sequences: int, lookahead: int) -> None:
        """Lays the arrays out in `ints`, which has `size(sequences, lookahead)` elements."""
        self.ints, self.sequences, self.lookahead = ints, sequences, lookahead
        widths = 4, RING * (2 * lookahead + 1), RING * (lookahead + 2)
        ends = np.cumsum([sequences * width for width in widths]).tolist()
        self.state: Ints = ints[: ends[0]].reshape(sequences, 4)
        self.forced: Ints = ints[ends[0] : ends[1]].reshape(RING, sequences, -1)
        self.told: Ints = ints[ends[1] : ends[2]].reshape(RING, sequences, -1)
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


def run_stage(stage: Stage) -> None:
    """Computes a stage on host arrays, as chained.cu does on a device."""
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
        token = int(stage.draft.best.ids[from_row, 0])
        token = token if stage.ids is None else int(stage.ids[token])
    sheet.told[stage.turn, row, 1 + number] = token
    stage.target.tokens[row * (sheet.lookahead + 1) + number] = token
    if number < sheet.lookahead:
        slot, position = sheet.state[row, :LAST].tolist()
        _put(stage.draft, row, token, slot, position + number)


def _judge(stage: Stage, row: int) -> None:
    sheet, ahead = stage.sheet, stage.sheet.lookahead
    first, told = row * (ahead + 1), sheet.told[stage.turn, row]
    found = stage.target.best
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


def _put(ends: Ends, row: int, token: int, slot: int, position: int) -> None:
    ends.tokens[row] = token
    ends.seats.rows[:, row] = slot, position, NOBODY, position
