"""The command `doctor`: prints a table of possible faults; exit code 0 if a run works, 2 if not.

    mpissd doctor --tp=2 --mode=ssd …

It starts the ranks itself, each as `mpissd doctor --json`, with a deadline.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mpissd.common.config import RunConfig
from mpissd.common.default_flags import PROMPTS, with_text
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, contained, flag, integer, number, switch
from mpissd.engine.comm.topology import launcher_size
from mpissd.ops.doctor.checks import Facts, judge, render
from mpissd.ops.doctor.facts import BAD, examine_rank, read_machine, try_ranks

_PROMPT = "Hello"


@dataclass(frozen=True)
class DoctorConfig(Checked):
    """The configuration of `doctor`: the examined run's flags, and flags of the examination."""

    run: RunConfig = contained(
        RunConfig, deadline_s=flag(60.0, number(0.1), "longest examination, in seconds")
    )
    tp: int | None = flag(None, integer(1), "target ranks to start (default 1)")
    json: bool = flag(False, switch, "under mpirun: print what the ranks see as lines of JSON")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags implied by a prompt or a pair, and a prompt if none is given."""
        given = with_text(super().completed(flags))
        if given.get("workload") == "text" and not given.keys() & set(PROMPTS):
            given["prompt"] = _PROMPT
        return given


def doctor(config: DoctorConfig, check: Callable[[RunConfig], None]) -> int:
    """Prints the table; returns 0 if a run with these flags works, 2 if not.

    With --dry_run the ranks are not started. check: raises ConfigError for flags that `run` refuses
    before MPI starts.
    """
    run = replace(config.run, learners=0)  # a learner opens no part of the session
    if config.json:
        return examine_rank(run, check)
    if config.tp is None and launcher_size() is not None:
        raise ConfigError("doctor under a launcher: allowed: without one, it starts the ranks")

    def checked(run: RunConfig) -> None:
        if config.run.learners:
            from mpissd.online.process import check_trainer

            check_trainer()
        check(run)

    num_ranks = run.world_size or run.groups * (config.tp or 1) + run.drafts
    facts = Facts(run, read_machine(run, num_ranks, checked))
    if not run.dry_run and all(finding.verdict != BAD for finding in judge(facts)):
        report, problem = try_ranks(run, num_ranks)
        facts = replace(facts, report=report, trial_error=problem)
    findings = judge(facts)
    sys.stdout.write(render(findings))
    sys.stdout.flush()
    return 2 if any(finding.verdict == BAD for finding in findings) else 0
