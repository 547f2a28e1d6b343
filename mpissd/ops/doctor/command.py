"""The command `doctor`: prints a table of possible faults; exit code 0 if a run works, 2 if not.

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
from mpissd.ops.doctor.checks import BAD, Facts, judge, render
from mpissd.ops.doctor.config import DoctorConfig
from mpissd.ops.doctor.machine import read_machine
from mpissd.ops.doctor.ranks import MARK, Seen, examine_rank, try_ranks

Check = Callable[[RunConfig], None]


def doctor(config: DoctorConfig, check: Check) -> int:
    """Prints the table once; returns 0 if a run with these flags works, 2 if not.

    check: raises ConfigError for flags that `run` refuses before MPI starts.
    """
    run = config.run
    size = run.world_size or (None if config.tp else launcher_size())
    if run.learners:  # a learner opens no part of the session
        if size is not None:
            raise ConfigError("learners=1 with doctor as one of the ranks: allowed: make doctor")
        return doctor(replace(config, run=replace(run, learners=0)), _with_trainer(check))
    if config.json:
        return examine_rank(run, check, _print_json)
    if size is not None and not run.dry_run:
        return _as_rank(run, size, check)
    num_ranks = size or run.groups * (config.tp or 1) + run.drafts
    machine = read_machine(run, num_ranks, False, check)
    startable = all(finding.verdict != BAD for finding in judge(Facts(run, machine)))
    if run.dry_run and startable:
        return 0
    if not startable:
        return _print_table(Facts(run, machine))
    seen, problem = try_ranks(run, num_ranks)
    return _print_table(Facts(run, machine, seen.ranks, seen.session, True, problem))


def _with_trainer(check: Check) -> Check:
    """Returns a check that also requires a learner's trainer's packages."""

    def checked(run: RunConfig) -> None:
        from mpissd.online.process import check_trainer

        check_trainer()
        check(run)

    return checked


def _print_json(seen: Seen) -> int:
    sys.stdout.write(f"{MARK}{seen.to_json()}\n")
    sys.stdout.flush()
    return 0


def _as_rank(run: RunConfig, size: int, check: Check) -> int:
    """Examines as one of the ranks that a user's mpirun started; rank 0 prints the table."""

    def report(seen: Seen) -> int:
        if seen.step:
            return 0
        machine = read_machine(run, size, True, check)
        return _print_table(Facts(run, machine, seen.ranks, seen.session, True))

    return examine_rank(run, check, report)


def _print_table(facts: Facts) -> int:
    findings = judge(facts)
    stream = sys.stderr if facts.run.dry_run else sys.stdout
    stream.write(render(findings))
    stream.flush()
    return 2 if any(finding.verdict == BAD for finding in findings) else 0
