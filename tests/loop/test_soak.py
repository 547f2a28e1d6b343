"""Very many rounds of SSD in one thread: memory stays flat, and the record is complete."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Outcome, Request, Speculation
from mpissd.common.trace import LeadPhase
from mpissd.engine.decode.speculator import Speculator
from tests.loop.harness import Rig, Scenario
from tests.needs import needs_linux

ROOT = Path(__file__).resolve().parents[2]
MOST_GROWTH = 1 << 20  # bytes, of all rounds behind the first tenth
BATCH = 2


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
        self._drafter.verification_started(speculation)
        if self._drafter.finish(self._drafter.begin_growth(speculation)):
            while self._drafter.growing:
                self._drafter.finish(self._drafter.grow_step())
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


def raw_ns() -> int:
    """A clock that nobody disciplines; the ledger's is another."""
    return time.clock_gettime_ns(getattr(time, "CLOCK_MONOTONIC_RAW", time.CLOCK_MONOTONIC))


def soak(num_rounds: int) -> None:
    """Prints what the rounds behind the first tenth added to memory, and what was recorded."""
    rig = Rig(Scenario(batch=BATCH, lookahead=3, seed=1, fan_out=(2, 1, 1, 2)))
    for forwards in (rig.draft_forwards, rig.target_forwards):
        forwards.log = Forgetful()  # type: ignore[assignment]
    loop, records = rig.loop(Inline(rig)), RoundRecords(3)
    loop.admit([Request(0), Request(1)])
    used, digest = [], 0
    gc.collect()
    gc.disable()  # as a job's rounds run
    loop.ledger.restart()
    began, last = raw_ns(), time.perf_counter()
    for number in range(num_rounds):
        if number % 500 == 499:  # sequences come and go
            gone = 2 * (number // 500) % 1000
            loop.finish([gone, gone + 1])
            loop.admit([Request((gone + 2) % 1000), Request((gone + 3) % 1000)])
        result = loop.step()
        records.add(result.t_target_s, result.speculation, result.outcome)
        digest = (31 * digest + int(result.outcome.bonus.sum())) % (1 << 61)
        loop.ledger.close_round(loop.round - 1, LeadPhase.RECORD)
        now = time.perf_counter()
        records.round_s.append(now - last)
        last = now
        if number in (num_rounds // 10, num_rounds - 1):
            used.append(resident_bytes())
    took_s = (raw_ns() - began) * 1e-9
    print(json.dumps({**told(rig, records, loop.ledger.table(0, num_rounds), digest),
                      "growth": used[1] - used[0], "took_s": took_s}))  # fmt: skip


def told(rig: Rig, records: RoundRecords, lead: Any, digest: int) -> dict[str, Any]:
    """What the raw records say when all is over."""
    sequences, draft = records.sequences(), rig.drafter.ledger.table(0, 1 << 62)
    again = 0
    for bonus in sequences[:, 4].reshape(-1, BATCH).sum(axis=1).tolist():
        again = (31 * again + bonus) % (1 << 61)
    return {
        "rounds": len(records),
        "sequences": len(sequences),
        "tokens": sum(len(tokens) for tokens in records.token_arrays().values()),
        "emitted": int(sequences[:, 3].sum()) + len(sequences),
        "is_as_decided": again == digest,
        "in_order": bool(
            (np.diff(sequences[:, 0]) >= 0).all() and sequences[-1, 0] + 1 == len(lead)
        ),
        "drafted": len(rig.drafter.table(0, 1 << 62)),
        "closes": bool((lead[:, 1] == lead[:, 2:].sum(axis=1)).all()),
        "draft_closes": bool((draft[:, 1] == draft[:, 2:].sum(axis=1)).all()),
        "lead_s": float(lead[:, 1].sum() * 1e-9),
        "wall_s": float(np.asarray(records.round_s).sum()),
    }


@pytest.mark.slow
@needs_linux
@pytest.mark.parametrize("num_rounds", [30_000, pytest.param(1_000_000, marks=pytest.mark.long)])
def test_memory_stays_flat_and_the_record_complete(num_rounds: int) -> None:
    """In a process of its own: what other tests left behind would blur it."""
    program = f"from tests.loop.test_soak import soak; soak({num_rounds})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stderr[-500:]
    found = json.loads(done.stdout)
    assert found["growth"] < MOST_GROWTH, found
    # Nothing of the record is missing or out of its place, on disk as in memory.
    assert found["rounds"] == found["drafted"] == num_rounds, found
    assert found["sequences"] == BATCH * num_rounds and found["tokens"] == found["emitted"], found
    assert found["is_as_decided"] and found["in_order"], found
    # Phases add up to rounds, and rounds to no more than passed by another clock.
    assert found["closes"] and found["draft_closes"], found
    # Rates of the two clocks may differ by 5e-4; nothing is counted twice.
    assert 0 < found["lead_s"] < 1.001 * found["took_s"], found
    assert 0 < found["wall_s"] < 1.001 * found["took_s"], found
