"""Rehearsed passes: host work without the forwards inside it, and forwards in a round's order."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpissd.common.config import RunConfig
from mpissd.common.trace import LeadPhase, Ledger
from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import HostProgram
from mpissd.engine.model.stepper import Stepper
from mpissd.lab.measure import host_costs
from mpissd.lab.measure.forward_times import ForwardTimes, Rehearsed, beyond, in_sequence
from mpissd.lab.measure.rehearsal import (
    RehearsedForwards,
    Took,
    host_slices,
    host_table,
    of_a_round,
)
from mpissd.lab.measure.run import execute
from tests.lab.test_transformer_profile import TINY, job

SLOW_S, WAKE_S = 16e-3, 1e-3


def stamped(*marks: tuple[int, int]) -> Ledger:
    """A ledger of one round that began at 1000 ns, with these (phase, end)."""
    ledger = Ledger(LeadPhase)
    for phase, end in marks:
        ledger._phases.append(phase)
        ledger._ends.append(end)
    for value in (0, 1000, len(marks)):
        ledger._rounds.append(value)
    return ledger


def test_a_phase_is_told_without_the_forwards_that_began_inside_it() -> None:
    ledger = stamped((LeadPhase.UPLOAD, 1100), (LeadPhase.LAUNCH, 1900), (LeadPhase.RECORD, 2000))
    # The first and the last of them lie elsewhere.
    taken = [(500, 400, 1, 0), (1110, 300, 1, 150), (1420, 450, 1, 0), (2500, 10, 1, 0)]
    table = host_table(ledger, taken, 0, 1)
    assert table[0, 2 + LeadPhase.UPLOAD] == 100 and table[0, 2 + LeadPhase.RECORD] == 100
    assert table[0, 2 + LeadPhase.LAUNCH] == 50 and table[0, 1] == 250
    assert np.diff(host_slices(ledger, taken, 0, 1)[:, 2:]).ravel().tolist() == [100, 50, 100]
    assert np.array_equal(host_table(ledger, (), 0, 1), ledger.table(0, 1))


def test_a_round_s_forwards_are_added_up() -> None:
    taken = [(n, length * 1000, 2, 0) for n, length in enumerate([9, 9, 4, 2, 5, 1, 6, 0, 7])]
    found = of_a_round(taken, 2, 1)  # 4+2, 5+1, 6+0; the last has no pair
    assert found is not None and found.seconds == pytest.approx(6e-6) and found.beyond is None
    wide = of_a_round([*taken, (9, 3000, 8, 0)], 1, 0, rows=8)
    assert wide is not None and wide.seconds == pytest.approx(3e-6)
    assert of_a_round(taken, 0, 0) is None and of_a_round((), 1, 3) is None


def test_a_repetition_tells_what_the_order_costs_however_the_clock_drifts() -> None:
    """Forwards of 100 µs take 20 µs more behind other work, on a clock that slows down by half."""
    slower = np.linspace(1.0, 1.5, 21)
    taken = [(n, round(220e3 * by), 1, round(100e3 * by)) for n, by in enumerate(slower)]
    found = of_a_round(taken, 1, 0)
    assert found is not None and found.seconds == pytest.approx(120e-6 * 1.25, rel=1e-6)
    assert found.beyond == pytest.approx(20e-6 * 1.25, rel=1e-6)
    assert beyond(found, in_a_row=100e-6) == found.beyond  # and not 50, measured at another time


@pytest.mark.parametrize(
    ("took", "in_a_row", "late"),
    [
        (Took(3e-3), 2e-3, 1e-3),
        (Took(1e-3), 1e-3, 0.0),
        (Took(3e-3, 4e-4), 2.6e-3, 4e-4),
        (Took(3e-3, -4e-4), 3e-3, 0.0),
        (None, 2e-3, 0.0),
    ],
    ids=["slower", "faster", "repeated", "faster than repeated", "none"],
)
def test_forwards_and_host_costs_add_up_to_what_was_rehearsed(
    took: Took | None, in_a_row: float, late: float
) -> None:
    once = ForwardTimes({1: 1e-3, 5: 2e-3}, 0.0, rehearsed=True)
    device = in_sequence(job(lookahead=4), Rehearsed(took), Rehearsed(took), once, once)
    assert float(device.verify_s(5)) == pytest.approx(in_a_row)
    assert beyond(took, once(5)) == pytest.approx(late)
    assert device.draft is not None and device.draft.seconds == (1e-3, 2e-3)


def test_a_draft_s_steps_are_divided_and_growth_is_one_step() -> None:
    once = ForwardTimes({1: 1e-3, 5: 2e-3}, 0.0, rehearsed=True)
    steps = Rehearsed(None, backup=Took(8e-3, 2e-3))
    assert in_sequence(job(lookahead=4), steps, steps, once, once).draft_s(1) == pytest.approx(
        1.5e-3
    )
    ssd = job(mode="ssd", lookahead=4, fan_out="uniform:1")
    grown = Rehearsed(None, grow=Took(5e-4))
    assert in_sequence(ssd, Rehearsed(), grown, once, once).draft_s(5) == pytest.approx(5e-4)


def test_a_rehearsed_forward_runs_behind_the_mean_context_and_gives_its_pages_back() -> None:
    shown: list[Any] = []
    stepper: Any = SimpleNamespace(
        most_rows=4,
        options=job().options,
        upload=lambda *what, lists: shown.append(what),
        launch=lambda: time.sleep(WAKE_S),
        elapsed_s=lambda: WAKE_S,
        release=lambda slots: shown.append(list(slots)),
        done=lambda: True,
        wait=lambda waiter: None,
    )
    forwards = RehearsedForwards(stepper, 2, again=False)
    forwards.upload(4, np.zeros(3, np.int32))
    forwards.launch()
    forwards.wait(Waiter(1.0, spin=True))
    (_, length, rows, _), (bucket, _, places) = forwards.taken[0], shown[0]
    assert forwards.done() and rows == 3 and bucket == 4 and length >= WAKE_S * 1e9
    assert places.positions.min() == job().options.context and forwards.elapsed_s() == WAKE_S
    twice = RehearsedForwards(stepper, 2, again=True)
    twice.upload(1, np.zeros(1, np.int32))
    twice.launch()
    _, both, _, again = twice.taken[0]
    assert both - again >= WAKE_S * 1e9 <= again
    forwards.close()
    assert shown[-1] == [0, 1]
    for unread in (forwards.results, lambda: forwards.logits([0])):
        with pytest.raises(NotImplementedError):
            unread()


def calibrated(tmp_path: Path, **flags: Any) -> dict[str, Any]:
    """The profile that a run on the CPU measures of itself."""
    given = {"mode": "sd", "num_drafts": 0, "target": TINY, "draft": TINY, "lookahead": 2, **flags}
    config = RunConfig(
        forward="transformer", backend="numpy", rounds=5, progress="off", out=str(tmp_path), **given
    )
    assert execute(config) == 0
    (path,) = (tmp_path / "profiles").glob("*.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_slow_forwards_are_no_host_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards take 16 ms here, and twice as long the first time behind the other model's: all
    of that is forwards', or what they take in a round's order, and none of it the loops'."""
    last: list[Any] = [None]

    def launch(self: HostProgram, run: Any = HostProgram.launch) -> None:
        behind_other = getattr(self, "model", None) != last[0]
        begin = time.perf_counter()
        time.sleep(SLOW_S * (1 + behind_other))
        last[0] = getattr(self, "model", None)
        run(self)
        self._start = begin

    def compiled(self: Stepper, *what: Any, make: Any = Stepper._compile) -> Any:
        program = make(self, *what)
        program.model = id(self)
        return program

    monkeypatch.setattr(HostProgram, "launch", launch)
    monkeypatch.setattr(Stepper, "_compile", compiled)
    found = calibrated(tmp_path)
    host, verify = found["host"], found["device"]["verify"]
    assert SLOW_S < verify["3"] < 1.5 * SLOW_S  # in a row
    assert SLOW_S < verify["3"] + host["wake"] - SLOW_S < 1.5 * SLOW_S  # behind the draft's
    assert 0.5 * SLOW_S < host["draft_assemble"] < 1.5 * SLOW_S  # the first step of two
    work = sum(seconds for name, seconds in host.items() if name not in ("wake", "draft_assemble"))
    assert 0 < work < 0.5 * SLOW_S


def test_products_alone_are_paused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(host_costs, "RehearsedForwards", lambda *what: made.append(what))
    config = RunConfig(
        mode="ar", pair="toy", backend="numpy", rounds=5, progress="off", out=str(tmp_path)
    )
    assert execute(config) == 0 and not made
