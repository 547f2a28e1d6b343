"""Makes the parts of a job's draft side: the messages' sizes, the worker and the drafter."""

from __future__ import annotations

from mpissd.common.rounds import Ints, Source
from mpissd.common.wait import Waiter
from mpissd.engine.backend.registry import unopened
from mpissd.engine.comm.link import LinkShape
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.decode.rank_counts import RankCounts
from mpissd.engine.decode.share import Share
from mpissd.engine.job import Job
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.shared import SharedForwards
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.spec.fanout import FanOuts, owners_of
from mpissd.engine.workload.workers import DraftWorker


def link_shape(job: Job, group: int = 0) -> LinkShape:
    """Returns the sizes of the messages of this job, between a target group and its drafts."""
    workload = job.workload
    sampled = workload.samples and job.lookahead > 0
    return LinkShape(
        group,
        job.config.batch_size,
        job.lookahead,
        # Greedy tokens are certain, so no distributions are sent.
        vocab=workload.proposal_width if sampled else 0,
        num_drafts=job.config.drafts,
        num_tokens=workload.vocab,
        prompt_tokens=workload.prompt_tokens,
    )


def draft_worker(job: Job, stepper: Forwards) -> DraftWorker:
    """Returns the worker that drafts with the whole draft model."""
    worker = job.workload.draft_worker(stepper)
    worker.placement = job.placement(drafts=True)
    return worker


def draft_workers(job: Job, stepper: Stepper) -> list[DraftWorker]:
    """Returns a worker for each target group, which share the draft model's forwards."""
    config = job.config
    if config.groups == 1:
        return [draft_worker(job, stepper)]
    lanes = job.draft_options.lanes // config.groups
    shared = SharedForwards(stepper, config.groups, slots=config.batch_size, lanes=lanes)
    return [draft_worker(job, seat) for seat in shared.seats]


def make_drafter(
    job: Job,
    worker: DraftWorker,
    waiter: Waiter,
    *,
    index: int = 0,
    ahead: bool = True,
    kind: type[Drafter] = Drafter,
) -> Drafter:
    """Returns draft `index` of D over `worker`; kind: its class.

    With ahead=False nothing is grown while the target verifies (the SD rounds of an SSD job).
    """
    policy = DraftPolicy(
        lookahead=job.lookahead,
        fan_outs=job.fan_outs if ahead else FanOuts(),
        backup=Source.FAST if job.config.backup == "fast" else Source.JIT,
        backup_lookahead=job.backup_lookahead,
        sampled=link_shape(job).sampled,
        share=_share(job, index),
        # On a CPU the ranks share its memory, and cores where there are few.
        rests=job.serving is not None
        and job.config.drafts == 1
        and unopened(job.config.backend) == "numpy",
    )
    counts = RankCounts() if ahead and job.workload.reports_outcomes else None
    return kind(worker, policy, job.config.batch_size, waiter, counts)


def _share(job: Job, index: int) -> Share:
    """Returns this draft's share among several; a draft on the lead is the only one."""
    if job.config.drafts < 2:
        return Share()
    weights = job.acceptance[Source.CACHE].probabilities()
    powers = job.hit_law.powers(job.lookahead, job.lookahead)

    def owners(fan_out: tuple[int, ...]) -> Ints:
        return owners_of(fan_out, job.config.drafts, weights, *powers)

    return Share(index, job.config.drafts, owners)
