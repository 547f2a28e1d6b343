"""The draft's round: answers an outcome of the target's verification with drafted tokens, then
drafts ahead for the next outcome.

An outcome is (k, t*) of each sequence: the number of accepted tokens, and the bonus token after
them. `serve` is the loop in the order of Saguaro's algorithm, and `Drafter` has its steps. SD
drafts nothing ahead: its speculation cache stays empty, so that every outcome is a miss. A draft
for several target groups runs the loop in one thread for each group (features.pool).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import DivergedError, ProtocolError
from mpissd.common.rounds import Control, Outcome, ReadyBranches, Source, Speculation
from mpissd.common.trace import UNKNOWN, DraftLog, DraftPhase
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.round.branches import Branches, Distribution, Index, SpeculationCache
from mpissd.engine.round.rows import DraftWorker
from mpissd.engine.round.sequence import LiveSequence

# While nothing is drafted, a sequence's tokens are stored once more than so many are missing.
STORE_AFTER = 7
# While nothing is drafted, parts of prompts are stored once at least so many tokens are due.
STORE_ROWS = 24


def serve(link: DraftEnd, drafter: Drafter, refresh: Callable[[], bool] | None = None) -> None:
    """Drafts for one target group, round by round, until the target's rank 0 stops the loop. The
    loop polls `link` for the next outcome between two draft forwards, so that an outcome waits for
    at most one forward, or two if the GPU starts forwards by itself. drafter: has the steps.
    refresh: called after a round to do some other work, such as loading newer weights; returns
    whether it did any."""
    log = drafter.log
    log.ledger.restart()
    for round_ in count(-1):  # The first outcome, of round -1, only admits sequences.
        outcome, stop = link.outcome(round_)
        log.mark(DraftPhase.WAIT)
        if stop:
            drafter.leave()
            link.end_branches()
            return
        # Answers by the branch grown for the outcome (a hit), or after a miss by a new draft.
        answer = drafter.answer(outcome)
        if drafter.levels:  # With K = 0 the target waits for no drafted tokens.
            if outcome.taken is None:
                link.send_speculation(answer)
            if rows := proposals(answer):
                link.send_proposals(answer.round, rows)
        log.mark(DraftPhase.SEND)
        # While the target verifies the answer, drafts ahead for its possible outcomes.
        drafter.start_round(answer)
        drafter.grow(answer, link.outcome_arrived, link.send_branches if link.pushes else None)
        log.close_round(answer.round)
        while refresh is not None and refresh() and not link.outcome_arrived():
            continue


def proposals(speculation: Speculation) -> list[NDArray[np.float32]]:
    """Returns the distribution over the vocabulary of each token that was sampled with a
    probability q < 1, sequence after sequence. The target needs it to judge the token."""
    by_row = sorted(speculation.drawn_from.items())
    return [np.asarray(drawn_from) for _, rows in by_row for drawn_from in rows]


@dataclass(frozen=True)
class DraftPolicy:
    """How a draft answers misses and grows branches.

    lookahead: K, the most tokens (in a tree: levels) of a draft. fan_outs: how many bonus
    candidates get a branch after each number of accepted tokens; if empty, no branches are grown
    (SD). backup: what drafts after a cache miss. backup_lookahead: the number of tokens that the
    backup drafts. sampled: whether a draft is sent with its tokens' probabilities.
    """

    lookahead: int
    fan_outs: FanOuts = field(default_factory=FanOuts)
    backup: Source = Source.JIT
    backup_lookahead: int = 0
    sampled: bool = False


class AnswerPart(NamedTuple):
    """The drafts that one source gives in an answer: the cache for hits, the backup for misses.
    levels: the number of levels that these branches must have when they are sent."""

    branches: Branches
    source: Source
    levels: int


def write(drafts: Speculation, rows: Index | slice, part: AnswerPart, nodes: int) -> None:
    """Writes the first `nodes` tokens of the branches of `part` into `rows` of a speculation."""
    branches = part.branches
    drafts.rows[rows, : Speculation.HEAD] = part.source, int(part.source == Source.CACHE), nodes
    drafts.tokens[rows, :nodes] = branches.tokens[:, :nodes]
    if drafts.sampled:
        drafts.q[rows, :nodes] = 1.0 if branches.q is None else branches.q[:, :nodes]


class Drafter:
    """Runs the steps of the draft's rounds for one target group.

    batch: the live sequences. cache: the branches grown for possible outcomes. version: which
    weights drafted, 0 for the first. divergence: why newer weights must be dropped, or None.
    """

    def __init__(
        self,
        worker: DraftWorker,
        policy: DraftPolicy,
        capacity: int,
        waiter: Waiter,
        log: DraftLog | None = None,
    ) -> None:
        """Opens an empty batch. worker: runs the forwards. policy: what and how much is drafted.
        capacity: the most live sequences. waiter: waits for forwards. log: records the rounds."""
        self.worker = worker
        self.policy = policy
        self.waiter = waiter
        self.log = log or DraftLog()
        self.batch = worker.open_batch(capacity)
        self.cache = SpeculationCache()
        self._pushed: SpeculationCache | None = None  # the branches that rank 0 has
        self._pushed_version = 0
        self.version = 0
        self.divergence: str | None = None
        self._control = Control()  # limits of the coming round, set by the target's rank 0
        self._growth_start = 0.0  # time.perf_counter() when the branches began to grow
        self._due = 0  # how many tokens of prompts the target has stored and the draft has not

    @property
    def levels(self) -> int:
        """The most levels (tokens of a chain) to draft in the coming round: K of the job, or fewer
        if the target's rank 0 has limited this round."""
        limit = self._control.lookahead
        return self.policy.lookahead if limit is None else min(limit, self.policy.lookahead)

    # ── answer ──

    def answer(self, outcome: Outcome) -> Speculation:
        """Returns the drafted tokens for the round after `outcome`: for each sequence the branch
        that was hit, completed if necessary, or after a miss a new draft by the backup."""
        self.take(outcome)
        if outcome.taken is not None:
            self._return_to_pushed(outcome)
        elif (pushed := self._pushed) and None not in pushed.lookup(outcome, len(self.batch)):
            self.cache = pushed  # rank 0 may have served them, also after a change of weights
        found = self._resolved(outcome)
        if outcome.taken is not None and None in found:
            raise ProtocolError(
                f"round {outcome.round}: rank 0 took branches for {outcome.rows[:, :5].tolist()} "
                "(id, epoch, event, k, token), which the draft has not sent"
            )
        parts = self._completed(found)
        speculation = self.assembled(outcome.round + 1, parts)
        if self.cache is self._pushed:
            speculation.version = self._pushed_version
        self.cache.clear()
        self._pushed = None
        self.log.mark(DraftPhase.SPECULATE)
        return speculation

    def _return_to_pushed(self, outcome: Outcome) -> None:
        """Returns to the branches that rank 0 has, if newer weights were loaded since they were
        sent. Raises ProtocolError if rank 0 names another version than theirs."""
        if self._pushed is None or self._pushed_version != outcome.taken:
            sent = "none" if self._pushed is None else f"version {self._pushed_version}"
            raise ProtocolError(
                f"round {outcome.round}: rank 0 took branches of version {outcome.taken}, sent "
                f"were {sent}"
            )
        self.cache = self._pushed

    def take(self, outcome: Outcome) -> None:
        """Applies an outcome to the batch, whose sequences get their accepted and bonus tokens."""
        self.worker.enter(self.batch, self.batch.apply(outcome))
        self._control = outcome.control
        self.log.mark(DraftPhase.COMMIT)

    def _resolved(self, outcome: Outcome) -> list[int | None]:
        """Looks an outcome up in the speculation cache. Returns, by batch row, the index of the
        branch that was hit, or None (a miss). Waits for draft forwards that still run."""
        found = self.cache.lookup(outcome, len(self.batch))
        for row, sequence in enumerate(self.batch.sequences):
            if sequence.request.sampling.lookahead == 0:
                found[row] = None
        for row, tokens in self.batch.forced.items():  # tokens that a grammar forces after t*
            if len(tokens) >= self.levels or not self.batch.shape.is_chain:
                found[row] = None
        if self.log.ranks is not None:
            self.log.ranks.looked_up(outcome, found, self.cache)
        self.log.mark(DraftPhase.LOOKUP)
        self._settle()
        return found

    def _completed(self, found: Sequence[int | None]) -> list[AnswerPart]:
        """Returns the branches of an answer after growing them to their full length: K levels after
        a hit, backup_lookahead after a miss. Hits and misses share forwards. found: by batch row,
        the index of the branch that was hit, or None (a miss)."""
        parts = list[AnswerPart]()
        log = self.log
        log.num_jit = 0
        log.stored_s = 0.0
        if self.levels:
            if (hits := self.cache.keep(found)) is not None:
                log.steps_ready = hits.steps
                parts.append(AnswerPart(hits, Source.CACHE, self.levels))
            sequences = self.batch.sequences
            if misses := [
                row
                for row, branch in enumerate(found)
                if branch is None and sequences[row].request.sampling.lookahead != 0
            ]:
                parts.append(self.restarted(misses))
        start = perf_counter()
        while short := [part.branches for part in parts if not self._is_complete(part)]:
            self._step(short)
            if self.divergence is not None:
                for part in parts:
                    part.branches.pad(part.levels)
        log.draft_s = perf_counter() - start if self._is_whole_draft(parts) else UNKNOWN
        return parts

    def _is_whole_draft(self, parts: Sequence[AnswerPart]) -> bool:
        """Returns whether the draft model has just drafted all K tokens for every sequence."""
        branches, source, levels = parts[0] if parts else (None, Source.NONE, 0)
        is_whole = source == Source.JIT and levels == self.policy.lookahead
        return is_whole and branches is not None and len(branches) == len(self.batch)

    def restarted(self, rows: Sequence[int]) -> AnswerPart:
        """Returns new branches for batch rows `rows`, whose outcomes missed the speculation cache.
        They have their tokens already if the fast backup drafts, else none."""
        policy = self.policy
        levels = min(policy.backup_lookahead, self.levels)
        if policy.backup == Source.JIT:
            start = perf_counter()
            forced = self.batch.forced
            masks = len(self.worker.masks)
            a_step = len(self.batch) * (1 + masks)
            room = self.worker.stepper.most_rows - a_step if forced else 0
            spare = max(1 + masks, room // len(rows))  # lacking tokens that the step itself stores
            stored = self._catch_up(rows, spare)
            self.log.num_jit = len(rows)
            self.log.stored_s = perf_counter() - start if stored else 0.0
        branches = self.worker.oracle.restart(self.batch, rows, policy.backup)
        if policy.backup == Source.FAST:  # these tokens cost no draft step
            branches.advance(levels)
        return AnswerPart(branches, policy.backup, levels)

    def _is_complete(self, part: AnswerPart) -> bool:
        """Returns whether the branches of `part` need no further forward: they have all levels, or
        grammars allow only one token at each of the remaining places."""
        lacking = part.levels - part.branches.steps
        return lacking <= 0 or self.worker.oracle.is_decided(part.branches, lacking)

    def assembled(self, round_: int, parts: Sequence[AnswerPart]) -> Speculation:
        """Returns the speculation (drafted tokens of all sequences) of round `round_`, made from
        the branches of `parts`. Sequences in no part get no tokens."""
        count = len(self.batch)
        sampled = self.policy.sampled
        ends = self.batch.shape.ends
        drawn_from = dict[int, Sequence[Distribution]]()
        table = np.zeros((count, Speculation.width(ends[self.policy.lookahead], sampled)), np.int32)
        speculation = Speculation(
            round_, table, sampled=sampled, version=self.version, drawn_from=drawn_from
        )
        for part in parts:
            branches = part.branches
            nodes = ends[min(branches.steps, self.levels)]
            numbers = branches.rows.tolist()
            is_hit = part.source == Source.CACHE
            after_forced = self._skip_forced(branches, nodes) if is_hit else {}
            # A slice, which is faster, if the branches cover all rows in order.
            rows = slice(None) if len(branches) == count else branches.rows
            write(speculation, rows, part, nodes)
            for row in numbers:
                most = self._most(self.batch.sequences[row], after_forced.get(row, nodes))
                if most != nodes:
                    speculation.num_draft[row] = most
            if sampled:
                for branch, row in enumerate(numbers):
                    kept = int(speculation.num_draft[row])
                    drawn_from[row] = branches.distributions(branch, kept)
        return speculation

    def _most(self, sequence: LiveSequence, nodes: int) -> int:
        """Returns how many of `nodes` drafted tokens a sequence's request wants."""
        limit = sequence.request.sampling.lookahead
        ends = self.batch.shape.ends
        return nodes if limit is None else min(nodes, ends[min(limit, len(ends) - 1)])

    def _skip_forced(self, branches: Branches, nodes: int) -> Mapping[int, int]:
        """Drops the first tokens of branches that were hit, where grammars have committed them
        meanwhile.

        Returns, by batch row, how many of a branch's `nodes` tokens remain: 0 if the branch does
        not begin with the committed tokens. It still counts as a hit, since the outcome was in the
        cache.
        """
        left = dict[int, int]()
        for branch, row in enumerate(branches.rows.tolist() if self.batch.forced else ()):
            if forced := self.batch.forced.get(row):
                is_same = branches.skip(branch, forced)
                left[row] = max(0, nodes - len(forced)) * is_same
        return left

    # ── speculate ahead ──

    def start_round(self, speculation: Speculation) -> None:
        """Records in the batch that the target now verifies the tokens of `speculation`."""
        self.batch.serve(speculation)
        if self.log.ranks is not None:
            self.log.ranks.served(speculation)

    def grow(
        self,
        speculation: Speculation,
        is_over: Callable[[], bool],
        push: Callable[[ReadyBranches], None] | None = None,
    ) -> None:
        """Grows branches for possible outcomes of verifying `speculation`, then stores parts of
        prompts. Ends when nothing is left to do, or when is_over() returns True. push: sends the
        branches to the target's rank 0 once they are whole (None: it has no cache)."""
        if self.begin_growth(speculation):
            while self.growing and not is_over():
                self.grow_step()
            if push is not None and not self.growing and (ready := self._ready(speculation.round)):
                push(ready)
                self._pushed = self.cache
                self._pushed_version = ready.version
                self.log.mark(DraftPhase.SEND)
        if self._control.prefill_rows and not is_over():
            self._store_opened()

    def begin_growth(self, speculation: Speculation) -> bool:
        """Runs the draft's forward over the tokens that the target verifies, chooses candidates for
        the bonus token, and fills the cache with a branch for each candidate, which `grow_step`
        extends. Returns False if no branches are wanted in this round."""
        policy = self.policy
        rows = range(len(self.batch))
        grows = policy.fan_outs.branches > 0 and self._control.width != 0
        if not (grows and self.levels and rows):
            if not self.levels:  # keeps the KV cache ready for later drafts
                self._catch_up(rows, STORE_AFTER)
            return False
        ends = self.batch.shape.ends
        served = None if self._control.lookahead is None else ends[self.levels]
        fan_outs = policy.fan_outs.within(self._control.width, served)
        trunk_rows = len(rows) * (ends[policy.lookahead] + 1)
        if not self.batch.forced or self.worker.is_short(self.batch, trunk_rows):
            self._catch_up(rows)  # else the scoring forward itself stores lacking tokens
        self._growth_start = perf_counter()
        self.worker.launch_scoring(self.batch, speculation, fan_outs, self.levels)
        self.worker.wait(self.waiter)
        self.log.mark(DraftPhase.GLUE)
        branches = self.worker.scored(self.batch, speculation, fan_outs)
        self.cache.fill(self.batch.identity, speculation, branches, fan_outs)
        self.log.mark(DraftPhase.KEYS)
        return True

    @property
    def growing(self) -> bool:
        """Whether the cache has branches that further forwards can extend by a level."""
        branches = self.cache.branches
        return branches is not None and len(branches) > 0 and branches.steps < self.levels

    def grow_step(self) -> None:
        """Adds one level to every branch in the cache by one forward."""
        assert self.cache.branches is not None, "grow_step() without growth"
        self._step([self.cache.branches])
        if self.divergence is not None:
            self.cache.clear()
        if not self.growing:
            self.log.growth_s = perf_counter() - self._growth_start
        self.log.mark(DraftPhase.GROW)

    def _ready(self, round_: int) -> ReadyBranches | None:
        """Returns the cache's branches, which are whole, as they are served after a hit; None if it
        has none. round_: the round whose outcomes they were grown for."""
        branches = self.cache.branches
        if branches is None or not len(branches):
            return None
        key = ReadyBranches.KEY
        nodes = self.batch.shape.ends[self.levels]
        width = Speculation.width(self.batch.shape.ends[self.policy.lookahead], self.policy.sampled)
        table = np.zeros((len(branches), key + width), np.int32)
        table[:, :2] = self.batch.identity[branches.rows, :2]
        table[:, 2] = branches.nodes
        table[:, 3] = branches.first
        drafts = Speculation(round_, table[:, key:], sampled=self.policy.sampled)
        write(drafts, slice(None), AnswerPart(branches, Source.CACHE, self.levels), nodes)
        most = [self._most(sequence, nodes) for sequence in self.batch.sequences]
        drafts.num_draft[...] = np.array(most)[branches.rows]
        served = table[drafts.num_draft > 0]
        return ReadyBranches(round_, served, self.version, self._control.lookahead)

    def _store_opened(self) -> None:
        """Stores K and V of as many prompt tokens as the target stores in this round (chunked
        prefill), so that a sequence can join as soon as the target has stored its prompt."""
        self._due += self._control.prefill_rows
        if self.levels or self._due >= STORE_ROWS:
            rows = self._due
            self._due = 0
            if self.worker.store_opened(self.batch, rows, self.waiter):
                self.log.mark(DraftPhase.PREFILL)

    def leave(self) -> None:
        """Frees the KV caches of all sequences when the loop ends."""
        self._settle()
        self.worker.leave(self.batch)

    # ── forwards ──

    def _catch_up(self, rows: Sequence[int], spare: int = 0) -> int:
        """Stores committed tokens as DraftWorker.catch_up does, and returns their number."""
        if stored := self.worker.catch_up(self.batch, rows, self.waiter, spare):
            self.log.mark(DraftPhase.PREFILL)
        return stored

    def _step(self, growing: Sequence[Branches]) -> None:
        """Grows branches by one level in one forward, and checks its logits. If newer weights give
        logits that are not finite, sets `divergence`. No token is drawn from these logits: a filler
        with q = 1 takes its place, so that decoding stays lossless. Raises DivergedError if the
        weights loaded at the start give logits that are not finite."""
        self.worker.launch_step(self.batch, growing)
        self.worker.wait(self.waiter)
        try:
            self.worker.collect_step(growing)
        except DivergedError as error:
            if not self.version:
                raise
            self.divergence = str(error)
        if self.version and not self.worker.oracle.is_sound:
            self.divergence = "draft: a logit is not finite: its weights overflow"

    def _settle(self) -> None:
        """Waits for draft forwards that the GPU has started by itself, if there are any."""
        if self.worker.settle(self.waiter):
            self.log.mark(DraftPhase.GROW)

    def change(self, version: int) -> None:
        """Called between two rounds, after other weights were loaded. Drops the branches of the old
        weights, so that the tokens of a draft and their q come from one version."""
        self.cache = SpeculationCache()  # rank 0 may have taken the branches of the other
        self.worker.forget(self.batch)
        self.version = version
        self.divergence = None
