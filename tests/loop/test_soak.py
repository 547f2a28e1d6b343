"""1e5 rounds of SSD: memory grows by the raw record of each round and by nothing else."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.decode.speculator import Speculator
from mpissd.rounds import Outcome, Request, Speculation
from mpissd.trace import LeadPhase
from tests.loop.harness import Rig, Scenario

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 100_000
# 18 marks of 9 bytes on both sides, and 8 numbers a round: 226 bytes; half as much to spare.
MOST_BYTES_A_ROUND = 340


class Inline(Speculator):
    """The draft in this thread; every branch is grown in full."""

    def __init__(self, rig: Rig) -> None:
        self._drafter = rig.drafter
        self._asked: Outcome | None = None

    def ask(self, outcome: Outcome) -> None:
        self._asked = outcome

    def answer(self, round_: int, count: int) -> Speculation:
        assert self._asked is not None
        speculation = self._drafter.answer(self._asked)
        self._drafter.hear(speculation)
        if self._drafter.begin_growth(speculation):
            while self._drafter.growing:
                self._drafter.grow_step()
        self._drafter.close_round(speculation)
        return speculation

    def stop(self, outcome: Outcome) -> None:
        return None


class Forgetful(list[object]):
    """A log that keeps nothing."""

    def append(self, item: object) -> None:
        return None


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def soak() -> None:
    """Prints the bytes that the second half of the rounds added."""
    rig = Rig(Scenario(batch=2, lookahead=3, seed=1, fan_out=(2, 1, 1, 2)))
    for forwards in (rig.draft_forwards, rig.target_forwards):
        forwards.log = Forgetful()  # type: ignore[assignment]
    loop = rig.loop(Inline(rig))
    loop.admit([Request(0), Request(1)])
    used = []
    for number in range(ROUNDS):
        if number % 500 == 499:  # sequences come and go
            gone = 2 * (number // 500) % 1000
            loop.finish([gone, gone + 1])
            loop.admit([Request((gone + 2) % 1000), Request((gone + 3) % 1000)])
        loop.step()
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        if number in (ROUNDS // 2, ROUNDS - 1):
            gc.collect()
            used.append(resident_bytes())
    print(used[1] - used[0])


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_memory_stays_flat() -> None:
    """In a process of its own: what other tests left behind would blur it."""
    program = "from tests.loop.test_soak import soak; soak()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) < MOST_BYTES_A_ROUND * ROUNDS / 2 + (4 << 20), done.stdout
