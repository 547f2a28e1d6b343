"""The target's round, in the order of Saguaro's algorithm: obtain drafted tokens, send them to the
other target ranks, verify them, and decide which are accepted.

`TargetLoop.step` is the round of the target's rank 0, which decides. `follow` runs the same
forwards on the other target ranks. AR, SD and SSD differ only in the Speculator, the source of the
drafted tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from mpissd.common.rounds import (
    Control,
    Event,
    Ints,
    Logprob,
    Outcome,
    Request,
    Scored,
    Speculation,
)
from mpissd.common.trace import FollowPhase, LeadPhase, Ledger, NullLedger
from mpissd.common.wait import Waiter
from mpissd.engine.round.rows import TargetWorker
from mpissd.engine.round.sequence import Batch
from mpissd.engine.round.speculator import Speculator

# Sends the other target ranks (outcome r−1, drafted tokens of round r, whether the run ends).
Publish = Callable[[Outcome, Speculation, bool], None]


@dataclass(frozen=True)
class RoundResult:
    """What one round of the target decided, and its times.

    speculation: the drafted tokens. outcome: the accepted and bonus tokens. t_target_s: the device
    seconds of the target's forward. logprobs: by batch row, the log-probabilities of the emitted
    tokens, if the request asked for them. num_rows: the number of tokens that the forward computed,
    with those of prompts. wait_s: the seconds of waiting for the draft, without stored_s. stored_s:
    the seconds in which a draft on the same device stored tokens that its KV cache lacked. adopted:
    by id of a new sequence, how many tokens of its prompt other sequences had stored in the KV
    cache. forced: by batch row, the tokens that a grammar forces after the bonus token. scored:
    log-probabilities of prompts' tokens, for requests that ask for them.
    """

    speculation: Speculation
    outcome: Outcome
    t_target_s: float
    logprobs: Mapping[int, list[Logprob]] = field(default_factory=dict)
    num_rows: int = 0
    wait_s: float = 0.0
    stored_s: float = 0.0
    adopted: Mapping[int, int] = field(default_factory=dict)
    forced: Mapping[int, list[int]] = field(default_factory=dict)
    scored: Sequence[Scored] = ()

    def emitted(self) -> list[tuple[int, list[int]]]:
        """Returns (request id, accepted tokens and bonus token) of every sequence, without the
        tokens that a grammar forces after them (`forced`)."""
        rows = zip(self.outcome.rows.tolist(), self.speculation.tokens.tolist(), strict=True)
        return [(request_id, [*drafts[:k], bonus]) for (request_id, _, _, k, bonus), drafts in rows]


class RoundObserver:
    """Does other work in each round while the ranks wait. The base class does nothing."""

    def judged(self, batch: Batch, accepted: Ints, bonus: Ints) -> None:
        """Called after a round's accepted and bonus tokens were sent to the draft, while the draft
        works and before the target's next forward overwrites the logits. accepted, bonus: for each
        sequence the number of accepted tokens and the token emitted after them, int32 [b]."""

    def verifying(self) -> None:
        """Called while the target verifies."""


class TargetLoop:
    """Runs the target's rounds on its rank 0, which decides them. The caller runs each round by
    step(), and makes sequences join or leave between two rounds.

    round: the number of the next round. control: limits of the next round, such as K, its number of
    drafted tokens. prefill_s: the seconds spent on storing prompts so far. observers: objects that
    are called in every round.
    """

    def __init__(
        self,
        worker: TargetWorker,
        speculator: Speculator,
        publish: Publish | None,
        capacity: int,
        waiter: Waiter,
        ledger: Ledger | None = None,
    ) -> None:
        """Opens an empty batch. worker: runs the target's forwards. speculator: gets drafted
        tokens. publish: sends each round to the other target ranks (None: there are none).
        capacity: the most live sequences. waiter: waits with a deadline. ledger: times phases."""
        self.batch = worker.open_batch(capacity)
        self.round = 0
        self.prefill_s = 0.0
        self.control = Control()
        self.ledger = ledger or Ledger(LeadPhase)
        self.observers: list[RoundObserver] = []
        self._worker = worker
        self._speculator = speculator
        self._publish = publish
        self._waiter = waiter
        self._unobserved: tuple[Ints, Ints] | None = None  # (accepted, bonus) not yet observed
        self._decided: Ints = self.batch.identity  # the last outcome, one row per sequence
        self._forced: Mapping[int, list[int]] = {}  # {row: tokens that a grammar forced}
        # Sequences that join with the next outcome, and ids of those that end with it.
        self._new: list[tuple[Event, Request]] = []
        self._leaving: set[int] = set()

    def step(self) -> RoundResult:
        """Runs the next round r, and returns what it decided: sends outcome r−1 (accepted and bonus
        tokens) to the draft, receives the drafts of round r, verifies them, decides outcome r."""
        mark = self.ledger.mark
        worker = self._worker
        speculator = self._speculator
        outcome = self._outcome()
        speculator.ask(outcome)
        mark(LeadPhase.SEND)
        self.tell()
        change = self.batch.apply(outcome)
        worker.enter(self.batch, change)
        mark(LeadPhase.COMMIT)
        is_alone = self._publish is None
        if change.started and is_alone:  # the draft stores these prompts at the same time
            self._prefill()
        asked = perf_counter()
        speculation = speculator.answer(self.round, len(self.batch))
        stored_s = speculator.stored_s
        wait_s = perf_counter() - asked - stored_s
        mark(LeadPhase.DRAFT_WAIT)
        if self._publish is not None:
            self._publish(outcome, speculation, False)
        mark(LeadPhase.BROADCAST)
        is_short = worker.is_short(self.batch, speculation.num_rows)
        if is_short or (change.started and not is_alone):  # other target ranks know the round
            self._prefill()
        speculation = self._verified(speculation, outcome.control.prefill_rows)
        accepted, bonus = worker.judge(self.batch, speculation, speculator.proposal)
        rows = self.batch.identity.copy()
        rows[:, 3] = accepted
        rows[:, 4] = bonus
        logprobs = worker.oracle.logprobs(self.batch, accepted, bonus)
        scored = worker.oracle.scored(worker.prompt_parts) if worker.prompt_parts else ()
        self._decided = rows
        self._unobserved = accepted, bonus
        mark(LeadPhase.SAMPLE)
        self._forced = worker.oracle.forced(self.batch, accepted, bonus)
        speculation, decided = self.batch.shape.as_chains(speculation, Outcome(self.round, rows))
        self.round += 1
        return RoundResult(
            speculation,
            decided,
            worker.elapsed_s(),
            logprobs,
            num_rows=worker.num_rows,
            wait_s=wait_s,
            stored_s=stored_s,
            adopted=worker.adopted,
            forced=self._forced,
            scored=scored,
        )

    def _verified(self, speculation: Speculation, prefill_rows: int) -> Speculation:
        """Runs the target's forward over the drafted tokens and over up to `prefill_rows` tokens of
        prompts. Returns the drafted tokens that it verified, or none if the distributions that they
        were drawn from are lost."""
        mark = self.ledger.mark
        worker = self._worker
        worker.upload(self.batch, speculation, prefill_rows)
        mark(LeadPhase.UPLOAD)
        worker.launch()
        mark(LeadPhase.LAUNCH)
        self._speculator.meanwhile()
        for observer in self.observers:
            observer.verifying()
        self._waiter.between = self._speculator.collect
        try:
            worker.wait(self._waiter)
        finally:
            self._waiter.between = None
        mark(LeadPhase.DEVICE_WAIT)
        speculation = worker.verified(speculation)
        return speculation if self._speculator.confirm(speculation) else speculation.lost()

    def _outcome(self) -> Outcome:
        """Returns the last round's outcome, with the sequences that join or leave."""
        joining = self._joining
        if not (joining or self._new or self._leaving or any(self._forced.values())):
            return Outcome(self.round - 1, self._decided, control=self.control)
        rows = self._decided.copy()
        rows[np.isin(rows[:, 0], list(self._leaving)), 2] = Event.RELEASE
        opened = [sequence.request for sequence in self.batch.opened.values()]
        gone = [request for request in opened if request.request_id in self._leaving]
        changes = [
            *((Event.START, request) for request in joining),
            *self._new,
            *((Event.RELEASE, request) for request in gone),
        ]
        added = [(r.request_id, r.epoch, event, 0, r.first_token) for event, r in changes]
        for row, tokens in self._forced.items():
            if rows[row, 2] == Event.COMMIT:
                name = rows[row, :2].tolist()
                added += [(*name, Event.FORCED, 0, token) for token in tokens]
        prompts = {(r.request_id, r.epoch): r for _, r in self._new if r.prompt}
        self._new = []
        self._leaving = set()
        rows = np.concatenate([rows, np.array(added, np.int32).reshape(-1, Outcome.WIDTH)])
        return Outcome(self.round - 1, rows, prompts, self.control)

    @property
    def _joining(self) -> list[Request]:
        """The requests that join next, because all parts of their prompts are stored by now."""
        if not self.batch.opened:
            return []
        stored = self.batch.stored()
        return [request for request in stored if request.request_id not in self._leaving]

    @property
    def draft_lost_round(self) -> int | None:
        """The first round without drafted tokens after the draft rank was lost, or None."""
        return self._speculator.lost_round

    @property
    def live_ids(self) -> list[int]:
        """The ids of the sequences that the next round verifies."""
        live = [
            request_id
            for request_id in self._decided[:, 0].tolist()
            if request_id not in self._leaving
        ]
        new = [request.request_id for event, request in self._new if event == Event.ADMIT]
        return [*live, *(request.request_id for request in self._joining), *new]

    @property
    def unstored(self) -> int:
        """How many prompt tokens of requests that will join are still to be stored (in parts)."""
        coming = sum(len(request.prompt) - 1 for _, request in self._new if request.prompt)
        return coming + sum(gap.size for gap in self.batch.opened_gaps())

    @property
    def most_rows(self) -> int:
        """The most rows (tokens) that a forward of the target can compute."""
        return self._worker.stepper.most_rows

    def admit(self, requests: Sequence[Request]) -> None:
        """Lets sequences join at the next round, which first stores their whole prompts."""
        self._new += [(Event.ADMIT, request) for request in requests]

    def open(self, requests: Sequence[Request]) -> None:
        """Lets sequences join later, once their prompts are stored in parts (chunked prefill):
        control.prefill_rows tokens a round."""
        self._new += [(Event.PREFILL, request) for request in requests]

    def finish(self, request_ids: Sequence[int]) -> None:
        """Ends sequences before the next round."""
        # A sequence admitted since the last round is dropped, because other ranks do not know it.
        self._new = [
            (event, request)
            for event, request in self._new
            if request.request_id not in request_ids
        ]
        self._leaving.update(request_ids)

    def tell(self) -> None:
        """Passes the accepted and bonus tokens of the last round to the observers, once. Each step
        calls this before its forward overwrites the logits; the caller does after the last."""
        judged = self._unobserved
        self._unobserved = None
        if judged is not None:
            for observer in self.observers:
                observer.judged(self.batch, *judged)

    def _prefill(self) -> None:
        """Stores K and V of the prompts of admitted sequences. All target ranks run it together."""
        start = perf_counter()
        if self._worker.catch_up(self.batch, range(len(self.batch)), self._waiter):
            self.prefill_s += perf_counter() - start
            self.ledger.mark(LeadPhase.PREFILL)

    def stop(self) -> None:
        """Ends the loops of the other target ranks and of the draft."""
        rows = self._decided.copy()
        rows[:, 2] = Event.RELEASE
        last = Outcome(self.round - 1, rows)
        self._speculator.stop(last)
        if self._publish is not None:
            self._publish(last, Speculation.empty(self.round, 0, 0), True)
        self._worker.leave(self.batch)


def follow(
    worker: TargetWorker,
    plan: Callable[[int], tuple[Outcome, Speculation, bool]],
    capacity: int,
    waiter: Waiter,
    ledger: Ledger | None = None,
) -> int:
    """Runs, on another target rank, the same forwards as the target's rank 0 in the same order,
    until rank 0 stops it. Returns a checksum of all outcomes, which ranks compare to detect that
    they differ. plan: waits for rank 0's message of round r; returns (outcome r−1, drafted tokens
    of round r, whether to stop). capacity: the most live sequences."""
    batch = worker.open_batch(capacity)
    ledger = ledger or NullLedger(FollowPhase)
    ledger.restart()
    round_ = 0
    while True:
        outcome, speculation, stop = plan(round_)
        if stop:
            worker.leave(batch)
            return batch.digest
        ledger.mark(FollowPhase.PLAN_WAIT)
        change = batch.apply(outcome)
        worker.enter(batch, change)
        ledger.mark(FollowPhase.COMMIT)
        lacks = change.started or worker.is_short(batch, speculation.num_rows)
        if lacks and worker.catch_up(batch, range(len(batch)), waiter):
            ledger.mark(FollowPhase.PREFILL)
        worker.upload(batch, speculation, outcome.control.prefill_rows)
        ledger.mark(FollowPhase.UPLOAD)
        worker.launch()
        ledger.mark(FollowPhase.LAUNCH)
        worker.wait(waiter)
        ledger.close_round(round_, FollowPhase.DEVICE_WAIT)
        round_ += 1
