"""Makes the parts of a job's rounds: the limits of messages, and the drafters of target groups."""

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
    """Returns the limits of this job's messages between target group `group` and its draft."""
    workload = job.workload
    sampled = workload.samples and job.lookahead > 0
    return LinkShape(
        group,
        job.config.batch_size,
        job.num_nodes,
        # The distributions of greedy tokens are not sent, because such tokens are certain.
        vocab=workload.proposal_width if sampled else 0,
        prompt_tokens=workload.prompt_tokens,
    )


def draft_workers(job: Job, stepper: Stepper) -> list[DraftWorker]:
    """Returns a draft worker for each target group; all share the forwards of the draft model."""
    config = job.config
    if config.groups == 1:
        return [joining(job, job.workload.draft_worker(stepper))]
    lanes = job.draft_options.lanes // config.groups
    shared = SharedForwards(stepper, config.groups, slots=config.batch_size, lanes=lanes)
    return [job.workload.draft_worker(part) for part in shared.groups]


def group_waiters(job: Job, waiter: Waiter) -> Sequence[Waiter]:
    """Returns a Waiter, which waits for messages, for each target group that a draft serves.
    waiter: the rank's own, used if there is one group."""
    groups = job.config.groups
    return [waiter] if groups == 1 else [GroupWaiter(waiter.deadline_s) for _ in range(groups)]


def make_drafter(job: Job, worker: DraftWorker, waiter: Waiter) -> Drafter:
    """Returns a Drafter, which runs the rounds of a draft for one target group with `worker`."""
    policy = DraftPolicy(
        lookahead=job.lookahead,
        fan_outs=job.fan_outs,
        backup=Source.FAST if job.config.backup == "fast" else Source.JIT,
        backup_lookahead=job.backup_lookahead,
        sampled=link_shape(job).sampled,
    )
    # Bonus tokens' ranks are counted in chains only: a tree node's children take the first ranks.
    ranks = RankCounts() if job.workload.reports_outcomes and not job.tree_lanes else None
    log = DraftLog(kept=job.serving is None, ranks=ranks)
    return Drafter(worker, policy, job.config.batch_size, waiter, log)
