"""The stages of chained rounds on host arrays; the twin of chained.cu."""

from __future__ import annotations

import numpy as np

from mpissd.engine.model.transformer.stages import LAST, NOBODY, NOT_FINITE, Ends, Stage


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
