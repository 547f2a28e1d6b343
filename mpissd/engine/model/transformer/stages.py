"""The stages of chained rounds (`chained`): what they read and write, for each backend's Ops."""

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
RING = 3  # rounds whose numbers are kept: one that runs, those behind and before it


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
        widths = 4, RING * (2 * lookahead + 1), RING * (lookahead + 2)
        ends = np.cumsum([sequences * width for width in widths]).tolist()
        self.state: Ints = ints[: ends[0]].reshape(sequences, 4)
        self.forced: Ints = ints[ends[0] : ends[1]].reshape(RING, sequences, -1)
        self.told: Ints = ints[ends[1] : ends[2]].reshape(RING, sequences, -1)
        self.spent: Ints = ints[ends[2] : ends[2] + RING]
        ints[...] = NOBODY

    @staticmethod
    def size(sequences: int, lookahead: int) -> int:
        """Returns the number of elements of the buffer."""
        return sequences * (4 + RING * (3 * lookahead + 3)) + RING


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
