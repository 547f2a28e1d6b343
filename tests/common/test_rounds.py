"""The messages of a round."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpissd.common.rounds import Event, Outcome, Speculation, verify_rows

COMMIT, ADMIT, RELEASE = Event.COMMIT, Event.ADMIT, Event.RELEASE


def outcome(round_: int, *rows: tuple[int, int, int, int, int]) -> Outcome:
    """Rows of (id, epoch, event, k, t*)."""
    return Outcome(round_, np.array(rows, np.int32).reshape(-1, Outcome.WIDTH))


def speculation(round_: int, lookahead: int, *rows: list[int]) -> Speculation:
    """A row is its draft tokens; the columns after them hold junk."""
    table = np.full((len(rows), Speculation.HEAD + lookahead), -7, np.int32)
    for row, tokens in zip(table, rows, strict=True):
        row[:3] = 1, 0, len(tokens)
        row[3 : 3 + len(tokens)] = tokens
    return Speculation(round_, table)


@given(st.data(), st.integers(0, 4), st.integers(1, 4))
def test_what_the_target_verifies(data: st.DataObject, lookahead: int, size: int) -> None:
    drafts = st.lists(st.integers(0, 99), max_size=lookahead)
    rows = data.draw(st.lists(drafts, min_size=size, max_size=size))
    last = np.arange(100, 100 + size, dtype=np.int32)
    flat = [token for n, tokens in enumerate(rows) for token in [100 + n, *tokens]]
    found = speculation(3, lookahead, *rows)
    verified = verify_rows(last, found)
    assert verified.dtype == np.int32 and verified.tolist() == flat
    assert found.num_rows == len(flat)


def test_an_admission_asks_for_a_speculation_and_a_release_does_not() -> None:
    rows = outcome(0, (1, 0, COMMIT, 0, 5), (2, 0, RELEASE, 0, 5), (3, 0, ADMIT, 0, 5))
    assert rows.num_live == 2
    assert Outcome.admission(-1, []).rows.shape == (0, Outcome.WIDTH)
