"""Very many rounds of SSD in one thread: a server's memory stays flat, a run's record complete."""

import gc
import json

import pytest

from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Request
from mpissd.common.trace import DraftLog, LeadPhase, NullLedger
from tests.loop.harness import Rig, Scenario, SteppedSpeculator
from tests.needs import needs_linux
from tests.scripts import python, resident_bytes

MOST_GROWTH = 1 << 20  # bytes, of all rounds after the first tenth
MOST_A_ROUND = 1000  # bytes of a round's record, of both ranks
BATCH = 2


class Forgetful(list[object]):
    """A log that keeps nothing."""

    def append(self, item: object) -> None:
        return None


class Steps(SteppedSpeculator):
    """Keeps no log of its forwards."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig, lambda round_: 3)
        self.grown, self.answered = Forgetful(), Forgetful()  # type: ignore[assignment]


def soak(num_rounds: int, is_kept: bool) -> None:
    """Prints the growth of memory after the first tenth of the rounds, and the records' counts.

    is_kept: whether rounds are recorded, as in a run; a server keeps none.
    """
    rig = Rig(Scenario(batch=BATCH, lookahead=3, seed=1, fan_out=(2, 1, 1, 2)))
    for forwards in (rig.draft_forwards, rig.target_forwards):
        forwards.log = Forgetful()  # type: ignore[assignment]
    loop, records = rig.loop(Steps(rig)), RoundRecords(3)
    if not is_kept:
        rig.drafter.log = DraftLog(kept=False)
        loop.ledger = NullLedger(LeadPhase)
    loop.admit([Request(0), Request(1)])
    used, emitted = [], 0
    gc.collect()
    gc.disable()  # as a job's rounds run
    loop.ledger.restart()
    for number in range(num_rounds):
        if number % 500 == 499:  # sequences join and leave
            gone = 2 * (number // 500) % 1000
            loop.finish([gone, gone + 1])
            loop.admit([Request((gone + 2) % 1000), Request((gone + 3) % 1000)])
        result = loop.step()
        if is_kept:
            records.add(result.t_target_s, result.speculation, result.outcome)
        emitted += int(result.outcome.num_accepted.sum()) + BATCH
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        if number in (num_rounds // 10, num_rounds - 1):
            used.append(resident_bytes())
    tokens = sum(len(tokens) for tokens in records.token_arrays().values())
    counts = len(records), len(rig.drafter.log.table(0, 1 << 62)), len(records.sequences()) // BATCH
    print(json.dumps({"growth": used[1] - used[0], "missing": emitted - tokens, "rounds": counts}))


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("is_kept", [False, True])
def test_memory_stays_flat_and_the_record_complete(is_kept: bool) -> None:
    """In a process of its own: memory left by other tests would blur it."""
    num_rounds = 6_000
    program = f"from tests.loop.test_soak import soak; soak({num_rounds}, {is_kept})"
    done = python("-c", program, timeout=1500)
    assert done.returncode == 0, done.stderr[-500:]
    found = json.loads(done.stdout)
    if not is_kept:
        assert found["growth"] < MOST_GROWTH, found
    else:
        assert not found["missing"] and found["rounds"] == [num_rounds] * 3, found
        assert found["growth"] < MOST_A_ROUND * num_rounds, found
