"""Checks and lists the configurations of a sweep, without starting MPI."""

from collections.abc import Set as AbstractSet

from mpissd.common.errors import ConfigError
from mpissd.common.exclusions import DEVICES, refuse
from mpissd.common.output import check_output
from mpissd.engine.backend.profile import role_profiles
from mpissd.engine.comm.topology import check_world, launcher_rank, launcher_size
from mpissd.engine.job import resolve_unopened
from mpissd.engine.oracle.logits import check_prompts
from mpissd.lab.sweep.plan import Point, SweepConfig, SweepPlan, planned, read_grid


def check_sweep(
    config: SweepConfig, given: AbstractSet[str], num_ranks: int | None = None
) -> SweepPlan:
    """Checks the flags of the command `sweep` before MPI starts; returns the configurations to
    measure, in order. given: names of the flags on the command line. num_ranks: number of MPI ranks
    (None: by the flag world_size or the launcher). Raises ConfigError for a wrong flag or grid, a
    flag that is in both, too few ranks, or if no configuration can be measured."""
    # num_drafts may be in the grid and on the command line, where it is the grid's upper limit.
    twice = {name for block in read_grid(str(config.grid)) for name in block} - {"num_drafts"}
    if both := given & twice:
        raise ConfigError(f"{min(both)}: in the grid and on the command line: say it once")
    run = config.run
    refuse(DEVICES, config=run, backend=run.backend)
    plan = planned(config)
    tp = _tp(config, plan, num_ranks)
    if run.backend == "emulated":
        role_profiles(run.device, run.draft_device)[0].all_reduce_s(tp, 1)
    reasons = [why_not(point, tp) for point in plan.points]
    if all(reasons):
        raise ConfigError(f"none of {len(reasons)} configurations can be measured: {reasons[0]}")
    check_output(run.out)
    return plan


def _tp(config: SweepConfig, plan: SweepPlan, num_ranks: int | None = None) -> int:
    size = num_ranks or config.run.world_size or launcher_size()
    return 1 if size is None else check_world(size, plan.num_drafts, config.run.groups)


def why_not(point: Point, tp: int) -> str | None:
    """Returns why a configuration cannot be measured on T = tp target ranks; None if it can, by its
    flags and prompts. The machine is not checked."""
    if point.config is None:
        return point.error
    try:
        job = resolve_unopened(point.config, tp)
        if launcher_rank() == 0:
            check_prompts(job)
    except ConfigError as error:
        return str(error)
    return None


def list_plan(config: SweepConfig) -> None:
    """Prints each configuration of a sweep and, if it cannot be measured, the reason."""
    plan = planned(config)
    tp = _tp(config, plan)
    count = len(plan.points)
    for number, point in enumerate(plan.points, 1):
        reason = why_not(point, tp)
        print(f"{number:>5}  {point.digest}  {point}" + (f"  FAILS: {reason}" if reason else ""))
    total = f"{count} configurations x {plan.repeats} repeats = {count * plan.repeats} measurements"
    print(f"{total} on T={tp}, D={plan.num_drafts}", flush=True)
