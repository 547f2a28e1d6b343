"""The same arrivals at a server that is simulated in this process, in virtual time.

The server's own scheduler and controller run over modelled rounds: a VirtualLoop takes the place of
the target loop. Its rounds last as the emulated backend's forwards do, with the host costs of the
profile; imposed models or a recording decide acceptance and hits, with the same draws for every
method.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import numpy as np

from mpissd.common.config import RunConfig
from mpissd.common.rounds import Control, Event, Outcome, Request, Source, Speculation
from mpissd.common.trace import LeadPhase, Ledger, NullLedger
from mpissd.engine.backend.profile import Profile, load_profile, role_profiles
from mpissd.engine.decode.goodput import ForwardTimes, Goodput, warm_sizes, widths_of
from mpissd.engine.decode.round import RoundResult, TargetLoop
from mpissd.engine.decode.scheduler import Room, Scheduler
from mpissd.engine.job import Job, fine_buckets, resolve, resolve_unopened
from mpissd.engine.workload.replay import Recorded, ReplayWorkload
from mpissd.lab.load.config import LoadConfig
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, forwards
from mpissd.lab.predict.derive import host_of
from mpissd.lab.predict.grid import Outcomes
from mpissd.serve.config import AUTO
from mpissd.serve.driver import Driver
from mpissd.serve.protocol import End, Line, Message, Submit, Tokens

_PAGE = 64
_MOST_ROWS = 512  # rows of a forward over only a prompt
_POSITIONS = 4096  # after which the draws of a sequence begin again


def bucket(held: Sequence[int], rows: int) -> int:
    """Returns the smallest of these row counts that holds `rows`, or `rows` beyond the last."""
    at = bisect_left(held, rows)
    return held[at] if at < len(held) else rows


def about(config: LoadConfig) -> Mapping[str, Any]:
    """Returns a row's description of the simulated server; raises ConfigError for bad flags."""
    run = config.simulated
    job = resolve_unopened(run, config.tp)
    fields = job.workload.row_fields()
    return {
        "mode": AUTO if config.auto else run.mode,
        "backend": run.backend,
        "device_name": f"{load_profile(run.device).device_name} (emulated)",
        "model": job.target.name,
        "draft": job.draft.name if job.draft else None,
        "tp": config.tp,
        "num_drafts": run.drafts,
        "world_size": (config.tp + run.drafts) * config.replicas,
        "replicas": config.replicas,
        "acceptance": fields.get("acceptance"),
        "hit_law": fields.get("hit_law"),
        "lookahead": 0 if run.mode == "ar" else run.lookahead,
        "max_running": config.max_running,
    }


@dataclass
class Asked:
    """A request: its arrival, tokens of its prompt, and tokens that it asks for.

    token_s: the time of each of its tokens, once it was served; drafted … rounds: as in a row.
    """

    at_s: float
    prompt_tokens: int
    num_tokens: int
    token_s: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    rounds: int = 0


@dataclass(frozen=True)
class Simulated:
    """A simulated load. seconds: until the last token. rounds_by: rounds of "ar", "sd", "ssd"."""

    requests: list[Asked]
    seconds: float
    rounds_by: dict[str, int]
    preempted: int


def simulate(
    config: RunConfig,
    tp: int,
    arrivals: Sequence[Asked],
    *,
    auto: bool = False,
    kv_tokens: int = 0,
    costs: tuple[DeviceCosts, HostCosts] | None = None,
) -> Simulated:
    """Serves copies of these arrivals in virtual time, at most batch_size at once.

    config: of an emulated device; its imposed models or its recording decide outcomes. auto: lets
    the controller choose the mode and K. kv_tokens: of the cache (0: each may be as long as it
    needs). costs: measured costs that replace the device profile's. Raises ConfigError.
    """
    profile, drafts = role_profiles(config.device, config.draft_device)
    memory = profile.memory_bytes, drafts.memory_bytes
    job = resolve(
        config, tp, backend="emulated", memory_bytes=memory[0], draft_memory_bytes=memory[1]
    )
    modelled = costs or (costs_of(job, profile, drafts), host_of(profile, job))
    loop = VirtualLoop(job, *modelled, pads=costs is None)
    mail = _Mail(loop, arrivals)
    longest = max(each.prompt_tokens + each.num_tokens for each in arrivals) + 1
    ahead = job.lookahead + 1
    pages = -(-(longest + ahead) // _PAGE)
    pages = max(pages, kv_tokens // _PAGE) if kv_tokens else pages * config.batch_size
    room = Room(config.batch_size, longest, ahead, _PAGE, pages)
    times = loop.measured()
    driver = Driver(
        Scheduler(room),
        cast(Line, mail),
        config.mode,
        job.lookahead,
        times=times,
        goodput=Goodput(job.lookahead, widths_of(job), times) if auto and job.lookahead else None,
        clock=lambda: loop.now,
    )
    while driver.wait(math.inf):
        driver.drive(cast(TargetLoop, loop))  # the part of it that the driver uses
    chosen = {} if driver.goodput is None else driver.goodput.rounds_by
    rounds_by = chosen or {config.mode: driver.scheduler.num_rounds}
    return Simulated(mail.served, loop.now, rounds_by, driver.scheduler.num_preempted)


class _Mail:
    """Delivers arrivals in virtual time, and notes when their tokens are sent."""

    def __init__(self, loop: VirtualLoop, arrivals: Sequence[Asked]) -> None:
        self._loop = loop
        self._left = sorted(enumerate(arrivals), key=lambda pair: pair[1].at_s, reverse=True)
        self.served = [replace(each, token_s=[]) for each in arrivals]
        self.is_closed = False

    def take(self, wait_s: float = 0.0) -> Sequence[Message]:
        if self._left and wait_s:
            self._loop.now = max(self._loop.now, self._left[-1][1].at_s)
        messages = []
        while self._left and self._left[-1][1].at_s <= self._loop.now:
            number, one = self._left.pop()
            messages.append(Submit(number, range(one.prompt_tokens), one.num_tokens))
        return messages

    def put(self, message: Message) -> None:
        if isinstance(message, Tokens):
            self.served[message.id].token_s += [self._loop.now] * len(message.tokens)
        elif isinstance(message, End):
            served = self.served[message.id]
            served.drafted, served.accepted = message.drafted, message.accepted
            served.hits, served.rounds = message.hits, message.rounds

    def flush(self) -> None:
        return None


def costs_of(job: Job, profile: Profile, drafts: Profile) -> DeviceCosts:
    """Returns the durations of a job's forwards, and of those over prompts."""
    costs, batch = DeviceCosts.from_profile(profile, job, drafts), job.config.batch_size
    rows = fine_buckets(max(_MOST_ROWS, job.verify_rows))
    return replace(costs, verify=forwards(profile, job.target_shard, rows, batch, job.options))


class RecordedOutcomes:
    """The outcomes of one prompt of a recording, as Outcomes has them; after its end it repeats."""

    def __init__(self, recorded: Recorded) -> None:
        self._tokens, self._end = recorded.tokens.tolist(), recorded.end
        self._rollout, self._top = recorded.rollout.tolist(), recorded.top.tolist()

    def accepted(self, position: int, drafted: int, hit: bool) -> int:
        """Returns how many of `drafted` tokens the target accepts."""
        at, k = position % self._end, 0
        rollout, true = self._rollout[at], self._tokens[at:]
        while k < drafted and rollout[k] == true[k]:
            k += 1
        return k

    def hits(self, position: int, k: int, kept: int, end: bool) -> bool:
        """Returns whether the draft keeps the bonus token after k accepted ones."""
        at = position % self._end
        if at + k >= self._end:  # the recording has no draft tokens there
            return False
        left_out = None if end else self._rollout[at][k]
        candidates = [token for token in self._top[at + k] if token != left_out]
        return self._tokens[at + k] in candidates[:kept]


def outcomes_of(job: Job, request_id: int) -> Outcomes | RecordedOutcomes:
    """Returns the outcomes of a request: of prompt request_id of a recording, or drawn."""
    workload = job.workload
    if isinstance(workload, ReplayWorkload):
        every = workload.recording.sequences
        return RecordedOutcomes(every[request_id % len(every)])
    return Outcomes(job, request_id, _POSITIONS, job.config.seed)


@dataclass
class _Sequence:
    """A live sequence: tokens emitted, and whether the draft has the branch of its outcome."""

    request: Request
    outcomes: Outcomes | RecordedOutcomes
    left: int  # tokens of the prompt that are not stored
    emitted: int  # before a preemption, too
    hit: bool = False
    behind: int = 0  # tokens that an inline draft lacks


class VirtualLoop:
    """The lead's loop with modelled rounds; `now` is its clock. T ranks and at most one draft."""

    draft_lost_round = None
    most_rows = _MOST_ROWS

    def __init__(
        self, job: Job, device: DeviceCosts, host: HostCosts, *, pads: bool = True
    ) -> None:
        """Takes pads, whether forwards compute whole buckets of rows."""
        self._job, self._host = job, host
        self._verify_s = lru_cache(maxsize=None)(lambda rows: float(device.verify(rows)))
        self._drafts_s = lru_cache(maxsize=None)(lambda rows: float(device.draft_s(rows)))
        self.buckets = list(device.verify.rows) if pads else []
        self._draft_buckets = job.draft_buckets() if pads and job.draft is not None else []
        self._opened: dict[int, _Sequence] = {}
        self._live: dict[int, _Sequence] = {}
        self._prompts: dict[int, int] = {}  # tokens of each request's own prompt
        self.now = 0.0
        self._sent = self._grown_s = 0.0  # when the draft last replied; its glue and keys
        self._step_s, self._most_steps = 0.0, 0  # its growth's step time and steps; 0: none
        # Rows of prompts that it has to store when nothing grows any more, and before a sequence's
        # first tokens.
        self._unstored = 0
        self.control = Control()
        self.ledger: Ledger = NullLedger(LeadPhase)
        self.meanwhile: Callable[[], None] | None = None

    def measured(self) -> ForwardTimes:
        """Returns the times that a server measures before its first request."""
        times, width = ForwardTimes(self.buckets), self._job.lookahead + 1
        for rows in (*range(1, width + 1), *(n * width for n in warm_sizes(self._job))):
            times.add(rows, self.forward_s(rows))
        return times

    def forward_s(self, rows: int) -> float:
        """Returns the seconds of the target's forward of so many rows."""
        return self._verify_s(bucket(self.buckets, rows))

    @property
    def live_ids(self) -> list[int]:
        """The sequences that the next round verifies."""
        return [*self._live, *(n for n, one in self._opened.items() if not one.left)]

    @property
    def unstored(self) -> int:
        """The tokens of opened prompts that are still to be stored."""
        return sum(one.left for one in self._opened.values())

    def open(self, requests: Sequence[Request]) -> None:
        """Lets these sequences join once their prompts are stored."""
        for request in requests:
            name = request.request_id
            emitted = len(request.prompt) - self._prompts.setdefault(name, len(request.prompt))
            outcomes = outcomes_of(self._job, name)
            self._opened[name] = _Sequence(request, outcomes, len(request.prompt) - 1, emitted)

    def finish(self, request_ids: Sequence[int]) -> None:
        """Releases these sequences."""
        for name in request_ids:
            self._opened.pop(name, None)
            self._live.pop(name, None)

    def step(self) -> RoundResult:
        """Lets one round pass; returns its outcome."""
        job, control, host, start = self._job, self.control, self._host, self.now
        joining = [n for n, one in self._opened.items() if not one.left]
        for name in joining:
            self._live[name] = self._opened.pop(name)
        most = job.lookahead
        lookahead = most if control.lookahead is None else min(most, control.lookahead)
        stored = lacked = 0  # prompt rows; tokens that an inline draft must store
        for one in self._opened.values():
            part = min(one.left, control.prefill_rows - stored)
            one.left -= part
            stored += part
            one.behind += part * job.inline
        self._unstored += stored  # by a draft of its own rank
        if lookahead:
            for one in self._live.values():
                lacked, one.behind = lacked + one.behind, 0
        stored_s = self._draft_s(lacked)
        wait_s = self._answer_s(lookahead, begins=bool(joining))
        rows = len(self._live) * (1 + lookahead) + stored
        forward_s = self.forward_s(rows)
        self.now = start + host.ask_s + wait_s + stored_s + host.lead_s
        if self.meanwhile is not None:
            self.meanwhile()
        self.now += forward_s
        speculation, outcome = self._outcome(lookahead)
        return RoundResult(speculation, outcome, forward_s, {}, rows, wait_s, stored_s)

    def _draft_s(self, rows: int) -> float:
        if not rows:
            return 0.0
        return self._drafts_s(bucket(self._draft_buckets, rows)) + self._host.step

    def _answer_s(self, lookahead: int, *, begins: bool) -> float:
        """Returns the lead's wait for the draft in seconds, and begins the draft's next work.

        begins: whether sequences have joined in this round.
        """
        job, host, count = self._job, self._host, len(self._live)
        if job.draft is None:
            return 0.0
        if job.inline:
            return lookahead * self._draft_s(count) + host.draft_s if lookahead else 0.0
        # The draft sees the outcome after its running growth step, or the prompts it then stores.
        asked = self.now + host.lead_send + host.link
        free, steps = self._sent + self._grown_s, 0
        if self._step_s and asked > free:
            steps = min(self._most_steps, math.ceil((asked - free) / self._step_s))
            free += steps * self._step_s
        if self._unstored and asked > free:
            free += self._draft_s(self._unstored)
            self._unstored = 0
        seen = max(asked, free)
        if not lookahead:  # the draft stores committed tokens, and the lead does not wait
            self._sent, self._grown_s, self._step_s = seen, self._draft_s(count), 0.0
            return 0.0
        # Hits are finished and misses drafted in shared forwards.
        hits = sum(one.hit for one in self._live.values())
        misses = count - hits
        finish = max(0, lookahead - steps) if hits else 0
        backup = lookahead if misses else 0
        shared = min(finish, backup)
        apart = (finish - shared) * self._draft_s(hits) + (backup - shared) * self._draft_s(misses)
        drafting = shared * self._draft_s(count) + apart
        if begins and self._unstored:
            drafting += self._draft_s(self._unstored)
            self._unstored = 0
        self._sent = seen + host.reply_s + drafting
        # Branches grow after the reply.
        fans = job.fan_outs.within(self.control.width)
        lanes = hits * sum(fans.after_hit[: lookahead + 1])
        lanes += misses * sum(fans.after_miss[: lookahead + 1])
        self._most_steps, self._step_s, self._grown_s = lookahead, 0.0, 0.0
        if lanes:
            self._step_s = self._draft_s(lanes)
            glue = self._draft_s(count * (lookahead + 1)) - host.step + host.glue
            self._grown_s = glue + host.keys + host.keys_lane * lanes
        return max(0.0, self._sent + host.link - self.now - host.ask_s)

    def _outcome(self, lookahead: int) -> tuple[Speculation, Outcome]:
        """Draws the round's accepted tokens, and which outcomes will hit."""
        count, grows = len(self._live), self._step_s > 0
        fans = self._job.fan_outs.within(self.control.width)
        served = Speculation.empty(0, count, self._job.lookahead)
        rows = np.zeros((count, Outcome.WIDTH), np.int32)
        for n, (name, one) in enumerate(self._live.items()):
            source = Source.CACHE if one.hit else Source.JIT
            if lookahead:
                served.rows[n, :3] = source, one.hit, lookahead
            k = one.outcomes.accepted(one.emitted, lookahead, one.hit) if lookahead else 0
            one.behind += self._job.inline and not lookahead
            rows[n] = name, one.request.epoch, Event.COMMIT, k, 0
            one.hit = False
            if grows:
                kept = fans.behind(source)[k]
                one.hit = one.outcomes.hits(one.emitted, k, kept, k == lookahead)
            one.emitted += k + 1
        return served, Outcome(0, rows)
