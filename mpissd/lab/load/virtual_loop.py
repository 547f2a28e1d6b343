"""The target loop in virtual time: rounds that last as modelled forwards do."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mpissd.common.rounds import Control, Event, Outcome, Request, Source, Speculation
from mpissd.common.trace import LeadPhase, Ledger, NullLedger
from mpissd.engine.backend.profile import Profile
from mpissd.engine.decode.goodput import ForwardTimes, warm_sizes
from mpissd.engine.decode.round import RoundResult
from mpissd.engine.job import Job, fine_buckets
from mpissd.engine.workload.replay.recording import Recorded
from mpissd.engine.workload.replay.workload import ReplayWorkload
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, forwards
from mpissd.lab.predict.draws import Outcomes
from mpissd.lab.predict.pool import bucket

_MOST_ROWS = 512  # of a forward over only a prompt
_POSITIONS = 4096  # after which the draws of a sequence begin again


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
        self._verify_s = lru_cache(maxsize=None)(lambda rows: float(device.verify_s(rows)))
        self._drafts_s = lru_cache(maxsize=None)(lambda rows: float(device.draft_s(rows)))
        self.buckets = list(device.verify.rows) if pads else []
        self._lanes = job.draft_buckets() if pads and job.draft is not None else []
        self._opened: dict[int, _Sequence] = {}
        self._live: dict[int, _Sequence] = {}
        self._prompts: dict[int, int] = {}  # tokens of each request's own prompt
        self.now = 0.0
        self._sent = self._grown_s = 0.0  # when the draft last replied; its glue and keys
        self._step_s, self._most_steps = 0.0, 0  # of its growth; 0: nothing grows
        # Rows of prompts that it has to store when nothing grows any more, and before a sequence's
        # first tokens.
        self._unstored = 0
        self._begins = False  # whether sequences have joined in this round
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
        joining = [n for n, one in self._opened.items() if not one.left]
        for name in joining:
            self._live[name] = self._opened.pop(name)
        self._begins = bool(joining)
        start, control = self.now, self.control
        most = self._job.lookahead
        lookahead = most if control.lookahead is None else min(most, control.lookahead)
        stored, stored_s = self._store(control.prefill_rows, drafts=lookahead > 0)
        wait_s = self._answer_s(lookahead)
        rows = len(self._live) * (1 + lookahead) + stored
        forward_s = self.forward_s(rows)
        self.now = start + self._host.ask_s + wait_s + stored_s + self._host.lead_s
        if self.meanwhile is not None:
            self.meanwhile()
        self.now += forward_s
        speculation, outcome = self._outcome(lookahead)
        return RoundResult(speculation, outcome, forward_s, {}, rows, wait_s, stored_s)

    def _store(self, most: int, *, drafts: bool) -> tuple[int, float]:
        """Stores up to `most` rows of prompts; returns (those, the seconds in which an inline draft
        stores the tokens that it lacks, before it drafts)."""
        inline, stored, missed = self._job.inline, 0, 0
        for one in self._opened.values():
            part = min(one.left, most - stored)
            one.left -= part
            stored += part
            one.behind += part * inline
        self._unstored += stored  # by a draft of its own rank
        if drafts:
            for one in self._live.values():
                missed, one.behind = missed + one.behind, 0
        return stored, self._draft_s(missed)

    def _answer_s(self, lookahead: int) -> float:
        """Returns the lead's wait for the draft in seconds, and begins the draft's next work."""
        job, host, count = self._job, self._host, len(self._live)
        hits = sum(one.hit for one in self._live.values())
        if job.draft is None:
            return 0.0
        if job.inline:
            return lookahead * self._draft_s(count) + host.draft_s if lookahead else 0.0
        asked = self.now + host.lead_send + host.link
        free, steps = self._grown(asked)
        seen = max(asked, free)
        if not lookahead:  # the draft stores committed tokens, and the lead does not wait
            self._sent, self._grown_s, self._step_s = seen, self._draft_s(count), 0.0
            return 0.0
        drafting = self._drafting_s(hits, count - hits, lookahead, steps)
        if self._begins and self._unstored:
            drafting += self._draft_s(self._unstored)
            self._unstored = 0
        self._sent = seen + host.reply_s + drafting
        self._grow(lookahead, hits, count - hits)
        return max(0.0, self._sent + host.link - self.now - host.ask_s)

    def _grown(self, asked: float) -> tuple[float, int]:
        """Returns when the draft is free to see the outcome, and the growth steps it has taken."""
        free = self._sent + self._grown_s
        steps = 0
        if self._step_s and asked > free:
            steps = min(self._most_steps, math.ceil((asked - free) / self._step_s))
            free += steps * self._step_s
        if self._unstored and asked > free:
            free += self._draft_s(self._unstored)
            self._unstored = 0
        return free, steps

    def _drafting_s(self, hits: int, misses: int, lookahead: int, steps: int) -> float:
        """Returns the seconds of steps that finish hits and draft misses, in shared forwards."""
        finish = max(0, lookahead - steps) if hits else 0
        backup = lookahead if misses else 0
        shared = min(finish, backup)
        alone = (finish - shared) * self._draft_s(hits) + (backup - shared) * self._draft_s(misses)
        return shared * self._draft_s(hits + misses) + alone

    def _grow(self, lookahead: int, hits: int, misses: int) -> None:
        """Begins the growth after a reply."""
        fans, host = self._job.fan_outs.within(self.control.width), self._host
        lanes = hits * sum(fans.after_hit[: lookahead + 1])
        lanes += misses * sum(fans.after_miss[: lookahead + 1])
        self._most_steps, self._step_s, self._grown_s = lookahead, 0.0, 0.0
        if lanes:
            self._step_s = self._draft_s(lanes)
            glue = self._draft_s((hits + misses) * (lookahead + 1)) - host.step + host.glue
            self._grown_s = glue + host.keys + host.keys_lane * lanes

    def _draft_s(self, rows: int) -> float:
        if not rows:
            return 0.0
        return self._drafts_s(bucket(self._lanes, rows)) + self._host.step

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
