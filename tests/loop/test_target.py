"""The target loop as a server would drive it: sequences join and leave between rounds."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Control, Outcome, Request
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import queue_link
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.decode.speculator import RemoteSpeculator, Speculator
from tests.loop.harness import Result, Rig, Scenario, SteppedSpeculator, check_against_the_law

Modes = pytest.mark.parametrize("mode", ["ar", "sd", "ssd"])


class Server:
    """A loop, its records and the draft that runs in the same thread."""

    def __init__(self, scenario: Scenario) -> None:
        self.rig = Rig(scenario)
        self.records = RoundRecords(scenario.K)
        stepped = SteppedSpeculator(self.rig, lambda round_: scenario.K)
        self.loop = self.rig.loop(Speculator() if scenario.mode == "ar" else stepped)

    def step(self, count: int = 1) -> RoundResult:
        for _ in range(count):
            result = self.loop.step()
            self.records.add(result.t_target_s, result.speculation, result.outcome)
        return result

    def check(self) -> Result:
        result = Result(self.rig, self.records)
        check_against_the_law(result)
        return result


@Modes
@settings(max_examples=40)
@given(data=st.data())
def test_sequences_come_and_go_in_any_order(mode: str, data: st.DataObject) -> None:
    """Batches run empty, ids come again in another epoch, and some are called off before they have
    begun."""
    server = Server(Scenario(mode, batch=3, lookahead=3, p_hit=1.0))
    live: dict[int, int] = {}  # by id, its epoch
    epochs: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 6))):
        for name in data.draw(st.lists(st.sampled_from([0, 4, 5, 8]), unique=True)):
            if name in live:
                server.loop.finish([name])
                del live[name]
            elif len(live) < 3:
                live[name] = epochs[name] = epochs.get(name, -1) + 1
                server.loop.admit([Request(name, epoch=live[name])])
                if data.draw(st.sampled_from([False, False, True])):
                    server.loop.finish([name])
                    del live[name]
        server.step(data.draw(st.integers(1, 3)))
        batch = server.loop.batch
        assert dict(batch.identity[:, :2].tolist()) == live
    rows = server.check().rows
    if mode == "ssd":  # a newcomer misses once, and costs the others no hit
        seen = set[tuple[int, int]]()
        for row in rows.tolist():
            assert row[6] == (tuple(row[1:3]) in seen)
            seen.add((row[1], row[2]))


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
