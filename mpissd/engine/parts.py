"""Makes what a job's rounds need: the limits of messages, and a draft's objects for each group."""

from collections.abc import Sequence

from mpissd.common.rounds import Source
from mpissd.common.trace import DraftLog
from mpissd.common.wait import Waiter
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.features.joined_growth import joining
from mpissd.engine.features.pool import GroupWaiter, SharedForwards
from mpissd.engine.features.ranks import RankCounts
from mpissd.engine.job import Job
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.round.draft import Drafter, DraftPolicy
from mpissd.engine.round.rows import DraftWorker


def link_shape(job: Job, group: int = 0) -> LinkShape:
    """Returns the size limits of the messages between target group `group` and its draft: the most
    sequences, drafted tokens, entries of a distribution, and prompt tokens."""
    workload = job.workload
    sampled = workload.samples and job.lookahead > 0
    return LinkShape(
        group,
        job.config.batch_size,
        job.num_nodes,
        # Greedy tokens have probability 1, so that their distributions are not sent.
        vocab=workload.proposal_width if sampled else 0,
        prompt_tokens=workload.prompt_tokens,
        forced=2 * job.verified + job.lookahead + 1,
        branches=job.fan_outs.branches if job.config.cache == "lead" else 0,
    )


def draft_workers(job: Job, stepper: Stepper) -> list[DraftWorker]:
    """Returns a draft worker, which fills and starts draft forwards, for each target group. With
    several groups, one forward may serve all of them."""
    config = job.config
    if config.groups == 1:
        return [joining(job, job.workload.draft_worker(stepper))]
    lanes = job.draft_options.lanes // config.groups
    shared = SharedForwards(stepper, config.groups, slots=config.batch_size, lanes=lanes)
    return [job.workload.draft_worker(part) for part in shared.groups]


def group_waiters(job: Job, waiter: Waiter) -> Sequence[Waiter]:
    """Returns, for each target group that a draft rank serves, the Waiter that its loop waits with.
    A single group uses `waiter`, the rank's own."""
    groups = job.config.groups
    return [waiter] if groups == 1 else [GroupWaiter(waiter.deadline_s) for _ in range(groups)]


def make_drafter(job: Job, worker: DraftWorker, waiter: Waiter) -> Drafter:
    """Returns the Drafter that runs a draft's rounds for one target group. worker: fills and starts
    its forwards. waiter: waits for them."""
    policy = DraftPolicy(
        lookahead=job.lookahead,
        fan_outs=job.fan_outs,
        backup=Source.FAST if job.config.backup == "fast" else Source.JIT,
        backup_lookahead=job.backup_lookahead,
        sampled=link_shape(job).sampled,
    )
    # In a tree a node's children have the first ranks, so that bonus tokens' ranks tell nothing.
    ranks = RankCounts() if job.workload.reports_outcomes and not job.tree_lanes else None
    log = DraftLog(kept=job.serving is None, ranks=ranks)
    return Drafter(worker, policy, job.config.batch_size, waiter, log)
