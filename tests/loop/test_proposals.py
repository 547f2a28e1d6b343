"""PROPOSALS: the whole rows that tokens were drawn from, and the lead's handling of them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from tests.loop.markov_rig import Pair, decode

PAIR = Pair(vocab=20, order=2, divergence=0.4, lookahead=3, batch=2, fan_out=(2, 2, 2, 3))


def test_rows_that_come_late_change_nothing() -> None:
    def late(lead: LeadEnd, draft: DraftEnd) -> None:
        inbox, polls = lead._proposals, [0]
        assert inbox is not None
        arrived, release = inbox.arrived, inbox.release

        def arrived_late() -> bool:
            polls[0] += 1
            return polls[0] > 40 and arrived()

        def released() -> None:
            polls[0] = 0
            release()

        inbox.arrived, inbox.release = arrived_late, released  # type: ignore[method-assign]

    assert decode(PAIR, 40, hook=late).tokens == decode(PAIR, 40).tokens


Rows = Sequence[NDArray[np.float32]]
Send = Callable[[int, Rows], None]


def tampering(change: Callable[[Send, int, Rows], None]) -> Callable[[LeadEnd, DraftEnd], None]:
    def hook(lead: LeadEnd, draft: DraftEnd) -> None:
        send = draft.send_proposals
        draft.send_proposals = lambda round_, rows: change(send, round_, rows)  # type: ignore[method-assign]

    return hook


MALFORMED: dict[str, tuple[Callable[[Send, int, Rows], None], str]] = {
    "another round": (lambda send, r, rows: send(r + 1, rows), "round is 1, expected 0"),
    "too few": (lambda send, r, rows: send(r, rows[1:]), "rows is 5, expected 6"),
    "out of order": (lambda send, r, rows: send(r, rows[::-1]), "its row says"),
    "not normal": (lambda send, r, rows: send(r, [row * np.nan for row in rows]), "row says nan"),
    "all zero": (lambda send, r, rows: send(r, [row * 0 for row in rows]), "its row says 0.0"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_rows_are_refused(name: str) -> None:
    change, message = MALFORMED[name]
    pair = replace(PAIR, divergence=1.0)  # rejects at once
    with pytest.raises(ProtocolError, match=message):
        decode(pair, 40, hook=tampering(change))


@pytest.mark.parametrize("divergence", [0.0, 1.0])
def test_rows_that_never_come_are_missed(divergence: float) -> None:
    """If none was needed, at the end of their round."""

    def lost(lead: LeadEnd, draft: DraftEnd) -> None:
        lead.waiter = Waiter(0.2, spin=False)
        draft.send_proposals = lambda round_, rows: None  # type: ignore[method-assign]

    with pytest.raises(FaultError, match="draft: proposals: nothing for"):
        decode(replace(PAIR, divergence=divergence), 40, hook=lost)
