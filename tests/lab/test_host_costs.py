"""What the paused passes' ledgers say of the link, its naps and its readings."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.trace import DraftPhase, LeadPhase
from mpissd.common.wait import Waiter
from mpissd.engine.decode.draft import Drafter
from mpissd.lab.measure import host_costs
from mpissd.lab.measure.forward_times import ForwardTimes

N = 9
PATIENT = Waiter(60.0, spin=False, spin_s=200e-6)


def table(phases: Any, **us: float) -> NDArray[np.int64]:
    """N rounds whose phases last so many microseconds."""
    row = [round(us.get(phase.name.lower(), 0) * 1e3) for phase in phases]
    return np.array([[n, sum(row), *row] for n in range(N)], np.int64)


def lead(draft_wait: float) -> Any:
    ledger = table(LeadPhase, send=10, commit=20, draft_wait=draft_wait, device_wait=5000)
    return host_costs.PassLedgers(ledger)


def draft(growth_s: list[float] | None = None, **us: float) -> Any:
    """growth_s: of each round, NaN where it was cut short; None: nothing was grown."""
    rounds = np.zeros((N, len(Drafter.COLUMNS)))
    rounds[:, Drafter.COLUMNS.index("t_growth_s")] = np.nan if growth_s is None else growth_s
    ledger = table(DraftPhase, **{"commit": 10, "speculate": 1000, "send": 10, **us})
    return host_costs.PassLedgers(None, ledger, rounds)


def costs(waiter: Waiter, draft_wait: float, drafts: list[Any], nap_us: float) -> dict[str, float]:
    found = host_costs._link_costs(waiter, lead(draft_wait), drafts, nap_us * 1e-6)
    return {name: round(seconds * 1e6, 6) for name, seconds in found.items()}


def test_what_lies_between_is_two_ways_and_the_naps_of_who_waited_long() -> None:
    """The lead waited 1300 + 20 µs, the draft worked 1020: 300 lie between."""
    both = costs(PATIENT, 1300, [draft(wait=4000)], 60)
    assert both == {"link": 90.0, "nap": 60.0, "patience": 200.0, "draft_read": 0.0}
    assert costs(PATIENT, 1300, [draft(wait=150)], 60)["link"] == 120.0  # the draft never napped
    assert costs(PATIENT, 1300, [draft(wait=250)], 60)["link"] == 120.0  # 190, and then a nap
    spinning = costs(Waiter(60.0, spin=True), 1300, [draft(wait=4000)], 0)
    assert spinning == {"link": 150.0, "nap": 0.0, "patience": 0.0, "draft_read": 0.0}


def test_naps_are_no_longer_than_what_lies_between() -> None:
    found = costs(PATIENT, 1300, [draft(wait=4000)], 900)
    assert (found["link"], found["nap"]) == (0.0, 150.0)


def test_a_reading_is_the_wait_after_growth_that_was_cut_short() -> None:
    growth = [2e-3] * N
    growth[2] = growth[5] = np.nan  # so the outcomes of rounds 3 and 6 were there already
    grown = draft(growth, wait=900, glue=700)
    grown.draft[[3, 6], 2 + DraftPhase.WAIT] = 30_000, 50_000
    found = costs(PATIENT, 1300, [draft(wait=4000), grown], 60)
    assert (found["draft_read"], found["link"]) == (40.0, 70.0)
    whole = draft([2e-3] * N, wait=900, glue=700)
    assert costs(PATIENT, 1300, [draft(wait=4000), whole], 60)["draft_read"] == 0.0
    assert host_costs._read_s(draft(wait=900)) == 0.0  # SD: nothing was there to be cut short


def test_a_pause_is_the_bucket_s_and_bounded() -> None:
    pause_s = host_costs.pause_of(ForwardTimes({4: 2e-3, 8: 3e-3, 64: 0.1}, 0.0))
    assert [pause_s(rows) for rows in (1, 4, 5, 8, 9, 99)] == [2e-3, 2e-3, 3e-3, 3e-3, 8e-3, 8e-3]
