"""The command `sweep`: measures many configurations in one job, each as `run` would.

Ranks, devices, weights, programs and calibrations are kept from one configuration to the next.
Ranks that a configuration does not use are idle. If a configuration fails, its ranks agree on the
error, record it, and the sweep continues. A fault (a rank is lost) ends the whole job, as it ends a
run.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpissd.common import guard
from mpissd.common.errors import ConfigError, GateError
from mpissd.common.output import append_row, read_rows
from mpissd.common.row import Row
from mpissd.common.stage import Stage
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import Refused
from mpissd.engine.job import Job
from mpissd.engine.session.session import Machine, opened_machine
from mpissd.engine.workload.text.workload import check_prompts
from mpissd.lab.measure.run import measure
from mpissd.lab.sweep.commands import planned
from mpissd.lab.sweep.configs import SweepConfig
from mpissd.lab.sweep.locks import Claims
from mpissd.lab.sweep.plan import Plan, Task
from mpissd.lab.sweep.progress import Progress, print_end, print_sweep_card


@dataclass(frozen=True)
class Failure:
    """Why a configuration has no row, and the exit code of that error."""

    error: str
    exit_code: int


@dataclass(frozen=True)
class Survey:
    """The state of a sweep's folder at its start."""

    todo: frozenset[str]  # names of the tasks that this job measures
    elsewhere: int  # number of tasks that another job is measuring
    earlier: list[int]  # exit codes of the tasks that failed in earlier jobs


def execute_sweep(config: SweepConfig) -> int:
    """Runs a sweep on all ranks.

    Returns the exit code: 0, or the worst failure's (3 is worse than 2).
    """
    sharpen_sleep()
    plan = planned(config)
    with opened_machine(config.run, plan.num_drafts) as machine:
        return Sweep(machine, plan, config).run()


class Sweep:
    """One rank's part in running a sweep."""

    def __init__(self, machine: Machine, plan: Plan, config: SweepConfig) -> None:
        """Divides the ranks and makes all configurations' models; collective over the world."""
        self._machine, self._plan, self._config = machine, plan, config
        self._is_lead = machine.topology.is_lead
        self._out = Path(config.run.out)
        self._id = machine.topology.world.bcast(f"{time.time_ns() // 1000:x}")
        self._jobs = {
            point.digest: self._resolve(point.config, point.error) for point in plan.points
        }
        refused = {n: self._prompts_refused(job) for n, job in self._jobs.items() if self._is_lead}
        told = {digest: failure for digest, failure in refused.items() if failure is not None}
        self._jobs.update(machine.topology.world.bcast(told))
        machine.divide(plan.drafts)
        machine.models.expect(job for job in self._jobs.values() if isinstance(job, Job))

    def _resolve(self, config: Any, error: str | None) -> Job | Failure:
        if config is None:
            return Failure(str(error), ConfigError.exit_code)
        try:
            return self._machine.resolve(config)
        except ConfigError as refused:
            return Failure(str(refused), refused.exit_code)

    @staticmethod
    def _prompts_refused(job: Job | Failure) -> Failure | None:
        """Returns why the prompts of a text job cannot be answered; for the lead, which reads."""
        try:
            if isinstance(job, Job):
                check_prompts(job)
        except ConfigError as refused:
            return Failure(str(refused), refused.exit_code)
        return None

    def run(self) -> int:
        """Measures the tasks without a row, in the plan's order; returns the exit code."""
        with ExitStack() as stack:
            survey = None
            if self._is_lead:
                survey = self._survey(stack.enter_context(closing(Claims(self._out))))
            return self._measure(self._machine.topology.world.bcast(survey))

    def _survey(self, claims: Claims) -> Survey:
        """Returns the tasks that are left and not claimed by another job; on the lead."""
        names = [self._digest(task) for task in self._plan.tasks()]
        before = self._known()
        mine = {name for name in names if name not in before and claims.take(name)}
        known = self._known()  # read again: a job that has just ended has written its rows
        left = {name for name in names if name not in known}
        earlier = [known[name] for name in names if known.get(name)]
        return Survey(frozenset(left & mine), len(left - mine), earlier)

    def _measure(self, survey: Survey) -> int:
        """Measures the tasks of the survey in the plan's order; returns the exit code."""
        tasks = list(self._plan.tasks())
        todo = [task for task in tasks if self._digest(task) in survey.todo]
        if self._is_lead:
            known = len(tasks) - len(todo) - survey.elsewhere
            counts = len(todo), known, survey.elsewhere
            print_sweep_card(self._machine, self._plan, self._id, *counts)
        codes, began = [], time.monotonic()
        with Progress(self._config.run.progress, len(todo), self._is_lead) as progress:
            for task in todo:
                result = self._one(task)
                codes.append(result.exit_code if isinstance(result, Failure) else 0)
                if self._is_lead:
                    self._tell(task, result, progress)
        if self._is_lead:
            self._conclude(tasks, codes, survey, time.monotonic() - began)
        return int(self._machine.topology.world.bcast(max([0, *codes, *survey.earlier])))

    def _digest(self, task: Task) -> str:
        machine = self._machine  # infos[0] is the lead's device; a draft's may be of another kind
        return task.digest(machine.topology.tp, machine.backend.name, machine.infos[0].name)

    def _known(self) -> dict[str, int]:
        """Returns the tasks that were measured or have failed before, with their exit codes.

        They are read from the folder's files, which several jobs may share.
        """
        exit_codes: dict[str, int] = {}
        if not self._config.retry:
            for row in read_rows(self._out / "failed.jsonl"):
                exit_codes[str(row.get("task"))] = int(
                    row.get("exit_code") or ConfigError.exit_code
                )
            exit_codes |= dict.fromkeys(self._rows_of("flagged.jsonl"), GateError.exit_code)
        return exit_codes | dict.fromkeys(self._rows_of("runs.jsonl"), 0)

    def _rows_of(self, name: str) -> list[str]:
        """Returns the names of the tasks that have a row in this file of OUT."""
        return [row.sweep["task"] for row in self._rows_in(name) if row.sweep]

    def _rows_in(self, name: str) -> list[Row]:
        return [Row.from_dict(line) for line in read_rows(self._out / name)]

    def _one(self, task: Task) -> Row | Failure | None:
        """Measures one task; returns its row (None on ranks other than the lead) or its failure."""
        job = self._jobs[task.point.digest]
        if isinstance(job, Failure):
            return job
        self._machine.rest()
        guard.stage(Stage.OPEN)
        session = self._machine.session(job)
        if session is None:  # this configuration does not use this rank
            return None
        label = {
            "id": self._id,
            "task": self._digest(task),
            "repeat": task.repeat,
            "flags": dict(task.point.flags),
        }
        try:
            row = measure(session, label)
        except Refused as refused:
            session.resources.close()
            return Failure(str(refused), refused.exit_code)
        session.resources.close()
        return row

    def _tell(self, task: Task, result: Row | Failure | None, progress: Progress) -> None:
        """Prints the outcome of a task and records a failure in failed.jsonl; on the lead."""
        if not isinstance(result, Failure):
            assert result is not None, "a lead without a row"
            progress.row(task, result)
            return
        is_flagged = result.exit_code == GateError.exit_code  # its row is in flagged.jsonl already
        if not is_flagged:
            failed = {
                "task": self._digest(task),
                "repeat": task.repeat,
                "flags": dict(task.point.flags),
                "error": result.error,
                "exit_code": result.exit_code,
                "sweep": self._id,
            }
            append_row(self._out / "failed.jsonl", failed)
        progress.failure(task, result.error)

    def _conclude(
        self, tasks: list[Task], codes: list[int], survey: Survey, seconds: float
    ) -> None:
        """Prints which configurations were best among all rows of this plan; on the lead."""
        mine = {self._digest(task) for task in tasks}
        rows = [row for row in self._rows_in("runs.jsonl") if (row.sweep or {}).get("task") in mine]
        print_end(self._id, rows, codes, seconds, len(survey.earlier), survey.elsewhere)
