"""The command `doctor`: prints a table of what may be wrong; exit code 0 where a run works, else 2.

    mpissd doctor --tp=2 --mode=ssd …              starts the ranks itself, with a deadline
    mpirun -np 3 python -m mpi4py -m mpissd doctor --mode=ssd …       is one of the ranks

launch/local.sh calls every command with --dry_run first. The doctor then prints its table, on
stderr, only if it finds a fault before any rank has started.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.comm.topology import launcher_size
from mpissd.ops.doctor.config import DoctorConfig
from mpissd.ops.doctor.facts import Asked, Facts, LaunchFacts
from mpissd.ops.doctor.finding import BAD
from mpissd.ops.doctor.judge import judge
from mpissd.ops.doctor.launcher import read_launch
from mpissd.ops.doctor.ranks import Seen, examine_rank
from mpissd.ops.doctor.table import render
from mpissd.ops.doctor.trial import MARK, try_ranks

Check = Callable[[RunConfig], None]


def doctor(config: DoctorConfig, check: Check) -> int:
    """Prints the table once; returns 0 where a run with these flags works, else 2.

    check: raises ConfigError for what `run` refuses before MPI starts.
    """
    run = config.run
    size = run.world_size or (None if config.tp else launcher_size())
    if run.learners:
        if size is not None:
            raise ConfigError("learners=1 with doctor as one of the ranks: allowed: make doctor")
        return doctor(replace(config, run=replace(run, learners=0)), _with_trainer(check))
    if config.json or (size is not None and not run.dry_run):
        return _as_rank(config, size or 1, check)
    num_ranks = size or run.groups * (config.tp or 1) + run.drafts
    launch = read_launch(run, num_ranks, False, check)
    findings = judge(Facts(_asked(run, num_ranks), launch))
    startable = all(finding.verdict != BAD for finding in findings)
    if run.dry_run and startable:
        return 0
    if not startable:
        return _say(run, launch, Seen())
    seen, problem = try_ranks(config, launch.mpirun, launch.mpirun_path, num_ranks)
    return _say(run, replace(launch, trial_error=problem), seen, tried=True)


def _with_trainer(check: Check) -> Check:
    """Returns a check that also asks for what a learner's trainer needs.

    The other ranks are examined without the learner, which has no part in what they open.
    """

    def checked(run: RunConfig) -> None:
        from mpissd.online.process import check_trainer

        check_trainer()
        check(run)

    return checked


def _as_rank(config: DoctorConfig, size: int, check: Check) -> int:
    """Examines as one of the ranks; rank 0 prints the facts as JSON (--json) or the table."""
    if config.json:

        def tell(seen: Seen) -> int:
            sys.stdout.write(f"{MARK}{seen.to_json()}\n")
            sys.stdout.flush()
            return 0

        return examine_rank(config.run, check, tell)

    def say(seen: Seen) -> int:
        return _say(config.run, read_launch(config.run, size, True, check), seen, tried=True)

    return examine_rank(config.run, check, say)


def _say(run: RunConfig, launch: LaunchFacts, seen: Seen, tried: bool = False) -> int:
    asked = _asked(run, launch.num_ranks)
    facts = Facts(asked, launch, seen.ranks, seen.hosts, seen.session, tried)
    findings = judge(facts)
    stream = sys.stderr if run.dry_run else sys.stdout
    stream.write(render(findings))
    stream.flush()
    return 2 if any(finding.verdict == BAD for finding in findings) else 0


def _asked(run: RunConfig, num_ranks: int) -> Asked:
    return Asked(
        mode=run.mode,
        backend=run.backend,
        pair=run.pair or run.target,
        tp=(num_ranks - run.drafts) // run.groups,
        drafts=run.drafts,
        all_reduce=run.all_reduce,
        groups=run.groups,
    )
