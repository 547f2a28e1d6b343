"""The ledger: exclusive phases that add up to the round, as sums and slices; and none at all."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from mpissd.common import trace
from mpissd.common.trace import DraftPhase, FollowPhase, LeadPhase, Ledger


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A clock that reads 0, then each number given."""
    times = [0]
    monkeypatch.setattr(trace, "perf_counter_ns", lambda: times.pop(0))
    yield times


def test_a_phase_is_the_time_since_the_last_mark(clock: list[int]) -> None:
    ledger = Ledger(LeadPhase)
    clock += [5, 7, 20, 50, 51, 100]
    ledger.restart()
    ledger.mark(LeadPhase.SEND)
    ledger.mark(LeadPhase.LAUNCH)
    ledger.mark(LeadPhase.SEND)  # again: summed
    ledger.close_round(3, LeadPhase.RECORD)
    ledger.close_round(4, LeadPhase.RECORD)  # begins where the last one ended
    table = ledger.table(0, 9).tolist()
    assert [dict(zip(["round", "wall", *ledger.names], row, strict=True)) for row in table] == [
        {**dict.fromkeys(ledger.names, 0), "round": 3, "wall": 46, "send": 32, "launch": 13}
        | {"record": 1},
        {**dict.fromkeys(ledger.names, 0), "round": 4, "wall": 49, "record": 49},
    ]


@pytest.mark.parametrize("phases", [LeadPhase, DraftPhase, FollowPhase])
def test_slices_and_table_say_the_same(phases: type[LeadPhase]) -> None:
    ledger = Ledger(phases)
    rng = np.random.default_rng(3)
    for round_ in range(50):
        for phase in rng.choice(list(phases), 12).tolist():
            ledger.mark(phase)
        ledger.close_round(round_, phases(0))
    table, slices = ledger.table(5, 45), ledger.slices(5, 45)
    assert table.dtype == slices.dtype == np.int64
    assert len(table) == 40 and len(slices) == 40 * 13
    assert (slices[:, 3] >= slices[:, 2]).all() and (slices[1:, 2] == slices[:-1, 3]).all()
    for row in table:
        mine = slices[slices[:, 0] == row[0]]
        assert mine[-1, 3] - mine[0, 2] == row[1]
        for phase in phases:
            taken = mine[mine[:, 1] == phase]
            assert (taken[:, 3] - taken[:, 2]).sum() == row[2 + phase]
