"""Makes the parts of a job's rounds: the messages' sizes, and the drafters of its target groups."""

from __future__ import annotations

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
        return [joining(job, job.workload.draft_worker(stepper))]
    lanes = job.draft_options.lanes // config.groups
    shared = SharedForwards(stepper, config.groups, slots=config.batch_size, lanes=lanes)
    return [job.workload.draft_worker(part) for part in shared.groups]


def group_waiters(job: Job, waiter: Waiter) -> Sequence[Waiter]:
    """Returns how the rounds of each target group wait on a draft; waiter: how its rank does."""
    groups = job.config.groups
    return [waiter] if groups == 1 else [GroupWaiter(waiter.deadline_s) for _ in range(groups)]


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
    ranks = RankCounts() if job.workload.reports_outcomes and not job.tree_lanes else None
    log = DraftLog(kept=job.serving is None, ranks=ranks)
    return Drafter(worker, policy, job.config.batch_size, waiter, log)
