"""Makes the parts of a job's draft side: the messages' sizes, the worker and the drafter."""

from __future__ import annotations

from mpissd.common.rounds import Source
from mpissd.common.wait import Waiter
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.rank_counts import RankCounts
from mpissd.engine.job import Job
from mpissd.engine.model.shared import SharedForwards
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.workload.workers import DraftWorker


def link_shape(job: Job, group: int = 0) -> LinkShape:
    """Returns the sizes of the messages of this job, between a target group and its draft."""
    workload = job.workload
    sampled = workload.samples and job.lookahead > 0
    return LinkShape(
        group,
        job.config.batch_size,
        job.lookahead,
        # Greedy tokens are certain, so no distributions are sent.
        vocab=workload.proposal_width if sampled else 0,
        num_tokens=workload.vocab,
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
    counts = RankCounts() if job.workload.reports_outcomes else None
    return Drafter(worker, policy, job.config.batch_size, waiter, counts)
