"""A replayed pool against the loops themselves, in virtual time: every round's duration.

The real target loops, drafters and shared forwards run with clocks of their own (as in
test_predict_loops), a thread for each group's lead. Host work takes no time here, since its order
between two forwards is not predicted; the link does.
"""

from __future__ import annotations

import math
import random
import threading
from typing import Any

import numpy as np
import pytest

from mpissd.common.rounds import Request, Source
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.round import TargetLoop, serve
from mpissd.engine.decode.speculator import RemoteSpeculator
from mpissd.engine.model.shared import SharedForwards
from mpissd.engine.workload.gemm import DraftStream, ImposedDraft, ImposedTarget, TokenStream
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.pool import Pool, replay
from tests.lab import test_predict_loops as loops

HOST = HostCosts(link=40e-6)


class PoolClock(loops.Clock):
    """The draft's time, which goes on to the first message of any group."""

    def __init__(self) -> None:
        self._next = math.inf
        super().__init__()

    @property
    def next_event(self) -> float:  # type: ignore[override]
        return self._next

    @next_event.setter
    def next_event(self, time: float) -> None:
        self._next = min(self._next, time)

    def until(self, test: Any, what: str) -> None:
        self._next = math.inf
        super().until(test, what)


class PoolForwards(loops.VirtualForwards):
    most_rows = 1 << 20


class PoolRun:
    """One job of G groups, all sides in one process."""

    def __init__(self, pool: Pool, rounds: int) -> None:
        self.pool, self.rounds, self.draft = pool, rounds, PoolClock()
        self.job, device = pool.job, pool.device
        lists = dict(device.lists).get(self.job.draft_options.top_k)
        assert device.draft is not None
        stepper: Any = PoolForwards(self.draft, device.draft, lists)
        self.shared = SharedForwards(stepper, pool.targets, slots=pool.batch, lanes=999)
        self.round_s: list[list[float]] = [[] for _ in range(pool.targets)]

    def __call__(self) -> list[list[float]]:
        ends, leads = [], []
        for group in range(self.pool.targets):
            lead_end, draft_end, clock = self._link()
            ends.append((draft_end, self._drafter(group)))
            lead = threading.Thread(target=self._lead, args=(group, lead_end, clock), daemon=True)
            leads.append(lead)
        for lead in leads:
            lead.start()
        serve(*ends)
        for lead in leads:
            lead.join(60)
        return self.round_s

    def _link(self) -> tuple[LeadEnd, DraftEnd, loops.Clock]:
        shape, clock = LinkShape(0, self.pool.batch, self.job.lookahead), loops.Clock()
        return *loops.virtual_link(shape, clock, self.draft, (0, 0, 0)), clock

    def _lead(self, group: int, end: LeadEnd, clock: loops.Clock) -> None:
        job, batch = self.job, self.pool.batch
        stream = TokenStream(job.config.seed, job.target.vocab_size, batch, job.lookahead)
        worker = loops.TargetWorker(
            loops.VirtualForwards(clock, self.pool.device.verify), ImposedTarget(stream)
        )
        worker.clock = clock
        nobody = None
        loop = TargetLoop(worker, RemoteSpeculator(end), nobody, batch, clock)
        loop.admit([Request(n) for n in range(group * batch, (group + 1) * batch)])
        for _ in range(self.rounds):
            start = clock.now
            loop.step()
            self.round_s[group].append(clock.now - start)
        loop.stop()

    def _drafter(self, group: int) -> Drafter:
        job, config = self.job, self.job.config
        laws = job.acceptance, job.hit_law
        widest, vocab = max(1, job.fan_outs.widest), job.target.vocab_size
        stream = DraftStream(config.seed, vocab, self.pool.batch, *laws, widest)
        worker = loops.DraftWorker(self.shared.seats[group], ImposedDraft(stream))
        worker.clock = self.draft
        source = Source.FAST if config.backup == "fast" else Source.JIT
        policy = DraftPolicy(job.lookahead, job.fan_outs, source, job.backup_lookahead)
        return Drafter(worker, policy, self.pool.batch, self.draft)


def check(groups: int, rounds: int, **flags: Any) -> None:
    job = loops.make_job(**flags)
    made = Pool.of(job, groups, load_profile("h100"), HOST)
    pool = Pool(job, groups, loops.steep(made.device), HOST)
    measured = PoolRun(pool, rounds)()
    assert [len(each) for each in measured] == [rounds] * groups
    for each, found in zip(measured, replay(pool, rounds).rounds_s, strict=True):
        np.testing.assert_allclose(found, each, rtol=0, atol=1e-9)


CASES: dict[str, dict[str, Any]] = {
    "sd": {"mode": "sd", "lookahead": 5},
    "late": {"mode": "ssd", "lookahead": 5, "fan_out": "uniform:3"},
    "batch": {"mode": "ssd", "lookahead": 4, "batch_size": 3, "fan_out": "geometric:20"},
    "fast": {"mode": "ssd", "lookahead": 4, "batch_size": 2, "backup": "fast"},
}


@pytest.fixture(autouse=True)
def no_host_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "HOST", HOST)


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("groups", [1, 5])
def test_replays_what_the_loops_do(groups: int, flags: dict[str, Any]) -> None:
    check(groups, 40, **flags)


@pytest.mark.parametrize("seed", range(4))
def test_replays_random_pools(seed: int) -> None:
    rnd = random.Random(seed)
    lookahead = rnd.randint(1, 8)
    fan_out = rnd.choice([f"uniform:{rnd.randint(1, 5)}", f"geometric:{rnd.randint(8, 40)}"])
    more: dict[str, Any] = {
        "lookahead": lookahead,
        "fan_out": fan_out,
        "batch_size": rnd.choice([1, 1, 2, 4]),
        "backup": rnd.choice(["jit", "fast"]),
        "backup_lookahead": rnd.randint(1, lookahead),
        "alpha": rnd.choice([0.5, 0.8, 0.95]),
        "seed": seed,
    }
    check(rnd.randint(2, 8), 30, mode="ssd", **more)
