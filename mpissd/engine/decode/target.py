"""The target's round loop: ask, plan, verify, judge. Modes differ only in the speculator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mpissd.common.rounds import LIVE, Batch, Control, Event, Ints, Outcome, Request, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.trace import FollowPhase, LeadPhase, Ledger, NullLedger
from mpissd.common.wait import Waiter
from mpissd.engine.decode.speculator import Speculator
from mpissd.engine.workload.workers import TargetWorker

_VERIFY, _PLAN_WAIT = int(Doing.VERIFY), int(Doing.PLAN_WAIT)


class Plans(Protocol):
    """The lead's sending end of the plans to its followers; a group of one rank has no
    followers."""

    num_followers: int

    def publish(self, outcome: Outcome, speculation: Speculation, stop: bool = False) -> None:
        """Sends the plan of the round to every follower, whole."""


class PlanSource(Protocol):
    """A follower's receiving end of Plans."""

    def plan(self, round_: int) -> tuple[Outcome, Speculation, bool]:
        """Waits for the plan of a round and returns (outcome r-1, speculation r, stop)."""


@dataclass(frozen=True)
class RoundResult:
    """One verified round: its speculation, its outcome, and the forward's device time.

    logprobs: by batch row, the target's log-probability of each emitted token, if the sequence
    asked for it. num_rows: rows of the forward, prompts included. wait_s: wait for the draft after
    the outcome was applied. stored: tokens that a draft on the lead's own device stored before it
    drafted or during the verification; stored_s: the seconds of that, not counted in wait_s.
    adopted: for each sequence id placed in this round, the tokens of its prompt that other
    sequences had stored.
    """

    speculation: Speculation
    outcome: Outcome
    t_target_s: float
    logprobs: Mapping[int, list[float]] = field(default_factory=dict)
    num_rows: int = 0
    wait_s: float = 0.0
    stored: int = 0
    stored_s: float = 0.0
    adopted: Mapping[int, int] = field(default_factory=dict)


class TargetLoop:
    """The lead's round loop; its caller runs it by step() and makes sequences join or leave."""

    def __init__(
        self,
        worker: TargetWorker,
        speculator: Speculator,
        plans: Plans,
        capacity: int,
        waiter: Waiter,
    ) -> None:
        self._worker, self._speculator, self._plans = worker, speculator, plans
        self._waiter = waiter
        self.batch = Batch(capacity)
        self.round = 0
        self.prefill_s = 0.0  # spent on prompts so far
        self.control = Control()  # of the next round
        self._pending = Outcome.admission(-1, [])
        self.ledger = Ledger(LeadPhase)
        # Called in every round while the target verifies; for work that must not lengthen a round.
        self.meanwhile: Callable[[], None] | None = None
        # Called with every judged round (batch, accepted, bonus), after the outcome is sent, so
        # that the draft works meanwhile; see Teaching.
        self.teach: Callable[[Batch, Ints, Ints], None] | None = None
        self._untaught: tuple[Ints, Ints] | None = None  # of the round that was judged last
        # This rank verifies, except while a speculator reports DRAFT_WAIT.
        OWN.bytes[DOING] = _VERIFY

    @property
    def draft_lost_round(self) -> int | None:
        """The first round without the draft, or None while the draft is present."""
        return self._speculator.lost_round

    @property
    def live_ids(self) -> list[int]:
        """The sequences that the next round verifies."""
        rows = self._pending.rows[:, :3].tolist()
        return [request_id for request_id, _, event in rows if LIVE[event]]

    @property
    def is_storing(self) -> bool:
        """Whether prompts of opened sequences are still being stored in the next round."""
        events = self._pending.events
        joining = np.count_nonzero(events == Event.JOIN)
        return bool(len(self.batch.opened) > joining or (events == Event.OPEN).any())

    @property
    def unstored(self) -> int:
        """The tokens of opened prompts that are still to be stored."""
        opened = self.batch.opened
        known = {request.request_id for request in opened.values()}
        new = self._pending.prompts.values()
        coming = sum(len(one.prompt) - 1 for one in new if one.request_id not in known)
        return coming + self._worker.unstored(opened)

    @property
    def lacking(self) -> int:
        """The tokens of live sequences that a draft on the lead's own device has not stored."""
        return self._speculator.lacking

    @property
    def most_rows(self) -> int:
        """The rows of the target's largest forward."""
        return self._worker.stepper.most_rows

    def admit(self, requests: Sequence[Request]) -> None:
        """Lets these sequences join at the next round."""
        self._add(requests, Event.ADMIT)

    def open(self, requests: Sequence[Request]) -> None:
        """Lets these sequences join once their prompts are stored, `control.fill` rows a round."""
        self._add(requests, Event.OPEN)

    def _add(self, requests: Sequence[Request], event: Event) -> None:
        new, pending = Outcome.admission(0, requests, event), self._pending
        rows = np.concatenate([pending.rows, new.rows])
        self._pending = Outcome(pending.round, rows, {**pending.prompts, **new.prompts})

    def finish(self, request_ids: Sequence[int]) -> None:
        """Releases these sequences from the next round on; the tokens they emitted so far
        remain."""
        gone = np.isin(self._pending.ids, request_ids)
        # Other ranks do not know a sequence admitted since the last round, so it is just dropped.
        unborn = gone & np.isin(self._pending.events, (Event.ADMIT, Event.OPEN))
        released = self._released(gone)
        rows = np.concatenate([released.rows[~unborn], self._unopened(request_ids)])
        self._pending = Outcome(released.round, rows, released.prompts)

    def _unopened(self, request_ids: Sequence[int]) -> Ints:
        """Returns the releases of sequences whose prompts are still being stored."""
        known = set(self._pending.ids.tolist())
        gone = [
            request
            for request in self.batch.opened.values()
            if request.request_id in request_ids and request.request_id not in known
        ]
        return Outcome.admission(0, gone, Event.RELEASE).rows

    def step(self) -> RoundResult:
        """Runs one round: asks for speculation r with outcome r-1, verifies it, and decides outcome
        r."""
        mark, pending = self.ledger.mark, self._pending
        # An outcome of its own: the last step has returned the pending one.
        outcome = Outcome(pending.round, pending.rows, pending.prompts, self.control)
        self._speculator.ask(outcome)
        mark(LeadPhase.SEND)
        self.tell()
        admissions = self.batch.apply(outcome)
        self._worker.enter(self.batch, admissions)
        mark(LeadPhase.COMMIT)
        is_alone = self._plans.num_followers == 0
        if admissions and is_alone and self._prefill():  # while the draft does the same
            mark(LeadPhase.PREFILL)
        asked = perf_counter()
        speculation = self._speculator.answer(self.round, len(self.batch))
        stored, stored_s = self._speculator.stored, self._speculator.stored_s
        waited = perf_counter() - asked - stored_s
        mark(LeadPhase.DRAFT_WAIT)
        self._plans.publish(outcome, speculation)
        mark(LeadPhase.BROADCAST)
        if admissions and not is_alone and self._prefill():  # the followers do, too
            mark(LeadPhase.PREFILL)
        self._worker.upload(self.batch, speculation, outcome.control.fill)
        mark(LeadPhase.UPLOAD)
        self._worker.launch()
        mark(LeadPhase.LAUNCH)
        if self.meanwhile is not None:
            self.meanwhile()
        self._worker.wait(self._waiter)
        mark(LeadPhase.DEVICE_WAIT)
        speculation.is_lost = not self._speculator.confirm(speculation)
        accepted, bonus = self._worker.judge(self.batch, speculation, self._speculator.proposal)
        self._pending = self._outcome(accepted, bonus)
        logprobs = self._worker.logprobs(self.batch, speculation, accepted, bonus)
        self._untaught = accepted, bonus
        mark(LeadPhase.SAMPLE)
        self.round += 1
        seconds, rows = self._worker.elapsed_s(), self._worker.num_rows
        return RoundResult(
            speculation,
            self._pending,
            seconds,
            logprobs,
            rows,
            waited,
            stored,
            stored_s,
            self._worker.adopted,
        )

    def tell(self) -> None:
        """Calls `teach` with the round that was judged last, unless it has been.

        Every step calls this before the next forward overwrites the logits. After the last step the
        caller does, before it ends the learner.
        """
        judged, self._untaught = self._untaught, None
        if self.teach is not None and judged is not None:
            self.teach(self.batch, *judged)

    def _prefill(self) -> bool:
        """Stores the prompts of admitted sequences in the cache; collective over the ranks of T."""
        start = perf_counter()
        done = self._worker.fill(self.batch, range(len(self.batch)), self._waiter)
        self.prefill_s += (perf_counter() - start) * done
        return done

    def _outcome(self, accepted: Ints, bonus: Ints) -> Outcome:
        rows = self.batch.identity.copy()
        rows[:, 3], rows[:, 4] = accepted, bonus
        if self.batch.opened and (joined := self._stored()):
            rows = np.concatenate([rows, Outcome.admission(0, joined, Event.JOIN).rows])
        return Outcome(self.round, rows)

    def _stored(self) -> list[Request]:
        """Returns the opened sequences whose whole prompts are stored."""
        return [r for slot, r in self.batch.opened.items() if self._worker.is_stored(slot)]

    def stop(self) -> None:
        """Ends the loops of the followers and of the draft."""
        everyone = np.ones(len(self._pending.rows), np.bool_)
        self._pending = self._released(everyone)
        nothing = Speculation.empty(self.round, 0, 0)
        self._speculator.stop(self._pending)
        self._plans.publish(self._pending, nothing, stop=True)
        self._worker.leave()

    def _released(self, gone: NDArray[np.bool_]) -> Outcome:
        """Returns a copy of the pending outcome with these rows [n] turned into releases.

        It must be a copy, because step() has returned the original.
        """
        pending = self._pending
        released = Outcome(pending.round, pending.rows.copy(), pending.prompts)
        released.events[gone] = Event.RELEASE
        return released


def follow(
    worker: TargetWorker,
    plans: PlanSource,
    capacity: int,
    waiter: Waiter,
    ledger: Ledger | None = None,
) -> int:
    """Runs a follower's loop: the same forwards in the same order, until a plan stops it.

    Returns the digest of the outcomes it received (Batch.digest).
    """
    batch, page = Batch(capacity), OWN.bytes
    ledger = ledger or NullLedger(FollowPhase)
    ledger.restart()
    round_ = 0
    while True:
        page[DOING] = _PLAN_WAIT
        outcome, speculation, stop = plans.plan(round_)
        if stop:
            worker.leave()
            return batch.digest
        ledger.mark(FollowPhase.PLAN_WAIT)
        page[DOING] = _VERIFY
        admissions = batch.apply(outcome)
        worker.enter(batch, admissions)
        ledger.mark(FollowPhase.COMMIT)
        if admissions and worker.fill(batch, range(len(batch)), waiter):
            ledger.mark(FollowPhase.PREFILL)
        worker.upload(batch, speculation, outcome.control.fill)
        ledger.mark(FollowPhase.UPLOAD)
        worker.launch()
        ledger.mark(FollowPhase.LAUNCH)
        worker.wait(waiter)
        ledger.close_round(round_, FollowPhase.DEVICE_WAIT)
        round_ += 1
