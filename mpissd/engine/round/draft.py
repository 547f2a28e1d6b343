"""The draft's part of a round: answers an outcome, then pre-speculates while the target verifies.

SD runs the same loop without growth: its cache is always empty, so every outcome is a miss. The
order of these steps is in round.py (draft_rounds).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import DivergedError
from mpissd.common.rounds import LIVE, Control, Event, Outcome, Source, Speculation
from mpissd.common.trace import DraftLedger, DraftPhase, Ledger, NullLedger
from mpissd.common.wait import Waiter
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.job import Job
from mpissd.engine.law.fanout import FanOuts
from mpissd.engine.model.stepper import SharedForwards, Stepper
from mpissd.engine.model.transformer.chained import ChainedForwards
from mpissd.engine.round.oracle import Branches, Rollout
from mpissd.engine.round.rows import DraftWorker, R, Steps, finish
from mpissd.engine.round.sequence import Batch

Key = tuple[int, int, int, int, int]
_UNKNOWN = float("nan")
# While rounds draft nothing, tokens to store wait until they are worth a forward: a sequence's
# tokens until they are more than LAG, opened prompts until PART rows are due.
LAG, PART = 7, 24


@dataclass(frozen=True)
class DraftPolicy:
    """How a draft answers misses and grows branches.

    The trunk is the committed tokens and the served ones. fan_outs: bonus candidates at each row of
    the trunk; if empty, no branches grow (SD).
    """

    lookahead: int
    fan_outs: FanOuts = field(default_factory=FanOuts)
    backup: Source = Source.JIT
    backup_lookahead: int = 0
    sampled: bool = False


class SpeculationCache:
    """The branches that were grown for predicted verification outcomes; a lane is one branch.

    A key is (round, request id, epoch, k, t*): the outcome v = (k, t*) of verifying round `round`
    (Kumar, Dao, May 2026, §3); in a tree k is the node where the accepted path ends. The cache
    holds the branches of one round only; a key of an older round never matches. branches: None if
    nothing was grown.
    """

    def __init__(self) -> None:
        self._lanes: dict[Key, int] = {}
        self.branches: Branches | None = None

    @property
    def growth(self) -> Rollout | None:
        """The tokens of the branches so far."""
        return None if self.branches is None else self.branches.rollout

    def clear(self) -> None:
        """Drops all branches: every outcome misses."""
        self._lanes, self.branches = {}, None

    def fill(self, batch: Batch, speculation: Speculation, branches: Branches) -> None:
        """Replaces the contents: each lane answers one outcome of this speculation."""
        self.branches, names = branches, batch.identity[:, :2].tolist()
        columns = branches.lanes.rows, branches.lanes.k, branches.rollout.first
        self._lanes = {
            (speculation.round, *names[row], k, first): lane
            for lane, (row, k, first) in enumerate(zip(*(c.tolist() for c in columns), strict=True))
        }

    def lookup(self, batch: Batch, outcome: Outcome) -> list[int | None]:
        """Returns the lane that answers each live sequence, or None for a miss."""
        if not self._lanes:
            return [None] * len(batch)
        get, round_ = self._lanes.get, outcome.round
        return [
            None if event else get((round_, name, epoch, k, token))
            for name, epoch, event, k, token in outcome.rows.tolist()
            if LIVE[event]
        ]

    def prune(self, lanes: Sequence[int | None]) -> Rollout | None:
        """Keeps only the lanes that hit, as `lookup` returns them; None: nothing hit."""
        rows = [row for row, lane in enumerate(lanes) if lane is not None]
        if not rows or self.growth is None:
            return None
        self.growth.keep([lane for lane in lanes if lane is not None], rows)
        return self.growth


class RankCounts:
    """Counts (candidates kept, rank) of the bonus tokens that follow the draft model's tokens.

    A rank is counted from 1; 0: the token was none of the candidates. A bonus token that replaces a
    rejected one is counted separately from one after a whole accepted speculation.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[bool, int, int]] = Counter()
        self._served: Speculation | None = None
        self.lookup: tuple[Outcome, Sequence[int | None], Branches | None, FanOuts] | None = None

    def count(self, speculation: Speculation) -> None:
        """Counts the outcomes of `lookup`, the last answer's (outcome, lane of each live sequence,
        branches, their fan-outs). Called when that answer has been sent."""
        served, self._served = self._served, speculation
        if served is None or self.lookup is None:
            return
        outcome, lanes, branches, fan_outs = self.lookup
        if branches is None:
            return
        # Committed sequences come first among the live ones.
        rows = np.flatnonzero(outcome.events[: len(served.rows)] == Event.COMMIT)
        columns = served.source[rows], served.num_draft[rows], outcome.num_accepted[rows]
        for lane, source, drafted, k in zip(lanes, *(c.tolist() for c in columns), strict=False):
            limit = fan_outs.behind(source)[k]
            if limit and source != Source.FAST:
                rank = 0 if lane is None else int(branches.lanes.place[lane]) + 1
                self._counts[k == drafted, limit, rank] += 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the row's key `learned`: the number of outcomes, and lists of [candidates kept,
        rank, count]."""
        counts = sorted(self._counts.items())
        return {
            "outcomes": self._counts.total(),
            "ranks_rejected": [[*at, n] for (end, *at), n in counts if not end],
            "ranks_all_accepted": [[*at, n] for (end, *at), n in counts if end],
        }


class Drafter:
    """One draft's state between rounds: the batch, and the branches that it grows.

    chained: the programs of rounds that the device decides (None: never); in such a round the
    target's worker launches this drafter's forwards. rows: by batch row, the distributions [V] of
    the last answer's uncertain tokens. caught_up_s: seconds spent on storing the tokens that the
    last answer's misses lacked in the cache. version: of the weights that draft; 0: as they were
    loaded. divergence: why newer weights must be dropped; None: they are sound.
    """

    # By round. t_draft_s: seconds in which a whole speculation was drafted, NaN if hits gave a part
    # of it. t_growth_s: seconds of a growth that ended, or NaN. num_jit: misses that the model
    # drafted. steps_ready: steps grown of the branches that hit.
    COLUMNS = ("round", "t_draft_s", "t_growth_s", "num_jit", "steps_ready")

    def __init__(
        self,
        worker: DraftWorker,
        policy: DraftPolicy,
        capacity: int,
        waiter: Waiter,
        rank_counts: RankCounts | None = None,
    ) -> None:
        """Takes the counter of the bonus tokens' ranks; None: they are not counted."""
        self.worker, self.policy, self.waiter = worker, policy, waiter
        self.rank_counts = rank_counts
        self.batch = worker.open_batch(capacity)
        self.cache = SpeculationCache()
        self.chained: ChainedForwards | None = None
        self.ledger: Ledger = DraftLedger()
        self._control = Control()  # decisions for the round that is answered now
        self._most = policy.lookahead  # tokens of its speculation
        self._due = 0  # rows of opened prompts that the target stored, and this draft did not
        self._fan_outs = policy.fan_outs  # fan-outs of the branches that grow
        self.rows: dict[int, list[NDArray[np.float32]]] = {}
        self.caught_up_s = 0.0
        self.version = 0
        self.divergence: str | None = None
        self._rounds: array[float] | None = array("d")  # rows of COLUMNS; None: not kept
        self.draft_s = self._growth_s = _UNKNOWN
        self._num_jit = self._steps_ready = 0

    def finish(self, steps: Steps[R]) -> R:
        """Runs all forwards of this drafter's `steps`; returns their result."""
        return finish(steps, lambda: self.worker.wait(self.waiter))

    def answer(self, outcome: Outcome) -> Speculation:
        """Returns the speculation that an outcome asks for (`answering`)."""
        return self.finish(self.answering(outcome))

    def answering(self, outcome: Outcome) -> Steps[Speculation]:
        """Makes the speculation that an outcome asks for: hits from the cache, misses by the
        backup.

        A miss ends the growth; a hit prunes it to the branch of the outcome.
        """
        mark, cache = self.ledger.mark, self.cache
        self.worker.enter(self.batch, self.batch.apply(outcome))
        mark(DraftPhase.COMMIT)
        self._control, most = outcome.control, self.policy.lookahead
        limit = self._control.lookahead
        self._most = most if limit is None else min(limit, most)
        own = [one.request.lookahead for one in self.batch.sequences]  # each sequence's limit
        lanes = cache.lookup(self.batch, outcome)
        if 0 in own:
            lanes = [lane if limit != 0 else None for lane, limit in zip(lanes, own, strict=True)]
        for row, tokens in self.batch.forced.items():  # a lane begins with these, too
            if len(tokens) >= self._most or self.worker.oracle.tree.num_lanes:
                lanes[row] = None
        mark(DraftPhase.LOOKUP)
        yield from self.settling()
        rollouts = []
        if self._most and (hits := cache.prune(lanes)) is not None:
            self._steps_ready = hits.steps
            rollouts.append(hits)
        misses = [row for row, lane in enumerate(lanes) if lane is None and own[row] != 0]
        self.caught_up_s, self._num_jit = 0.0, 0
        if misses and self._most:
            if self.policy.backup == Source.JIT:
                start = perf_counter()
                room = self.worker.stepper.most_rows - len(lanes) if self.batch.forced else 0
                spare = max(1, room // len(misses))  # a sequence's tokens for the first step
                if (yield from self._fill(misses, spare)):
                    self.caught_up_s = perf_counter() - start
                self._num_jit = len(misses)
            rollouts.append(self.worker.restart(self.batch, misses, self.policy.backup))
            if self.policy.backup == Source.FAST:  # these tokens cost no draft step
                rollouts[-1].steps = min(self.policy.backup_lookahead, self._most)
        if self.chained is not None and self.chained.is_on:
            (self.rollout,) = rollouts  # the target's worker launches its forwards
            self.rollout.steps = self.policy.lookahead
        else:  # grows hits to K and misses to K_b, in shared forwards
            start, backup = perf_counter(), min(self.policy.backup_lookahead, self._most)
            growth = cache.growth
            wanted = [(one, self._most if one is growth else backup) for one in rollouts]
            while short := [one for one, want in wanted if not self._is_done(one, want)]:
                self.worker.launch_step(self.batch, short)
                yield
                if not self._collect(short):
                    for rollout, want in wanted:
                        rollout.fill(want)
            drafting_s, only_jit = perf_counter() - start, self._num_jit == len(self.batch) > 0
            is_whole = only_jit and backup == self.policy.lookahead
            self.draft_s = drafting_s if is_whole else _UNKNOWN
        speculation = self._assembled(outcome.round + 1, len(lanes), rollouts)
        if self.rank_counts is not None:
            self.rank_counts.lookup = outcome, lanes, cache.branches, self._fan_outs
        cache.clear()
        mark(DraftPhase.SPECULATE)
        return speculation

    def _is_done(self, rollout: Rollout, want: int) -> bool:
        """Whether lanes have `want` levels, or grammars decide the rest of every lane, which then
        follows the bonus token without a draft."""
        left, lanes = want - rollout.steps, rollout.lanes or ()
        if left <= 0 or not lanes:
            return left <= 0
        return all(
            lane.grammar is not None and lane.grammar.decides(lane.context, left) for lane in lanes
        )

    @property
    def is_asked(self) -> bool:
        """Whether the lead waits for the answer; it skips one that can have no tokens."""
        return self._most > 0

    def _collect(self, rollouts: Sequence[Rollout]) -> bool:
        """Stores a step's tokens; returns False if newer weights give logits that are not finite.

        No token is drawn from such logits. The token served in its place has q = 1, so decoding
        stays lossless. Raises DivergedError if the weights come from the draft's own files.
        """
        try:
            self.worker.collect_step(rollouts)
        except DivergedError as error:
            if not self.version:
                raise
            self.divergence = str(error)
        if self.version and not self.worker.oracle.is_sound:
            self.divergence = "draft: a logit is not finite: its weights overflow"
        return self.divergence is None

    def _assembled(self, round_: int, count: int, rollouts: Sequence[Rollout]) -> Speculation:
        """Returns the speculation of a round for `count` sequences; rows in no rollout have source
        NONE."""
        head, sampled = Speculation.HEAD, self.policy.sampled
        most = self.worker.oracle.tree.ends[self.policy.lookahead]
        speculation = Speculation.empty(round_, count, most, sampled=sampled)
        speculation.version = self.version
        self.rows = {}
        for rollout in rollouts:
            is_hit = rollout is self.cache.growth
            source = Source.CACHE if is_hit else self.policy.backup
            nodes = rollout.tree.ends[min(rollout.steps, self._most)]
            left = dict[int, int]()  # by row, tokens after those that the grammar forced
            for lane, row in enumerate(rollout.rows.tolist() if is_hit else ()):
                if forced := self.batch.forced.get(row):
                    left[row] = max(0, nodes - len(forced)) * rollout.drop(lane, forced)
            # A slice if the rollout covers all rows in order.
            rows = slice(None) if len(rollout) == count else rollout.rows
            speculation.rows[rows, :head] = source, int(is_hit), nodes
            speculation.rows[rows, head : head + nodes] = rollout.tokens[:, :nodes]
            speculation.num_draft[list(left)] = list(left.values())
            ends = rollout.tree.ends
            for row in rollout.rows.tolist():
                if (limit := self.batch.sequences[row].request.lookahead) is not None:
                    most = ends[min(limit, len(ends) - 1)]
                    speculation.num_draft[row] = min(most, speculation.num_draft[row])
            if sampled:
                speculation.q[rows, :nodes] = 1.0 if rollout.q is None else rollout.q[:, :nodes]
                for lane, row in enumerate(rollout.rows.tolist()):
                    self.rows[row] = rollout.proposals(lane, int(speculation.num_draft[row]))
        return speculation

    def proposals(self) -> list[NDArray[np.float32]]:
        """Returns the distributions [V] of the last answer's uncertain tokens, by sequence."""
        every = [row for _, rows in sorted(self.rows.items()) for row in rows]
        return [np.asarray(row) for row in every]  # some are kept on a device

    def verification_started(self, speculation: Speculation) -> None:
        """Begins the round in which the target verifies this speculation."""
        self.batch.serve(speculation)
        if self.rank_counts is not None:
            self.rank_counts.count(speculation)

    def begin_growth(self, speculation: Speculation) -> Steps[bool]:
        """Runs the glue (scores the served trunk), makes the cache's keys; False: none to grow."""
        control, every = self._control, range(len(self.batch))
        grows = self.policy.fan_outs.branches > 0 and control.width != 0
        if not (grows and self._most and every):
            if not self._most:  # so that drafting can begin again
                yield from self._fill(every, LAG)
            return False
        ends, limit = self.worker.oracle.tree.ends, control.lookahead
        served = None if limit is None else ends[limit]
        fan_outs = self._fan_outs = self.policy.fan_outs.within(control.width, served)
        rows = len(every) * (ends[self.policy.lookahead] + 1)
        if not self.batch.forced or self.worker.is_short(self.batch, rows):
            yield from self._fill(every)  # others come with the glue
        self._growth_start = perf_counter()
        self.worker.launch_glue(self.batch, speculation)
        branches = self.worker.grow_ahead(self.batch, speculation, fan_outs, self._most)
        yield
        self.ledger.mark(DraftPhase.GLUE)
        if branches is None:
            branches = self.worker.oracle.branches(self.batch, speculation, fan_outs)
            self.worker.place_branches(self.batch, branches)
        else:
            self.worker.collect_step([])  # their first tokens
        self.cache.fill(self.batch, speculation, branches)
        self.ledger.mark(DraftPhase.KEYS)
        return True

    def _fill(self, rows: Sequence[int], spare: int = 0) -> Steps[int]:
        """Stores committed tokens that the cache of batch rows `rows` lacks; returns how many."""
        if stored := (yield from self.worker.filling(self.batch, rows, spare)):
            self.ledger.mark(DraftPhase.PREFILL)
        return stored

    @property
    def is_storing(self) -> bool:
        """Whether this round stores parts of opened prompts."""
        return self._control.prefill_rows > 0

    def store_opened(self) -> Steps[int]:
        """Stores a part of the opened prompts: as many rows as the target did, so that both are
        ready together. Returns how many were stored."""
        self._due += self._control.prefill_rows
        if not self._most and self._due < PART:
            return 0
        due, self._due = self._due, 0
        if stored := (yield from self.worker.store_opened(self.batch, due)):
            self.ledger.mark(DraftPhase.PREFILL)
        return stored

    @property
    def growing(self) -> bool:
        """Whether a further growth step would add tokens to the cache."""
        growth = self.cache.growth
        return growth is not None and len(growth) > 0 and growth.steps < self._most

    def grow_step(self) -> Steps[None]:
        """Adds one token to every branch."""
        assert self.cache.growth is not None, "grow_step() without growth"
        growing = [self.cache.growth]
        self.worker.launch_step(self.batch, growing)
        yield
        if not self._collect(growing):
            self.cache.clear()
        if not self.growing:
            self._growth_s = perf_counter() - self._growth_start
        self.ledger.mark(DraftPhase.GROW)

    def settling(self) -> Steps[None]:
        """Ends the growth steps that are under way, before any other forward."""
        while (growth := self.worker.growth) is not None and growth.left:
            yield
            self.worker.collect_step([])
            self.ledger.mark(DraftPhase.GROW)

    def change(self, version: int) -> None:
        """Drafts by the weights of this version from the next answer on.

        Called between two rounds, when the worker's model has changed. Drops the branches of the
        old weights, so that a speculation and its q come from one version.
        """
        self.cache.clear()
        self.worker.forget(self.batch)
        self.version, self.divergence = version, None

    def close_round(self, speculation: Speculation) -> None:
        """Records the round that `speculation` opened."""
        if self._rounds is not None:
            add = self._rounds.append  # five calls take less time than one extend()
            add(speculation.round)
            add(self.draft_s)
            add(self._growth_s)
            add(self._num_jit)
            add(self._steps_ready)
        self._growth_s, self._steps_ready = _UNKNOWN, 0
        self.ledger.close_round(speculation.round, DraftPhase.RECORD)

    def keep_no_rounds(self) -> None:
        """Keeps no record from now on: a server decodes for days."""
        self.ledger, self._rounds = NullLedger(DraftPhase), None

    def table(self, first_round: int, last_round: int) -> NDArray[Any]:
        """Returns the rows of COLUMNS for rounds first … last-1, [rounds, columns]."""
        table: NDArray[Any] = np.array(self._rounds or ()).reshape(-1, len(self.COLUMNS))
        return table[(table[:, 0] >= first_round) & (table[:, 0] < last_round)]


def link_shape(job: Job, group: int = 0) -> LinkShape:
    """Returns the sizes of the messages of this job, between a target group and its draft."""
    workload = job.workload
    sampled = workload.samples and job.lookahead > 0
    return LinkShape(
        group,
        job.config.batch_size,
        job.num_nodes,
        # Greedy tokens are certain, so no distributions are sent.
        vocab=workload.proposal_width if sampled else 0,
        prompt_tokens=workload.prompt_tokens,
    )


def draft_workers(job: Job, stepper: Stepper) -> list[DraftWorker]:
    """Returns a worker for each target group, which share the draft model's forwards."""
    config = job.config
    if config.groups == 1:
        return [job.workload.draft_worker(stepper)]
    lanes = job.draft_options.lanes // config.groups
    shared = SharedForwards(stepper, config.groups, slots=config.batch_size, lanes=lanes)
    return [job.workload.draft_worker(seat) for seat in shared.seats]


def make_drafter(job: Job, worker: DraftWorker, waiter: Waiter) -> Drafter:
    """Returns the drafter over `worker`."""
    policy = DraftPolicy(
        lookahead=job.lookahead,
        fan_outs=job.fan_outs,
        backup=Source.FAST if job.config.backup == "fast" else Source.JIT,
        backup_lookahead=job.backup_lookahead,
        sampled=link_shape(job).sampled,
    )
    # In a tree the children of a node take the first ranks.
    counts = RankCounts() if job.workload.reports_outcomes and not job.tree_lanes else None
    return Drafter(worker, policy, job.config.batch_size, waiter, counts)
