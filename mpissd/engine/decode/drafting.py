"""Makes the parts of a job's draft side: the messages' sizes, the worker and the drafter."""

from __future__ import annotations

from mpissd.common.rounds import Source
from mpissd.common.wait import Waiter
from mpissd.engine.backend.registry import unopened
from mpissd.engine.comm.link import LinkShape
from mpissd.engine.decode.controls import AdaptiveControls, Controls
from mpissd.engine.decode.draft import Drafter, DraftPolicy
from mpissd.engine.job import PRIOR_ALPHA, Job
from mpissd.engine.model.forwards import Forwards
from mpissd.engine.model.shared import SharedForwards
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.spec.adaptive import AdaptiveFanOut, OutcomeEstimator
from mpissd.engine.spec.control import BackupController
from mpissd.engine.spec.fanout import FanOuts
from mpissd.engine.spec.hits import DEFAULT_HIT_A, DEFAULT_HIT_R
from mpissd.engine.workload.tail import TailWorker
from mpissd.engine.workload.workers import DraftWorker

_REALLOT_ROUNDS = 50


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


def draft_worker(job: Job, stepper: Forwards) -> DraftWorker:
    """Returns the worker that drafts with the whole draft model."""
    worker = job.workload.draft_worker(stepper)
    worker.placement = job.placement(drafts=True)
    return TailWorker(worker) if job.is_tail else worker


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
    ahead: bool = True,
    kind: type[Drafter] = Drafter,
) -> Drafter:
    """Returns the drafter over `worker`; kind: its class.

    With ahead=False nothing is grown while the target verifies (the SD rounds of an SSD job).
    """
    policy = DraftPolicy(
        lookahead=job.lookahead,
        fan_outs=job.fan_outs if ahead else FanOuts(),
        backup=Source.FAST if job.config.backup == "fast" else Source.JIT,
        backup_lookahead=job.backup_lookahead,
        on_late=job.config.on_late,
        sampled=link_shape(job).sampled,
        # On a CPU the ranks share its memory, and cores where there are few.
        rests=job.serving is not None
        and job.config.drafts > 0
        and unopened(job.config.backend) == "numpy",
    )
    controls = _controls(job, policy) if ahead else None
    return kind(worker, policy, job.config.batch_size, waiter, controls)


def _controls(job: Job, policy: DraftPolicy) -> Controls:
    """Returns the controls of this job: adaptive ones if a flag asks for them, else fixed ones."""
    fixed = Controls(policy.fan_outs, policy.backup, policy.lookahead, on_late=policy.on_late)
    config, prior = job.config, (PRIOR_ALPHA,) * job.lookahead
    late, chooses = config.on_late == "auto", config.backup == "auto"
    reports = job.workload.reports_outcomes
    watched = reports or job.adaptive_budget is not None or late or chooses
    # A tail keeps candidates only after the last token, so no fan-out list could be learned.
    if job.is_tail or not watched:
        return fixed
    fan_out = None
    if job.adaptive_budget is not None:
        fan_out = AdaptiveFanOut(
            job.adaptive_budget,
            job.lookahead,
            _REALLOT_ROUNDS,
            prior_hazards=prior,
            prior_a=DEFAULT_HIT_A,
            prior_r=DEFAULT_HIT_R,
            minimum=1 if job.hit_law.p_hit else 0,
        )
    return AdaptiveControls(
        fixed,
        OutcomeEstimator(job.lookahead, prior) if fan_out is None else fan_out.estimator,
        lookahead=job.lookahead,
        fan_out=fan_out,
        backup=BackupController(job.lookahead, job.backup_lookahead) if chooses else None,
        late=late,
    )
