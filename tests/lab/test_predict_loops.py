"""The simulation against the loops themselves, in virtual time.

The real TargetLoop, drafter and workers run with clocks of their own that only move when a forward,
a message or a named piece of host work takes time. Times follow exactly from the loops' decisions,
which have the means of the models. Those means are held against closed formulas, at fixed seeds.
"""

import itertools
import queue
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from mpissd.common import theory
from mpissd.common.config import RunConfig
from mpissd.common.records import RoundRecords
from mpissd.common.rounds import Request, Source
from mpissd.common.wait import Waiter
from mpissd.engine.backend.profile import load_profile
from mpissd.engine.comm.link import DraftEnd, Inbox, LeadEnd, Outbox
from mpissd.engine.comm.wire import Kind, LinkShape, Message
from mpissd.engine.job import Job, resolve
from mpissd.engine.oracle.imposed import DraftStream, ImposedDraft, ImposedTarget, TokenStream
from mpissd.engine.round.draft import Drafter, DraftPolicy, serve
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.speculator import InlineSpeculator, RemoteSpeculator, Speculator
from mpissd.engine.round.target import TargetLoop
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, RowTable
from mpissd.lab.predict.simulation import Grid, expect, expected, follow
from tests.loop.harness import Guarded

HOST = HostCosts(
    lead_send=15e-6, lead_commit=10e-6, lead_broadcast=2e-6, lead_upload=5e-6, lead_launch=9e-6,
    lead_sample=60e-6,
    lead_record=7e-6, link=40e-6, draft_read=44e-6, draft_commit=12e-6, draft_lookup=21e-6,
    draft_send=8e-6, draft_record=4e-6, glue=50e-6, keys=65e-6, step=45e-6, wake=55e-6,
)  # fmt: skip
WARMUP, WARM_ID = 3, 1 << 20


class Clock(Waiter):
    """One rank's time, and the waiter that moves it on to the awaited event."""

    def __init__(self) -> None:
        super().__init__(deadline_s=60.0, spin=False)
        self.now = self.next_event = 0.0

    def spend(self, seconds: float) -> None:
        self.now += seconds

    def until(self, test: Callable[[], bool], what: str) -> None:
        if not test():
            self.now = self.next_event


class VirtualOutbox(Outbox):
    """Messages with the times at which they arrive."""

    def __init__(self, message: Message, clock: Clock, messages: Any, send_s: float) -> None:
        super().__init__(message)
        self._clock, self._queue, self._send_s = clock, messages, send_s

    def send(self, size: int | None = None) -> None:
        self._clock.spend(self._send_s)
        self._queue.put((self._clock.now + HOST.link, self.message.array.copy()))

    def close(self) -> None:
        return None


class VirtualInbox(Inbox):
    """To ask whether a message has arrived is to wait (really) for the peer's next message, which
    never depends on the answer."""

    def __init__(self, message: Message, clock: Clock, messages: Any, read_s: float) -> None:
        super().__init__(message, bool)
        self._clock, self._queue, self._read_s = clock, messages, read_s
        self._due: float | None = None

    def arrived(self) -> bool:
        if self._due is None:
            self._due, numbers = self._queue.get(timeout=60)
            np.copyto(self.message.array, numbers)
        self._clock.next_event = self._due
        return self._due <= self._clock.now

    def release(self) -> None:
        self._clock.spend(self._read_s)
        self._due = None

    def close(self) -> None:
        return None


def virtual_link(
    shape: LinkShape, lead: Clock, draft: Clock, costs: tuple[float, float, float]
) -> tuple[LeadEnd, DraftEnd]:
    """Both ends; costs: seconds of the lead's send, of the draft's send and of its read."""
    queues: dict[Kind, Any] = {kind: queue.SimpleQueue() for kind in Kind}
    lead_send, draft_send, draft_read = costs
    return (
        LeadEnd(
            shape,
            lead,
            lambda message: VirtualOutbox(message, lead, queues[message.kind], lead_send),
            lambda message: VirtualInbox(message, lead, queues[message.kind], 0),
        ),
        DraftEnd(
            shape,
            draft,
            lambda message: VirtualOutbox(message, draft, queues[message.kind], draft_send),
            lambda message: VirtualInbox(message, draft, queues[message.kind], draft_read),
        ),
    )


class VirtualForwards:
    """Forwards that move their rank's clock by the time of their bucket.

    lists: the time of forwards that read out more than one candidate a row (None: the same).
    wake_s: of the host after each.
    """

    def __init__(
        self, clock: Clock, seconds: RowTable, lists: RowTable | None = None, wake_s: float = 0.0
    ) -> None:
        self._clock, self._seconds, self._lists = clock, seconds, lists or seconds
        self._wake_s, self._end, self._elapsed_s = wake_s, 0.0, 0.0
        self.most_rows = seconds.rows[-1]

    def upload(self, rows: int, tokens: Any, places: None = None, *, lists: bool = False) -> None:
        seconds = self._lists if lists else self._seconds
        self._elapsed_s = float(seconds(next(n for n in seconds.rows if n >= rows)))

    def launch(self) -> None:
        self._end = self._clock.now + self._elapsed_s

    def wait(self, waiter: Waiter) -> None:
        self._clock.now = max(self._clock.now, self._end) + self._wake_s

    def elapsed_s(self) -> float:
        return self._elapsed_s

    def release(self, slots: Any) -> None:
        return None

    def close(self) -> None:
        return None


def slowed(what: Any, clock: Clock, **seconds: float) -> Any:
    """The same object, of which these methods first take so much of their rank's time."""

    def spend(method: Any, taken: float, *args: Any) -> Any:
        clock.spend(taken)
        return method(*args)

    for name, taken in seconds.items():
        setattr(what, name, partial(spend, getattr(what, name), taken))
    return what


def target_worker(job: Job, device: DeviceCosts, clock: Clock) -> TargetWorker:
    config = job.config
    stream = TokenStream(config.seed, job.target.vocab_size, config.batch_size, job.lookahead)
    forwards = VirtualForwards(clock, device.verify, wake_s=HOST.wake)
    return slowed(
        TargetWorker(forwards, ImposedTarget(stream)), clock, enter=HOST.lead_commit,
        upload=HOST.lead_broadcast + HOST.lead_upload, launch=HOST.lead_launch,
        judge=HOST.lead_sample,
    )  # fmt: skip


def drafter_of(job: Job, forwards: Any, clock: Clock) -> Drafter:
    config, vocab, widest = job.config, job.target.vocab_size, max(1, job.fan_outs.widest)
    laws = job.acceptance, job.hit_law
    stream = DraftStream(config.seed, vocab, config.batch_size, *laws, widest)
    worker = slowed(
        DraftWorker(
            forwards, ImposedDraft(stream, job.tokens_a_forward), job.placement(drafts=True)
        ), clock, collect_step=HOST.step, enter=HOST.draft_commit + HOST.draft_lookup,
        scored=HOST.glue + HOST.keys,
    )  # fmt: skip
    source = Source.FAST if config.backup == "fast" else Source.JIT
    policy = DraftPolicy(job.lookahead, job.fan_outs, source, job.backup_lookahead)
    drafter = Drafter(worker, policy, config.batch_size, clock)
    slowed(drafter.log, clock, close_round=HOST.draft_record)
    return drafter


class VirtualRun:
    """One job, both sides in one process."""

    def __init__(self, job: Job, rounds: int) -> None:
        self.job, self.rounds = job, rounds
        self.device = steep(DeviceCosts.from_profile(load_profile("h100"), job))
        self.lead = Clock()
        self.draft = self.lead if job.inline else Clock()

    def __call__(self) -> tuple[RoundRecords, list[float]]:
        job, batch = self.job, self.job.config.batch_size
        speculator, thread = self._speculator()
        loop = TargetLoop(
            target_worker(job, self.device, self.lead), speculator, None, batch, self.lead
        )
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
            for seq, _, _, accepted, _ in result.outcome.rows.tolist():
                emitted[seq] += accepted + 1
            gone = [s for s, n in emitted.items() if n >= (job.config.num_tokens or 10**9)]
            loop.finish(gone)
            emitted = {s: n for s, n in emitted.items() if s not in gone}
            records.add(result.t_target_s, result.speculation, result.outcome)
            self.lead.spend(HOST.lead_record)
            records.round_s.append(self.lead.now - start)
        loop.stop()
        if thread is not None:
            thread.finish()
        return records, records.round_s

    def _speculator(self) -> tuple[Speculator, Guarded | None]:
        job = self.job
        if job.lookahead == 0:
            return slowed(Speculator(), self.lead, ask=HOST.lead_send), None
        lists = dict(self.device.lists).get(job.draft_options.top_k)
        forwards = VirtualForwards(self.draft, self.device.draft, lists)
        drafter = drafter_of(job, forwards, self.draft)
        if job.inline:
            return slowed(InlineSpeculator(drafter), self.lead, ask=HOST.lead_send), None
        shape = LinkShape(0, job.config.batch_size, job.lookahead)
        costs = HOST.lead_send, HOST.draft_send, HOST.draft_read
        lead_end, draft_end = virtual_link(shape, self.lead, self.draft, costs)
        return RemoteSpeculator(lead_end), Guarded(lambda: serve(draft_end, drafter))


def steep(device: DeviceCosts) -> DeviceCosts:
    """The same with 2% more for each row, so that every bucket takes a time of its own.

    Lists of candidates take 30% more.
    """

    def steeper(table: RowTable, factor: float = 1.0) -> RowTable:
        points = zip(table.rows, table.seconds, strict=True)
        return RowTable.of({n: factor * s * (1 + n / 50) for n, s in points})

    draft = device.draft
    if draft is None:
        return DeviceCosts(steeper(device.verify))
    lists = tuple((k, steeper(draft, 1.3)) for k, _ in device.lists)
    return DeviceCosts(steeper(device.verify), steeper(draft), lists)


def make_job(**flags: Any) -> Job:
    # A lead that asks for branches that may not come cannot run in virtual time.
    config = RunConfig(**{"pair": "8b/1b", "backend": "emulated", "cache": "draft", **flags})
    return resolve(config, 1, backend="emulated", memory_bytes=None)


def check(job: Job, rounds: int = 60) -> None:
    """The simulation predicts every round's duration from the loops' decisions."""
    run = VirtualRun(job, rounds)
    records, round_s = run()
    found = follow(job, run.device, HOST, records.sequences())
    # The first round waits for work of warm-up rounds, which are predicted as full ones only.
    np.testing.assert_allclose(found[1:], np.asarray(round_s)[1:], rtol=0, atol=1e-9)


CASES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "sd": {"mode": "sd", "lookahead": 5},
    "sd, short drafts": {"mode": "sd", "lookahead": 6, "backup_lookahead": 2},
    "sd, fast": {"mode": "sd", "lookahead": 4, "backup": "fast"},
    "sd, inline": {"mode": "sd", "num_drafts": 0, "lookahead": 4, "batch_size": 2},
    "sd, inline, in one forward": {
        "mode": "sd", "num_drafts": 0, "lookahead": 4, "batch_size": 3, "alpha": 0.6,
        "forward": "transformer", "parallel_drafting": True,
    },
    "ssd, in one forward": {
        "mode": "ssd", "lookahead": 4, "batch_size": 2, "forward": "transformer",
        "parallel_drafting": True,
    },
    "ssd, hits of a real pair": {
        "mode": "ssd", "lookahead": 5, "hit_law": "power:A=0.78/0.32,r=0.2/0.3", "batch_size": 3,
        "fan_out": "geometric:30", "backup_lookahead": 3,
    },
    "ssd, hits of two ends": {
        "mode": "ssd", "lookahead": 7, "hit_law": "power:A=1.1/0.1,r=0.3/0.9",
    },
    "ssd, lists of candidates": {
        "mode": "ssd", "lookahead": 4, "batch_size": 2, "fan_out": "geometric:40", "lm_head": True,
    },
    "ssd, tokens": {"mode": "ssd", "lookahead": 4, "batch_size": 3, "num_tokens": 60},
    "ssd, tokens, crowd": {
        "mode": "ssd", "lookahead": 5, "batch_size": 6, "num_tokens": 50, "fan_out": "uniform:2",
    },
}  # fmt: skip


@pytest.mark.parametrize("flags", CASES.values(), ids=CASES.keys())
def test_predicts_what_the_loops_do(flags: dict[str, Any]) -> None:
    check(make_job(**flags))


@pytest.mark.parametrize("seed", range(8))
def test_predicts_random_configurations(seed: int) -> None:
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
        seed=seed,
    )
    check(job, rounds=40)


FREE = HostCosts()
EXACT, NEAR = 1e-9, 6e-3  # largest relative errors: without growth, and of 8,192 rounds


def test_a_mean_does_not_depend_on_the_others_in_the_grid() -> None:
    """Bit for bit: all configurations read the same draws, of SSD, SD and AR, of every K."""
    ways = itertools.product((0.5, 0.9), ("uniform:2", "geometric:30"), ("jit", "fast"), (1, 6))
    names = ("alpha", "fan_out", "backup", "backup_lookahead")
    jobs = [
        make_job(mode="ssd", lookahead=6, batch_size=3, **dict(zip(names, way, strict=True)))
        for way in ways
    ]
    jobs += [make_job(mode="ssd", lookahead=k, batch_size=3) for k in (1, 9)]
    jobs += [make_job(mode=mode, batch_size=3) for mode in ("ar", "sd")]
    lists = {1: {1: 9e-4, 90: 2e-3}, 9: {1: 1.1e-3, 90: 3e-3}}
    device = DeviceCosts.from_points({1: 5e-3, 64: 7e-3}, {1: 9e-4, 90: 2e-3}, lists)
    host = HostCosts(link=2e-5, keys=5e-5, step=4e-5)
    together = expect(Grid.of(jobs, device, host))
    alone = [expect(Grid.of([job], device, host)) for job in jobs]
    for name in ("tok_per_s", "round_s", "tokens", "hit_rate", "wait_s"):
        assert getattr(together, name).tolist() == [getattr(one, name)[0] for one in alone]


def speedup_ssd(
    p_hit: float, hit: float, miss: float, ratio: float, growth: float, backup: float, b: int = 1
) -> float:
    """SSD over AR [Kumar, Dao, May, theorem 7; corollary 16 for b sequences]; hit, miss: tokens."""
    all_hit = p_hit**b
    round_s = all_hit * max(ratio, growth) + (1 - all_hit) * (ratio + backup)
    return (p_hit * hit + (1 - p_hit) * miss) / round_s


# Time is counted in single-row forwards: t_target(1) = 1.


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize(("alpha", "lookahead"), [(0.9, 2), (0.6, 5), (0.0, 3), (1.0, 4)])
def test_sd_is_leviathan_s(alpha: float, lookahead: int, inline: bool) -> None:
    """SD over AR [theorem 3.8, with r = t_target(b(K+1)) / t_target(1) for its 1]."""
    ratio, step = 1.05, 0.12
    device = DeviceCosts.from_points({1: 1.0, lookahead + 1: ratio}, {1: step})
    job = make_job(mode="sd", lookahead=lookahead, alpha=alpha, num_drafts=0 if inline else 1)
    tokens = theory.expected_tokens(alpha, lookahead)
    speedup = tokens / (ratio + lookahead * step)
    assert expected(job, device, FREE).tok_per_s[0] == pytest.approx(speedup, rel=EXACT)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("p_hit", [0.0, 0.4, 0.9, 1.0])
def test_ssd_is_the_paper_s_where_growth_hides(p_hit: float, batch: int) -> None:
    """T_p ≤ r: theorem 7 and its batch form, H = h^b."""
    lookahead, alpha, ratio, step = 4, 0.8, 1.1, 0.15
    device = DeviceCosts.from_points({1: 1.0, batch: 1.0, batch * 5: ratio}, {1: step})
    job = make_job(mode="ssd", lookahead=lookahead, alpha=alpha, p_hit=p_hit, batch_size=batch)
    tokens = theory.expected_tokens(alpha, lookahead)
    assert 5 * step < ratio  # glue and K steps
    speedup = speedup_ssd(p_hit, tokens, tokens, ratio, 5 * step, 4 * step, batch)
    found = expected(job, device, FREE)
    assert found.tok_per_s[0] / batch == pytest.approx(speedup, rel=NEAR)
    assert found.hit_rate[0] == pytest.approx(p_hit, abs=NEAR)


def test_ssd_with_a_fast_backup_hides_everything() -> None:
    """T_b = 0; misses verify K_b tokens of another acceptance model."""
    device = DeviceCosts.from_points({1: 1.0}, {1: 0.1})
    job = make_job(mode="ssd", lookahead=4, alpha=0.9, p_hit=0.6, backup="fast",
                   acceptance_fast="alpha:0.2", backup_lookahead=3)  # fmt: skip
    hit, miss = theory.expected_tokens(0.9, 4), theory.expected_tokens(0.2, 3)
    speedup = speedup_ssd(0.6, hit, miss, 1.0, 0.5, 0.0)
    assert expected(job, device, FREE).tok_per_s[0] == pytest.approx(speedup, rel=NEAR)


def test_hit_rate_is_the_stationary_one_of_two_laws() -> None:
    """After a miss only K_b = 1 token is verified, so another mix of k, hence of F_k, follows."""
    device = DeviceCosts.from_points({1: 1.0}, {1: 0.01})
    flags = {"fan_out": "list:1,2,4,8", "backup_lookahead": 1, "hit_law": "power:A=.75,r=1"}
    job = make_job(mode="ssd", lookahead=3, alpha=0.7, **flags)
    p_hits = [1 - theory.power_law_miss(f, 0.75, 1.0) for f in (1, 2, 4, 8)]
    after_hit = sum(
        w * p for w, p in zip(theory.accept_probabilities([0.7] * 3), p_hits, strict=True)
    )
    after_miss = 0.3 * p_hits[0] + 0.7 * p_hits[1]
    found = expected(job, device, FREE)
    rate = after_miss / (1 - after_hit + after_miss)  # of a chain of two states
    assert found.hit_rate[0] == pytest.approx(rate, rel=NEAR)


def test_a_round_that_takes_no_time_has_no_rate() -> None:
    device = DeviceCosts.from_points({1: 0.0}, {1: 0.0})
    for flags in ({"mode": "ar"}, {"mode": "sd"}, {"mode": "ssd"}):
        assert expected(make_job(**flags), device, FREE).tok_per_s[0] == np.inf


@pytest.mark.parametrize("verify_s", [1e-3, 20e-3])
@pytest.mark.parametrize("p_hit", [0.0, 0.6, 1.0])
def test_a_hit_whose_branches_came_in_time_waits_for_nothing(p_hit: float, verify_s: float) -> None:
    """Growth takes some 5 ms: late for the shorter verification, in time for the longer."""
    flags = {"mode": "ssd", "lookahead": 4, "alpha": 0.8, "p_hit": p_hit, "fan_out": "uniform:3"}
    device = DeviceCosts.from_points({1: verify_s}, {1: 1e-3})
    lead, draft = (expected(make_job(cache=c, **flags), device, HOST) for c in ("lead", "draft"))
    saved = float(draft.round_s[0] - lead.round_s[0])
    is_late = verify_s < 5e-3
    if is_late or p_hit == 0:
        assert saved == 0
    else:
        # By hand: a hit of the draft's cache costs both messages and the draft's work between.
        waited = 2 * HOST.link + HOST.draft_read + HOST.draft_s + HOST.draft_send - HOST.lead_commit
        np.testing.assert_allclose(saved, float(lead.hit_rate[0]) * waited, rtol=1e-9)
    assert lead.hit_rate == draft.hit_rate
