"""The recurrence against the loops themselves, in virtual time.

The real TargetLoop, drafter and workers run with clocks of their own that only move when a forward,
a message or a named piece of host work takes time. What they do and when must be foretold exactly.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mpissd.backend.base import Cost, Program
from mpissd.backend.emulated_backend import EmulatedBackend
from mpissd.backend.profile import load_profile
from mpissd.comm.group import SoloGroup
from mpissd.comm.link import Carrier, DraftEnd, LeadEnd, LinkShape
from mpissd.config import RunConfig
from mpissd.decode.draft import Drafter, DraftPolicy, serve
from mpissd.decode.speculator import (
    InlineSpeculator,
    NoSpeculator,
    RemoteSpeculator,
    Speculator,
)
from mpissd.decode.target import TargetLoop
from mpissd.job import Job, resolve
from mpissd.model.shard import Shard
from mpissd.model.stepper import Stepper
from mpissd.predict.costs import DeviceCosts, HostCosts
from mpissd.predict.recurrence import expect_by_law, replay
from mpissd.records import RoundRecords, outcome_digest
from mpissd.rounds import Request, Source
from mpissd.trace import DraftPhase
from mpissd.wait import Waiter
from mpissd.workload.gemm import GemmDraftWorker, GemmTargetWorker
from mpissd.workload.gemm_law import DraftStream, TokenStream

HOST = HostCosts(
    lead_send=15e-6,
    lead_commit=10e-6,
    lead_broadcast=2e-6,
    lead_launch=9e-6,
    lead_sample=60e-6,
    lead_record=7e-6,
    link=40e-6,
    draft_read=44e-6,
    draft_commit=12e-6,
    draft_lookup=21e-6,
    draft_assemble=0.0,
    draft_send=8e-6,
    draft_record=4e-6,
    glue=50e-6,
    keys=65e-6,
    step=45e-6,
    wake=55e-6,
)
WARMUP = 3
WARM_ID = 1 << 20


class Clock(Waiter):
    """One rank's time, and the waiter that moves it on to what the rank waits for."""

    def __init__(self) -> None:
        super().__init__(deadline_s=60.0, spin=False)
        self.now = 0.0
        self.next_event = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def until(self, test: Callable[[], bool], what: str) -> None:
        if not test():
            self.now = self.next_event
            assert test(), what


class VirtualCarrier(Carrier):
    """Messages with the time of their arrival. Asking whether one has arrived waits (really) for
    the peer's next message, which never depends on the answer."""

    def __init__(self, clock: Clock, buffers: Any, queues: Any, link: float, costs: Any) -> None:
        self._clock, (self._out, self._in), self._link = clock, buffers, link
        self._to_peer, self._from_peer = queues
        self._send_s, self._read_s = costs
        self._message: tuple[float, np.ndarray] | None = None

    def ready(self) -> None:
        return None

    def send(self) -> None:
        self._clock.spend(self._send_s)
        self._to_peer.put((self._clock.now + self._link, self._out.array.copy()))

    def arrived(self) -> bool:
        if self._message is None:
            self._message = self._from_peer.get(timeout=60)
            np.copyto(self._in.array, self._message[1])
        self._clock.next_event = self._message[0]
        return self._message[0] <= self._clock.now

    def release(self) -> None:
        self._clock.spend(self._read_s)
        self._message = None

    def close(self) -> None:
        return None


class VirtualProgram(Program):
    """A forward that moves its rank's clock."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds, self._end = clock, seconds, 0.0

    def launch(self) -> None:
        self._end = self._clock.now + self._seconds

    def done(self) -> bool:
        return self._clock.now >= self._end

    def wait(self, waiter: Waiter) -> None:
        self._clock.now = self._end

    def elapsed_s(self) -> float:
        return self._seconds


class VirtualBackend(EmulatedBackend):
    """The emulated backend on a virtual clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(load_profile("h100"))
        self._clock = clock

    def program(self, body: Callable[[], None], cost: Cost, *, capturable: bool = True) -> Any:
        return VirtualProgram(self._clock, self.profile.forward_s(cost))


class TargetWorker(GemmTargetWorker):
    """The target's worker; its host work takes the time that HOST says."""

    clock: Clock

    def begin_round(self, *args: Any) -> None:
        self.clock.spend(HOST.lead_commit)
        super().begin_round(*args)

    def launch(self, *args: Any) -> None:
        self.clock.spend(HOST.lead_broadcast + HOST.lead_launch)
        super().launch(*args)

    def wait(self, waiter: Waiter) -> None:
        super().wait(waiter)
        self.clock.spend(HOST.wake)

    def judge(self, *args: Any) -> Any:
        self.clock.spend(HOST.lead_sample)
        return super().judge(*args)


class DraftWorker(GemmDraftWorker):
    """The draft's worker, likewise."""

    clock: Clock

    def begin_round(self, *args: Any) -> None:
        self.clock.spend(HOST.draft_commit + HOST.draft_lookup)
        super().begin_round(*args)

    def branches(self, *args: Any) -> Any:
        self.clock.spend(HOST.glue + HOST.keys)
        return super().branches(*args)

    def collect_step(self, *args: Any) -> None:
        self.clock.spend(HOST.step)
        super().collect_step(*args)


class VirtualRun:
    """One job, both sides in one process."""

    def __init__(self, job: Job, rounds: int) -> None:
        self.job, self.rounds = job, rounds
        self.lead, self.draft = Clock(), Clock()
        if job.inline:
            self.draft = self.lead

    def __call__(self) -> tuple[RoundRecords, list[float]]:
        job, batch = self.job, self.job.config.batch_size
        speculator, thread = self._speculator()
        loop = TargetLoop(self._target(), speculator, Nobody(), batch, self.lead)
        if thread is not None:
            thread.start()
        loop.admit([Request(WARM_ID + n) for n in range(batch)])
        for _ in range(WARMUP):
            loop.step()
            self.lead.spend(HOST.lead_record)
        loop.finish([WARM_ID + n for n in range(batch)])
        loop.admit([Request(n) for n in range(batch)])
        records, emitted = RoundRecords(job.lookahead), dict.fromkeys(range(batch), 0)
        while emitted and len(records) < self.rounds:
            start = self.lead.now
            result = loop.step()
            for seq, accepted in zip(
                result.outcome.ids.tolist(), result.outcome.num_accepted.tolist(), strict=True
            ):
                emitted[seq] += accepted + 1
            gone = [s for s, n in emitted.items() if n >= (job.config.num_tokens or 10**9)]
            loop.finish(gone)
            emitted = {s: n for s, n in emitted.items() if s not in gone}
            records.add(result.t_target_s, result.speculation, result.outcome)
            self.lead.spend(HOST.lead_record)
            records.round_s.append(self.lead.now - start)
        loop.stop()
        if thread is not None:
            thread.join(60)
        return records, records.round_s

    def _target(self) -> TargetWorker:
        job = self.job
        stream = TokenStream(
            job.config.seed, job.target.vocab_size, job.config.batch_size, job.lookahead
        )
        shard = Shard(job.target, job.tp)
        worker = TargetWorker(
            self._stepper(self.lead, shard, job.options, job.target_buckets()), stream
        )
        worker.clock = self.lead
        return worker

    def _stepper(self, clock: Clock, shard: Shard, options: Any, buckets: list[int]) -> Stepper:
        batch = self.job.config.batch_size
        backend, group = VirtualBackend(clock), SoloGroup()
        return Stepper(backend, group, shard, options, buckets=buckets, num_sequences=batch, seed=0)

    def _drafter(self) -> Drafter:
        job, config = self.job, self.job.config
        assert job.draft is not None
        vocab, batch = job.target.vocab_size, config.batch_size
        laws = job.acceptance, job.hit_law
        stream = DraftStream(config.seed, vocab, batch, *laws, job.fan_out)
        stepper = self._stepper(
            self.draft, Shard(job.draft), job.draft_options, job.draft_buckets()
        )
        worker = DraftWorker(stepper, stream)
        worker.clock = self.draft
        policy = DraftPolicy(
            job.lookahead,
            job.fan_out,
            Source[config.backup.upper()],
            job.backup_lookahead,
            config.on_late,
        )
        drafter = Drafter(worker, policy, batch, self.draft)
        close = drafter.ledger.close_round

        def close_round(round_: int, phase: int) -> None:
            assert phase == DraftPhase.RECORD
            self.draft.spend(HOST.draft_record)
            close(round_, phase)

        drafter.ledger.close_round = close_round  # type: ignore[method-assign]
        return drafter

    def _speculator(self) -> tuple[Speculator, threading.Thread | None]:
        job = self.job
        if job.lookahead == 0:
            return Asks(NoSpeculator(), self.lead), None
        drafter = self._drafter()
        if job.inline:
            return Asks(InlineSpeculator(drafter), self.lead), None
        shape = LinkShape(0, job.config.batch_size, job.lookahead)
        down: Any = queue.SimpleQueue()
        up: Any = queue.SimpleQueue()
        out, into = shape.outcome_buffer(), shape.speculation_buffer()
        lead = VirtualCarrier(self.lead, (out, into), (down, up), HOST.link, (HOST.lead_send, 0))
        lead_end = LeadEnd(lead, out, into, job.lookahead, self.lead)
        out, into = shape.speculation_buffer(), shape.outcome_buffer()
        costs = HOST.draft_send, HOST.draft_read
        draft = VirtualCarrier(self.draft, (out, into), (up, down), HOST.link, costs)
        draft_end = DraftEnd(draft, out, into, self.draft)
        return RemoteSpeculator(lead_end), threading.Thread(
            target=serve, args=(draft_end, drafter), daemon=True
        )


class Asks(Speculator):
    """A speculator without a link: asking takes the lead's time all the same."""

    def __init__(self, inner: Speculator, clock: Clock) -> None:
        self._inner, self._clock = inner, clock

    def ask(self, outcome: Any) -> None:
        self._clock.spend(HOST.lead_send)
        self._inner.ask(outcome)

    def answer(self, round_: int, count: int) -> Any:
        return self._inner.answer(round_, count)

    def stop(self, outcome: Any) -> None:
        self._inner.stop(outcome)


class Nobody:
    """Plans for no followers."""

    def publish(self, *args: Any, **kwargs: Any) -> None:
        return None


def make_job(**flags: Any) -> Job:
    flags = {"pair": "8b/1b", "backend": "emulated", **flags}
    return resolve(RunConfig(**flags), 1, backend="emulated", memory_bytes=None)


def check(job: Job, rounds: int = 60) -> None:
    """Loops and recurrence agree on every decision and on every round's duration."""
    records, round_s = VirtualRun(job, rounds)()
    device = DeviceCosts.from_profile(load_profile("h100"), job)
    found = replay(job, device, HOST, rounds)
    np.testing.assert_array_equal(found.sequences(), records.sequences())
    assert outcome_digest(found.sequences()) == outcome_digest(records.sequences())
    # What the first round waits for began in warm-up rounds, which are only foretold as full ones.
    np.testing.assert_allclose(found.round_s[1:, 0], round_s[1:], rtol=0, atol=1e-9)


CASES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "ar, batch": {"mode": "ar", "batch_size": 3},
    "sd": {"mode": "sd", "lookahead": 5},
    "sd, batch": {"mode": "sd", "lookahead": 3, "batch_size": 3},
    "sd, short drafts": {"mode": "sd", "lookahead": 6, "backup_lookahead": 2},
    "sd, fast": {"mode": "sd", "lookahead": 4, "backup": "fast"},
    "sd, inline": {"mode": "sd", "num_drafts": 0, "lookahead": 4, "batch_size": 2},
    "ssd, late": {"mode": "ssd", "lookahead": 4},
    "ssd, in time": {"mode": "ssd", "lookahead": 2},
    "ssd, late, served": {"mode": "ssd", "lookahead": 7, "on_late": "serve"},
    "ssd, batch": {"mode": "ssd", "lookahead": 5, "batch_size": 5, "fan_out": "geometric:24"},
    "ssd, short backup": {"mode": "ssd", "lookahead": 7, "batch_size": 3, "backup_lookahead": 3},
    "ssd, fast, served": {
        "mode": "ssd", "lookahead": 6, "batch_size": 4, "backup": "fast",
        "backup_lookahead": 2, "on_late": "serve", "fan_out": "uniform:6",
    },
    "ssd, imposed": {"mode": "ssd", "lookahead": 5, "p_hit": 0.8, "batch_size": 2},
    "ssd, tokens": {"mode": "ssd", "lookahead": 4, "batch_size": 3, "num_tokens": 60},
    "sd, tokens": {"mode": "sd", "lookahead": 4, "batch_size": 5, "num_tokens": 40},
}  # fmt: skip


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_foretells_what_the_loops_do(flags: dict[str, Any]) -> None:
    check(make_job(**flags))


@pytest.mark.parametrize("seed", range(24))
def test_foretells_random_configurations(seed: int) -> None:
    rnd = random.Random(seed)
    lookahead = rnd.randint(1, 9)
    fan_outs = [f"uniform:{rnd.randint(1, 9)}", f"geometric:{rnd.randint(8, 60)}"]
    job = make_job(
        mode="ssd",
        pair=rnd.choice(["8b/1b", "3b/1b", "70b/8b", "8b/0.6b"]),
        lookahead=lookahead,
        batch_size=rnd.choice([1, 1, 2, 3, 4, 7, 16]),
        fan_out=rnd.choice(fan_outs),
        alpha=rnd.choice([0.5, 0.8, 0.95]),
        backup=rnd.choice(["jit", "fast"]),
        backup_lookahead=rnd.randint(1, lookahead),
        on_late=rnd.choice(["finish", "serve"]),
        seed=seed,
    )
    check(job, rounds=40)


def test_a_late_round_waits_for_whole_growth_steps() -> None:
    """By hand: hits are seen when the running step ends, then finished one lane at a time."""
    device = DeviceCosts.from_points({1: 10.0}, {1: 1.5})
    job = make_job(mode="ssd", lookahead=8, p_hit=1.0, alpha=1.0)
    finish = replay(job, device, HostCosts(), 20)
    # glue ends at 1.5, steps at 3.0 … 9.0, 10.5: the outcome of t = 10 is seen at 10.5 with 6 of 8.
    assert finish.steps[2:, 0].tolist() == [6] * 18
    np.testing.assert_allclose(finish.wait_s[2:, 0], 0.5 + 2 * 1.5)
    served = replay(_with(job, on_late="serve"), device, HostCosts(), 20)
    np.testing.assert_allclose(served.wait_s[2:, 0], 0.5)
    assert served.num_draft[2:, 0, 0].tolist() == [6] * 18
    assert served.tokens[2:, 0].tolist() == [7] * 18


def test_a_follower_that_launches_late_delays_the_forward() -> None:
    job = make_job(mode="ar")
    device = DeviceCosts.from_points({1: 1e-3})
    lead = replay(job, device, HostCosts(lead_launch=1e-5), 5)
    late = replay(job, device, HostCosts(lead_launch=1e-5, follower=3e-5), 5)
    assert late.mean_round_s - lead.mean_round_s == pytest.approx(2e-5)


def test_laws_give_the_mean_and_the_noise_of_runs() -> None:
    """300 runs of 50 rounds spread as the chains say: their standard deviation is known to 4%, so
    20% is five of its standard errors (false-alarm rate 6e-7); likewise for the mean."""
    job = make_job(mode="ssd", lookahead=4, alpha=0.7)
    device = DeviceCosts.from_profile(load_profile("h100"), job)
    law = expect_by_law(job, device, HOST, chains=512, num_rounds=50, seed=3)
    runs = [replay(job, device, HOST, 51, seed=s) for s in range(300)]
    rates = [r.tokens[1:].sum() / r.round_s[1:].sum() for r in runs]
    noise = law.tok_per_s_noise(50)
    assert np.std(rates) == pytest.approx(noise, rel=0.2)
    error = np.hypot(noise / np.sqrt(len(rates)), law.tok_per_s_error)
    assert abs(np.mean(rates) - law.tok_per_s) < 5 * error


def test_equal_decisions_in_every_mode_that_finishes() -> None:
    """SD ≡ SSD in (k, t*) for equal K, on_late=finish, backup=jit and one acceptance law."""
    digests = set()
    for flags in ({"mode": "sd"}, {"mode": "sd", "num_drafts": 0}, {"mode": "ssd"}):
        job = make_job(lookahead=6, batch_size=2, **flags)
        device = DeviceCosts.from_profile(load_profile("h100"), job)
        digests.add(outcome_digest(replay(job, device, HOST, 80).sequences()))
    assert len(digests) == 1


def test_draws_need_only_the_laws() -> None:
    """Hit rate and acceptance length of the law's chains: within 5 standard errors of the laws."""
    job = make_job(mode="ssd", lookahead=4, alpha=0.6, p_hit=0.7)
    device = DeviceCosts.from_profile(load_profile("h100"), job)
    found = expect_by_law(job, device, HostCosts(), chains=200, num_rounds=100)
    mean = sum(0.6**i for i in range(5))
    spread = found.accepted.std() / np.sqrt(found.accepted.size)
    assert abs(found.acceptance_length - mean) < 5 * spread
    assert found.hit_rate is not None
    assert abs(found.hit_rate - 0.7) < 5 * np.sqrt(0.21 / found.hit.size)


def _with(job: Job, **flags: Any) -> Job:
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **flags))
