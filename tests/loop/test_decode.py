"""AR, SD and SSD by the same loops: every decision is as the models impose it, in any scenario.

The imposed model gives each sequence's tokens whatever the mode, K, policy or timing, so every way
emits the same tokens. As in a server, sequences join and leave between rounds.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpissd.common.errors import FaultError, ProtocolError
from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Control, Outcome, Request
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import queue_link
from mpissd.engine.oracle import imposed as gemm
from mpissd.engine.round.speculator import RemoteSpeculator, Speculator
from mpissd.engine.round.target import RoundResult
from tests.loop.harness import Result, Rig, Scenario, SteppedSpeculator, check_against_the_law, run


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("lookahead", "backup"), [(1, "jit"), (4, "fast"), (9, "jit")])
def test_windows_of_draws_are_refilled(
    batch: int, lookahead: int, backup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten windows; each sequence has a pace of its own."""
    monkeypatch.setattr(gemm, "WINDOW", 64)
    rates = tuple(0.9 - 0.08 * n for n in range(lookahead))
    told = {"rates": rates, "backup": backup, "num_tokens": 640, "rounds": None, "seed": 3}
    check_against_the_law(run(Scenario("ssd", batch, lookahead, **told)))


@settings(max_examples=120)
@given(st.data())
def test_any_scenario(data: st.DataObject) -> None:
    """Sequences end raggedly, a round may bring more tokens than requested, and followers run the
    lead's forwards."""
    draw = data.draw
    lookahead = draw(st.integers(1, 7), "K")
    p_hit = draw(st.sampled_from([None, 0.0, 0.5, 1.0]), "p_hit")
    least = 1 if p_hit else 0
    fans = st.lists(st.integers(least, 5), min_size=lookahead + 1, max_size=lookahead + 1)
    fan_out = draw(fans.filter(any), "F")
    rates = st.sampled_from([0.0, 0.4, 0.9, 1.0])
    mode, inline = draw(
        st.sampled_from([*3 * [("ssd", False)], ("sd", False), ("sd", True), ("ar", False)]), "mode"
    )
    scenario = Scenario(
        mode=mode,
        inline=inline,
        batch=draw(st.integers(1, 6), "b"),
        lookahead=lookahead,
        fan_out=tuple(fan_out),
        rates=tuple(draw(st.lists(rates, min_size=lookahead, max_size=lookahead), "a")),
        fast_rate=draw(rates, "fast"),
        p_hit=p_hit,
        backup=draw(st.sampled_from(["jit", "fast"]), "backup"),
        backup_lookahead=draw(st.integers(1, lookahead), "K_b"),
        num_tokens=draw(st.sampled_from([None, 1, 9, 30]), "N"),
        rounds=draw(st.integers(1, 8), "rounds"),
        vocab=max(fan_out) + 2 + draw(st.sampled_from([0, 1, 1000]), "V"),
        seed=draw(st.integers(0, 2**64 - 1), "seed"),
        num_followers=draw(st.sampled_from([0, 0, 1, 3]), "followers"),
    )
    result = run(scenario)
    check_against_the_law(result)
    log = result.rig.target_forwards.log
    assert [rows for rows, _ in log] == list(result.records.num_rows())
    assert result.follower_logs == [log] * scenario.num_followers
    sizes = np.bincount(result.rows[:, 0])
    assert (np.diff(sizes) <= 0).all() and sizes[0] == scenario.batch


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
