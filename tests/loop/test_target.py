"""The target loop as a server would drive it: sequences join and leave between rounds."""

from __future__ import annotations

import pytest

from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Control, Outcome, Request
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import queue_link
from mpissd.engine.decode.round import RoundResult, TargetLoop
from mpissd.engine.decode.speculator import NoSpeculator, RemoteSpeculator
from tests.loop.harness import (
    Result,
    Rig,
    Scenario,
    SteppedSpeculator,
    check_against_the_law,
)


class Server:
    """A loop, its records and the draft that runs in the same thread."""

    def __init__(self, scenario: Scenario) -> None:
        self.rig = Rig(scenario)
        self.records = RoundRecords(scenario.K)
        speculator = (
            NoSpeculator()
            if scenario.mode == "ar"
            else SteppedSpeculator(self.rig, lambda round_: scenario.K)
        )
        self.loop: TargetLoop = self.rig.loop(speculator)

    def step(self, count: int = 1) -> RoundResult:
        for _ in range(count):
            result = self.loop.step()
            self.records.add(result.t_target_s, result.speculation, result.outcome)
        return result

    @property
    def ids(self) -> list[int]:
        return [int(id_) for id_ in self.loop.batch.ids]

    def check(self) -> Result:
        result = Result(self.rig, self.records)
        check_against_the_law(result)
        return result


Modes = pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])


@Modes
def test_sequences_come_and_go(mode: str) -> None:
    server = Server(Scenario(mode, batch=3, lookahead=3, p_hit=1.0))
    server.loop.admit([Request(0)])
    server.step(3)
    server.loop.admit([Request(8), Request(4)])
    server.step(3)
    assert server.ids == [0, 8, 4]
    server.loop.finish([8])
    server.step(2)
    assert server.ids == [0, 4]
    server.loop.finish([0])
    server.loop.admit([Request(5)])
    server.step(3)
    assert server.ids == [4, 5]
    result = server.check()
    if mode == "ssd":  # a newcomer misses once, and costs the others no hit
        rows = result.rows
        misses = [tuple(row[:2]) for row in rows.tolist() if not row[6]]
        assert misses == [(0, 0), (3, 8), (3, 4), (8, 5)]
    alone = Server(Scenario("ar", batch=1))
    alone.loop.admit([Request(4)])
    alone.step(20)
    together = result.records.tokens()[4]
    assert together[:20] == alone.records.tokens()[4][: len(together)]


@Modes
def test_an_outcome_that_was_returned_never_changes(mode: str) -> None:
    server = Server(Scenario(mode, batch=3, lookahead=3, p_hit=1.0))
    kept: list[tuple[Outcome, bytes]] = []

    def step() -> None:
        server.loop.control = Control(lookahead=2 + len(kept) % 2)
        outcome = server.step().outcome
        kept.append((outcome, outcome.rows.tobytes()))

    server.loop.admit([Request(n) for n in range(3)])
    step()
    server.loop.finish([1])
    step()
    server.loop.admit([Request(7), Request(8)])
    server.loop.finish([0, 8])
    step()
    server.loop.stop()
    assert [outcome.rows.tobytes() for outcome, _ in kept] == [rows for _, rows in kept]
    assert [outcome.num_live for outcome, _ in kept] == [3, 2, 2]
    assert all(outcome.control == Control() for outcome, _ in kept)


@Modes
def test_the_same_id_in_another_epoch_starts_over(mode: str) -> None:
    server = Server(Scenario(mode, batch=1, p_hit=1.0))
    server.loop.admit([Request(6, epoch=1)])
    server.step(5)
    server.loop.finish([6])
    server.loop.admit([Request(6, epoch=2)])
    server.step(5)
    rows = server.check().rows
    assert rows[:, 2].tolist() == [1] * 5 + [2] * 5
    if mode == "ssd":
        assert rows[:, 6].tolist() == [0, 1, 1, 1, 1] * 2


@Modes
def test_a_batch_runs_empty_and_takes_up_again(mode: str) -> None:
    server = Server(Scenario(mode, batch=2))
    server.loop.admit([Request(0), Request(1)])
    server.step()
    server.loop.finish([0, 1])
    server.step(2)
    assert server.ids == []
    server.loop.admit([Request(2)])
    server.step(2)
    assert server.ids == [2]
    server.check()


@Modes
def test_a_sequence_that_has_not_begun_can_be_called_off(mode: str) -> None:
    server = Server(Scenario(mode, batch=3))
    server.loop.admit([Request(0), Request(1)])
    server.loop.finish([0])
    server.step(2)
    server.loop.admit([Request(2), Request(3)])
    server.loop.finish([1, 3])
    server.step(2)
    assert server.ids == [2]
    server.check()


def test_more_sequences_than_the_batch_holds_are_refused() -> None:
    server = Server(Scenario("ar", batch=2))
    server.loop.admit([Request(n) for n in range(3)])
    with pytest.raises(ProtocolError, match="3 admissions, room for 2"):
        server.loop.step()


def test_a_draft_that_says_nothing_is_a_fault() -> None:
    rig = Rig(Scenario("sd"))
    lead, _ = queue_link(rig.shape, Waiter(0.2, spin=False))
    loop = rig.loop(RemoteSpeculator(lead))
    loop.admit([Request(0)])
    with pytest.raises(FaultError, match="draft: speculation"):
        loop.step()
