"""The command `sweep`: many configurations in one job, each measured as `run` would alone.

Ranks, devices, weights, programs and calibrations stay while configurations come and go; ranks that
a configuration has no use for idle. What goes wrong with one configuration is agreed by its ranks,
recorded, and the sweep goes on; a fault (a rank that is gone) ends the job as it ends a run.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpissd.bench.output import append_row, read_rows
from mpissd.bench.run import measure
from mpissd.bench.session import Machine, open_machine
from mpissd.bench.sweep_report import Progress, print_end, print_sweep_card
from mpissd.comm.topology import Refused
from mpissd.command_config import SweepConfig
from mpissd.errors import ConfigError, FaultError, GateError
from mpissd.job import Job
from mpissd.sweep.plan import Plan, Task
from mpissd.sweeping import planned
from mpissd.wait import sharpen_sleep, within
from mpissd.watch import guard
from mpissd.watch.page import Stage


@dataclass(frozen=True)
class Failure:
    """Why a configuration has no row."""

    error: str
    exit_code: int


def execute_sweep(config: SweepConfig) -> int:
    """Runs a sweep on all ranks; the exit code: 0, or that of the gravest failure (3 before 2)."""
    sharpen_sleep()
    plan = planned(config)
    machine = open_machine(config, plan.num_drafts)
    try:
        return Sweep(machine, plan, config).run()
    except FaultError:
        machine.group.abort()  # a collective that waits for a dead peer would hold the device
        raise
    finally:
        guard.stage(Stage.TEARDOWN)
        with within(config.deadline_s, f"rank {machine.topology.world.rank}: teardown"):
            machine.close()


class Sweep:
    """One rank's part of a sweep."""

    def __init__(self, machine: Machine, plan: Plan, config: SweepConfig) -> None:
        """Collective: divides the ranks, and has the models made for all configurations."""
        self._machine, self._plan, self._config = machine, plan, config
        self._is_lead = machine.topology.is_lead
        self._out = Path(config.out)
        self._id = machine.topology.world.bcast(f"{time.time_ns() // 1000:x}")
        self._jobs = {
            point.digest: self._resolve(point.config, point.error) for point in plan.points
        }
        machine.divide(plan.drafts)
        machine.models.expect(job for job in self._jobs.values() if isinstance(job, Job))

    def _resolve(self, config: Any, error: str | None) -> Job | Failure:
        if config is None:
            return Failure(str(error), ConfigError.exit_code)
        try:
            return self._machine.resolve(config)
        except ConfigError as refused:
            return Failure(str(refused), refused.exit_code)

    def run(self) -> int:
        """Everything that is not there yet, in the plan's order; the exit code."""
        tasks = list(self._plan.tasks())
        known = self._machine.topology.world.bcast(self._known() if self._is_lead else None)
        todo = [task for task in tasks if self._digest(task) not in known]
        if self._is_lead:
            print_sweep_card(self._machine, self._plan, self._id, len(tasks), len(todo))
        codes, began = [0], time.monotonic()
        with Progress(self._config, len(todo), self._is_lead) as progress:
            for task in todo:
                found = self._one(task)
                codes.append(found.exit_code if isinstance(found, Failure) else 0)
                if self._is_lead:
                    self._tell(task, found, progress)
        if self._is_lead:
            self._conclude(tasks, codes[1:], time.monotonic() - began)
        return int(self._machine.topology.world.bcast(max(codes)))

    def _digest(self, task: Task) -> str:
        backend = self._machine.backend
        return task.digest(self._machine.topology.tp, backend.name, backend.info.name)

    def _known(self) -> set[str]:
        """What was measured, or failed, before; this and other jobs share the folder."""
        rows = read_rows(self._out / "runs.jsonl")
        found = {label["task"] for label in map(_label, rows) if label}
        if not self._config.retry:
            flagged = read_rows(self._out / "flagged.jsonl")
            found |= {label["task"] for label in map(_label, flagged) if label}
            found |= {str(row.get("task")) for row in read_rows(self._out / "failed.jsonl")}
        return found

    def _one(self, task: Task) -> dict[str, Any] | Failure | None:
        """One measurement: its row on the lead, None on the other ranks, or why there is none."""
        job = self._jobs[task.point.digest]
        if isinstance(job, Failure):
            return job
        self._machine.rest()
        guard.stage(Stage.OPEN)
        session = self._machine.session(job)
        if session is None:  # it learns only that the others go on
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

    def _tell(self, task: Task, found: dict[str, Any] | Failure | None, progress: Progress) -> None:
        """The lead: records a failure, and says what came of a task."""
        if not isinstance(found, Failure):
            assert found is not None, "a lead without a row"
            progress.row(task, found)
            return
        if (
            found.exit_code != GateError.exit_code
        ):  # what a gate flagged has its row in flagged.jsonl
            failed = {
                "task": self._digest(task),
                "repeat": task.repeat,
                "flags": dict(task.point.flags),
                "error": found.error,
                "exit_code": found.exit_code,
                "sweep": self._id,
            }
            append_row(self._out / "failed.jsonl", failed)
        progress.failure(task, found.error)

    def _conclude(self, tasks: list[Task], codes: list[int], seconds: float) -> None:
        """The lead: which configurations were best, of all rows of this plan."""
        mine = {self._digest(task) for task in tasks}
        rows = read_rows(self._out / "runs.jsonl")
        rows = [row for row in rows if (label := _label(row)) and label["task"] in mine]
        print_end(self._id, rows, codes, seconds)


def _label(row: dict[str, Any]) -> dict[str, Any] | None:
    """What a row says of its sweep."""
    found = (row.get("provenance") or {}).get("sweep")
    return found if isinstance(found, dict) else None
