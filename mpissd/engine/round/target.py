"""The target's round and the draft's round, in the order of Saguaro's algorithm.

`TargetLoop.step` is the lead's round: ask, plan, verify, judge. `follow` runs the same forwards on
the other target ranks. Modes differ only in the speculator. `draft_rounds` is the draft's round:
answer the outcome, then speculate on the outcome of that answer while the target verifies it.

The draft's round is a generator that pauses at each forward and while it waits for a message.
Between two forwards `serve` takes what has arrived from all target groups, and its next forward
carries the next work of each of them: answers, glues (scoring forwards) and growth. So an outcome
waits for at most the one forward that runs when it arrives, whatever the draft does for other
groups. Only chunks of their long prompts, which are forwards of their own, come on top.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import TypeVar

import numpy as np

from mpissd.common.rounds import Control, Event, Ints, Logprob, Outcome, Request, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.trace import DraftPhase, FollowPhase, LeadPhase, Ledger, NullLedger
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.features.learning import Updates
from mpissd.engine.oracle.workload import Workload
from mpissd.engine.round.draft import Drafter
from mpissd.engine.round.rows import TargetWorker
from mpissd.engine.round.sequence import Batch
from mpissd.engine.round.speculator import Speculator

_VERIFY, _PLAN_WAIT = int(Doing.VERIFY), int(Doing.PLAN_WAIT)
# (outcome r-1, speculation r, whether this is the last one): what the lead sends its followers.
Publish = Callable[[Outcome, Speculation, bool], None]
R = TypeVar("R")
Ready = Callable[[], bool]
# Yields None when a forward was launched, or a test of whether the awaited message has arrived.
Turns = Generator["Ready | None", None, R]


@dataclass(frozen=True)
class RoundResult:
    """One verified round: its speculation, its outcome, and the forward's device time.

    logprobs: by batch row, the target's log-probability of each emitted token, if the sequence
    asked for it. num_rows: rows of the forward, prompts included. wait_s: wait for the draft after
    the outcome was applied. stored_s: seconds in which a draft on the lead's own device stored the
    tokens that it lacked, not counted in wait_s.
    adopted: for each sequence id placed in this round, the tokens of its prompt that other
    sequences had stored. forced: by batch row, the tokens that its grammar forces after the bonus.
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
        publish: Publish | None,
        capacity: int,
        waiter: Waiter,
    ) -> None:
        """publish: sends a round's plan to every follower; None: there are no followers."""
        self._worker, self._speculator, self._publish = worker, speculator, publish
        self._waiter = waiter
        self.batch = worker.open_batch(capacity)
        self.round, self.prefill_s, self.control = 0, 0.0, Control()
        self.ledger = Ledger(LeadPhase)
        self.meanwhile: Callable[[], None] | None = None
        self.teach: Callable[[Batch, Ints, Ints], None] | None = None
        self._untaught: tuple[Ints, Ints] | None = None  # outcome of the round judged last
        self._decided: Ints = self.batch.identity  # outcome rows of the last round
        self._forced: dict[int, list[int]] = {}  # tokens after them, by batch row
        # What changes with the next outcome: new sequences, and ids of those that end.
        self._new: list[tuple[Event, Request]] = []
        self._leaving: set[int] = set()
        # This rank verifies, except while a speculator reports DRAFT_WAIT.
        OWN.bytes[DOING] = _VERIFY

    def step(self) -> RoundResult:
        """Runs one round: asks for speculation r with outcome r-1, verifies it, and decides outcome
        r."""
        mark, worker, speculator = self.ledger.mark, self._worker, self._speculator
        publish, outcome = self._publish, self._outcome()
        speculator.ask(outcome)
        mark(LeadPhase.SEND)
        self.tell()
        change = self.batch.apply(outcome)
        worker.enter(self.batch, change)
        mark(LeadPhase.COMMIT)
        if change.started and publish is None:  # while the draft stores the same prompts
            self._prefill()
        asked = perf_counter()
        speculation = speculator.answer(self.round, len(self.batch))
        stored_s = speculator.stored_s
        wait_s = perf_counter() - asked - stored_s
        mark(LeadPhase.DRAFT_WAIT)
        if publish is not None:
            publish(outcome, speculation, False)
        mark(LeadPhase.BROADCAST)
        is_short = worker.is_short(self.batch, speculation.num_rows)
        if is_short or (change.started and publish is not None):  # the followers do so, too
            self._prefill()
        worker.upload(self.batch, speculation, outcome.control.prefill_rows)
        mark(LeadPhase.UPLOAD)
        worker.launch()
        mark(LeadPhase.LAUNCH)
        speculator.meanwhile()
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
        decided, tree = Outcome(self.round, rows), worker.oracle.tree
        self._forced = dict[int, list[int]]()
        for row, one in enumerate(self.batch.sequences if worker.oracle.forces else ()):
            if (grammar := worker.oracle.grammar(one)) is not None:
                path = [one.served[column] for column in tree.paths[accepted[row]]]
                self._forced[row] = grammar.forced([*one.answer, *path, int(bonus[row])])
        if tree.num_lanes:
            speculation, decided = tree.as_chains(speculation, decided)
        self.round += 1
        more = worker.num_rows, wait_s, stored_s, worker.adopted, self._forced
        return RoundResult(speculation, decided, worker.elapsed_s(), logprobs, *more)

    def _outcome(self) -> Outcome:
        """Returns outcome r-1 as it is sent: the decisions of the last round, and which sequences
        join and leave."""
        joining = self._joining
        if not (joining or self._new or self._leaving or any(self._forced.values())):
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
        for row, tokens in self._forced.items():
            if rows[row, 2] == Event.COMMIT:
                more += [(*rows[row, :2].tolist(), Event.FORCED, 0, token) for token in tokens]
        prompts = {(r.request_id, r.epoch): r for _, r in self._new if r.prompt}
        self._new, self._leaving = [], set()
        every = np.concatenate([rows, np.array(more, np.int32).reshape(-1, Outcome.WIDTH)])
        return Outcome(self.round - 1, every, prompts, self.control)

    @property
    def _joining(self) -> list[Request]:
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

    def _prefill(self) -> None:
        """Stores the prompts of admitted sequences in the cache; collective over the ranks of T."""
        start = perf_counter()
        if self._worker.fill(self.batch, range(len(self.batch)), self._waiter):
            self.prefill_s += perf_counter() - start
            self.ledger.mark(LeadPhase.PREFILL)

    def stop(self) -> None:
        """Ends the loops of the followers and of the draft."""
        rows = self._decided.copy()
        rows[:, 2] = Event.RELEASE
        last, nothing = Outcome(self.round - 1, rows), Speculation.empty(self.round, 0, 0)
        self._speculator.stop(last)
        if self._publish is not None:
            self._publish(last, nothing, True)
        self._worker.leave(self.batch)


def follow(
    worker: TargetWorker,
    plan: Callable[[int], tuple[Outcome, Speculation, bool]],
    capacity: int,
    waiter: Waiter,
    ledger: Ledger | None = None,
) -> int:
    """Runs a follower's loop: the same forwards in the same order, until a plan stops it.

    plan: waits for the plan of a round, as the lead published it. Returns the digest of the
    outcomes that it received (Batch.digest).
    """
    batch, page = worker.open_batch(capacity), OWN.bytes
    ledger = ledger or NullLedger(FollowPhase)
    ledger.restart()
    round_ = 0
    while True:
        page[DOING] = _PLAN_WAIT
        outcome, speculation, stop = plan(round_)
        if stop:
            worker.leave(batch)
            return batch.digest
        ledger.mark(FollowPhase.PLAN_WAIT)
        page[DOING] = _VERIFY
        change = batch.apply(outcome)
        worker.enter(batch, change)
        ledger.mark(FollowPhase.COMMIT)
        lacks = change.started or worker.is_short(batch, speculation.num_rows)
        if lacks and worker.fill(batch, range(len(batch)), waiter):
            ledger.mark(FollowPhase.PREFILL)
        worker.upload(batch, speculation, outcome.control.prefill_rows)
        ledger.mark(FollowPhase.UPLOAD)
        worker.launch()
        ledger.mark(FollowPhase.LAUNCH)
        worker.wait(waiter)
        ledger.close_round(round_, FollowPhase.DEVICE_WAIT)
        round_ += 1


class Sequences:
    """Follows the sequences of one pass on the lead, and decides which of them join and leave.

    batch_size of them are decoded at a time. One ends when the workload ends it (Workload.endings),
    or with num_tokens tokens. ends: {id: tokens that count} of sequences that the workload ended.
    """

    def __init__(self, workload: Workload, group: int = 0) -> None:
        """Takes the sequences of one target group."""
        self._workload, self._limit = workload, workload.job.config.token_limit
        self._endings = workload.endings()
        self._left = workload.share(group)
        self._emitted: dict[int, int] = {}  # emitted tokens of each live sequence, by request id
        self.ends: dict[int, int] = {}

    @property
    def are_live(self) -> bool:
        """Whether a sequence is left to decode."""
        return bool(self._emitted)

    def first(self) -> list[Request]:
        """Returns the sequences that begin: at most batch_size."""
        return self._next(self._workload.job.config.batch_size)

    def _next(self, count: int) -> list[Request]:
        count = min(count, len(self._left))
        requests = self._workload.requests(self._left.start, count)
        self._left = self._left[count:]
        self._emitted |= {request.request_id: 0 for request in requests}
        return requests

    def take(self, result: RoundResult, loop: TargetLoop) -> None:
        """Counts a round's tokens, releases sequences that ended, and admits as many new ones."""
        if self._limit is None and self._endings is None:
            return
        gone = []
        for name, tokens in result.emitted():
            before, kept = self._emitted[name], None
            if self._endings is not None:
                kept = self._endings.kept(name, before, tokens)
            if kept is not None:
                self.ends[name] = before + kept
            self._emitted[name] = count = before + len(tokens)
            if kept is not None or (self._limit is not None and count >= self._limit):
                del self._emitted[name]
                gone.append(name)
        if gone:
            loop.finish(gone)
            loop.admit(self._next(len(gone)))


def draft_rounds(link: DraftEnd, drafter: Drafter, updates: Updates | None = None) -> Turns[None]:
    """Serves one group, round by round, until an outcome carries the stop flag.

    The link is polled between growth steps, so an outcome waits for at most one of them; of steps
    that the device joins, for the one that runs and the next one.
    """
    for round_ in count(-1):  # The first outcome, of round -1, only admits sequences.
        if not link.outcome_arrived():
            yield link.outcome_arrived
        outcome, stop = link.outcome(round_)
        mark = drafter.ledger.mark
        mark(DraftPhase.WAIT)
        if stop:
            yield from drafter.settling()
            drafter.worker.leave(drafter.batch)  # ends the pass
            return
        # Answers v = (k, t*): branches of the cache for hits, the backup for misses.
        answer = yield from drafter.answering(outcome)
        if drafter.is_asked:
            link.send_speculation(answer)
            if drafter.policy.sampled and (rows := drafter.proposals()):
                link.send_proposals(answer.round, rows)
        mark(DraftPhase.SEND)
        # Speculates on the outcome of the answer, while the target verifies it.
        drafter.verification_started(answer)
        if (yield from drafter.begin_growth(answer)):
            while drafter.growing and not link.outcome_arrived():
                yield from drafter.grow_step()
        if drafter.is_storing and not link.outcome_arrived():
            yield from drafter.store_opened()
        drafter.close_round(answer)
        if updates is not None:
            while updates.work() and not link.outcome_arrived():
                continue


@dataclass
class _Group:
    """One target group: its rounds on the draft, and a test of whether the message has arrived for
    which they wait; None: they wait for the launched forward."""

    drafter: Drafter
    turns: Turns[None]
    awaited: Ready | None = None


def serve(*ends: tuple[DraftEnd, Drafter], updates: Updates | None = None) -> None:
    """Runs the draft's loop over a link and a drafter for each target group.

    Returns when every group has stopped. Each works until it has launched a forward or waits for a
    message. Drafters of several groups must run their forwards on one shared model (model.stepper),
    so that the wait for one ends the forwards of all. updates: source of newer weights for a single
    drafter, one unit a round and more while no message arrives.
    """
    groups = [_Group(drafter, draft_rounds(link, drafter, updates)) for link, drafter in ends]
    for group in groups:
        group.drafter.ledger.restart()

    def has_arrived() -> bool:
        return any(group.awaited is None or group.awaited() for group in groups)

    while groups:
        running = None
        for group in groups[:]:
            if group.awaited is not None and not group.awaited():
                continue
            try:
                group.awaited = next(group.turns)
            except StopIteration:
                groups.remove(group)
                continue
            if group.awaited is None:
                running = group
        if running is not None:
            running.drafter.worker.wait(running.drafter.waiter)
        elif groups:
            groups[0].drafter.waiter.until(has_arrived, "target: outcome")
        if len(groups) > 1:
            groups.append(groups.pop(0))  # rotates, so that each group comes first in turn
