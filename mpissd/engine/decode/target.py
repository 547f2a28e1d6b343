"""The target's round: ask, plan, verify, judge. Modes differ only in the speculator.

`TargetLoop.step` is the lead's round of Saguaro's algorithm; `follow` runs the same forwards on the
other target ranks. The draft's round is in draft_loop.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Protocol

import numpy as np

from mpissd.common.rounds import Control, Event, Ints, Outcome, Request, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.trace import FollowPhase, LeadPhase, Ledger, NullLedger
from mpissd.common.wait import Waiter
from mpissd.engine.decode.speculator import Speculator
from mpissd.engine.workload.sequence import Batch
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
    the outcome was applied. stored_s: seconds in which a draft on the lead's own device stored the
    tokens that it lacked, not counted in wait_s.
    adopted: for each sequence id placed in this round, the tokens of its prompt that other
    sequences had stored.
    """

    speculation: Speculation
    outcome: Outcome
    t_target_s: float
    logprobs: Mapping[int, list[float]] = field(default_factory=dict)
    num_rows: int = 0
    wait_s: float = 0.0
    stored_s: float = 0.0
    adopted: Mapping[int, int] = field(default_factory=dict)

    def emitted(self) -> list[tuple[int, list[int]]]:
        """Returns (request id, the tokens that it emitted in this round) of every sequence."""
        rows = zip(self.outcome.rows.tolist(), self.speculation.tokens.tolist(), strict=True)
        return [(name, [*drafts[:k], bonus]) for (name, _, _, k, bonus), drafts in rows]


class TargetLoop:
    """The lead's round loop; its caller runs it by step() and makes sequences join or leave.

    round: the next one. control: of the next round. prefill_s: seconds spent on prompts so far.
    meanwhile: called in every round while the target verifies, for work that must not lengthen a
    round. teach: called with every judged round (batch, accepted, bonus), after the outcome is
    sent, so that the draft works meanwhile; see Teaching.
    """

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
        self.batch = worker.open_batch(capacity)
        self.round, self.prefill_s, self.control = 0, 0.0, Control()
        self.ledger = Ledger(LeadPhase)
        self.meanwhile: Callable[[], None] | None = None
        self.teach: Callable[[Batch, Ints, Ints], None] | None = None
        self._untaught: tuple[Ints, Ints] | None = None  # of the round that was judged last
        self._decided: Ints = self.batch.identity  # outcome rows of the last round
        # What changes with the next outcome: new sequences, and ids of those that end.
        self._new: list[tuple[Event, Request]] = []
        self._leaving: set[int] = set()
        # This rank verifies, except while a speculator reports DRAFT_WAIT.
        OWN.bytes[DOING] = _VERIFY

    def step(self) -> RoundResult:
        """Runs one round: asks for speculation r with outcome r-1, verifies it, and decides outcome
        r."""
        mark, worker, speculator = self.ledger.mark, self._worker, self._speculator
        outcome = self._outcome()
        speculator.ask(outcome)
        mark(LeadPhase.SEND)
        self.tell()
        change = self.batch.apply(outcome)
        worker.enter(self.batch, change)
        mark(LeadPhase.COMMIT)
        # Without followers, prompts are stored while the draft does the same.
        is_single = self._plans.num_followers == 0
        if change.started and is_single and self._prefill():
            mark(LeadPhase.PREFILL)
        asked = perf_counter()
        speculation = speculator.answer(self.round, len(self.batch))
        stored_s = speculator.stored_s
        wait_s = perf_counter() - asked - stored_s
        mark(LeadPhase.DRAFT_WAIT)
        self._plans.publish(outcome, speculation)
        mark(LeadPhase.BROADCAST)
        if change.started and not is_single and self._prefill():  # the followers do, too
            mark(LeadPhase.PREFILL)
        worker.upload(self.batch, speculation, outcome.control.prefill_rows)
        mark(LeadPhase.UPLOAD)
        worker.launch()
        mark(LeadPhase.LAUNCH)
        if self.meanwhile is not None:
            self.meanwhile()
        worker.wait(self._waiter)
        mark(LeadPhase.DEVICE_WAIT)
        speculation.is_lost = not speculator.confirm(speculation)
        accepted, bonus = worker.judge(self.batch, speculation, speculator.proposal)
        rows = self.batch.identity.copy()
        rows[:, 3], rows[:, 4] = accepted, bonus
        logprobs = worker.oracle.logprobs(self.batch, accepted, bonus)
        self._decided, self._untaught = rows, (accepted, bonus)
        mark(LeadPhase.SAMPLE)
        decided = Outcome(self.round, rows)
        self.round += 1
        seconds, num_rows, adopted = worker.elapsed_s(), worker.num_rows, worker.adopted
        return RoundResult(
            speculation, decided, seconds, logprobs, num_rows, wait_s, stored_s, adopted
        )

    def _outcome(self) -> Outcome:
        """Returns outcome r-1 as it is sent: the decisions of the last round, and which sequences
        join and leave."""
        joining = self._joining
        if not (joining or self._new or self._leaving):
            return Outcome(self.round - 1, self._decided, control=self.control)
        rows = self._decided.copy()
        rows[np.isin(rows[:, 0], list(self._leaving)), 2] = Event.RELEASE
        opened = [one.request for one in self.batch.opened.values()]
        gone = [request for request in opened if request.request_id in self._leaving]
        changes = [
            *((Event.START, request) for request in joining),
            *self._new,
            *((Event.RELEASE, request) for request in gone),
        ]
        more = [(r.request_id, r.epoch, event, 0, r.first_token) for event, r in changes]
        prompts = {(r.request_id, r.epoch): r for _, r in self._new if r.prompt}
        self._new, self._leaving = [], set()
        every = np.concatenate([rows, np.array(more, np.int32).reshape(-1, Outcome.WIDTH)])
        return Outcome(self.round - 1, every, prompts, self.control)

    @property
    def _joining(self) -> list[Request]:
        """The opened sequences that join with the next outcome: their prompts are stored."""
        if not self.batch.opened:
            return []
        return [one for one in self.batch.stored() if one.request_id not in self._leaving]

    @property
    def draft_lost_round(self) -> int | None:
        """The first round without the draft, or None while the draft is present."""
        return self._speculator.lost_round

    @property
    def live_ids(self) -> list[int]:
        """The sequences that the next round verifies."""
        live = [name for name in self._decided[:, 0].tolist() if name not in self._leaving]
        new = [request.request_id for event, request in self._new if event == Event.ADMIT]
        return [*live, *(one.request_id for one in self._joining), *new]

    @property
    def is_storing(self) -> bool:
        """Whether prompts of opened sequences are still being stored in the next round."""
        storing = len(self.batch.opened) > len(self._joining)
        return storing or any(event == Event.PREFILL for event, _ in self._new)

    @property
    def unstored(self) -> int:
        """The tokens of opened prompts that are still to be stored."""
        coming = sum(len(request.prompt) - 1 for _, request in self._new if request.prompt)
        return coming + sum(gap.size for gap in self.batch.opened_gaps())

    @property
    def most_rows(self) -> int:
        """The rows of the target's largest forward."""
        return self._worker.stepper.most_rows

    def admit(self, requests: Sequence[Request]) -> None:
        """Lets these sequences join at the next round."""
        self._new += [(Event.ADMIT, request) for request in requests]

    def open(self, requests: Sequence[Request]) -> None:
        """Lets these sequences join once their prompts are stored, in parts of
        `control.prefill_rows` rows."""
        self._new += [(Event.PREFILL, request) for request in requests]

    def finish(self, request_ids: Sequence[int]) -> None:
        """Releases these sequences from the next round on; the tokens they emitted so far
        remain."""
        # Other ranks do not know a sequence admitted since the last round, so it is just dropped.
        self._new = [
            (e, request) for e, request in self._new if request.request_id not in request_ids
        ]
        self._leaving.update(request_ids)

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

    def stop(self) -> None:
        """Ends the loops of the followers and of the draft."""
        rows = self._decided.copy()
        rows[:, 2] = Event.RELEASE
        last, nothing = Outcome(self.round - 1, rows), Speculation.empty(self.round, 0, 0)
        self._speculator.stop(last)
        self._plans.publish(last, nothing, stop=True)
        self._worker.leave(self.batch)


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
    batch, page = worker.open_batch(capacity), OWN.bytes
    ledger = ledger or NullLedger(FollowPhase)
    ledger.restart()
    round_ = 0
    while True:
        page[DOING] = _PLAN_WAIT
        outcome, speculation, stop = plans.plan(round_)
        if stop:
            worker.leave(batch)
            return batch.digest
        ledger.mark(FollowPhase.PLAN_WAIT)
        page[DOING] = _VERIFY
        change = batch.apply(outcome)
        worker.enter(batch, change)
        ledger.mark(FollowPhase.COMMIT)
        if change.started and worker.fill(batch, range(len(batch)), waiter):
            ledger.mark(FollowPhase.PREFILL)
        worker.upload(batch, speculation, outcome.control.prefill_rows)
        ledger.mark(FollowPhase.UPLOAD)
        worker.launch()
        ledger.mark(FollowPhase.LAUNCH)
        worker.wait(waiter)
        ledger.close_round(round_, FollowPhase.DEVICE_WAIT)
        round_ += 1
