"""The command `sweep`: measures many configurations in one MPI job, each as `run` would.

Devices, weights, compiled forwards and timings are kept from one configuration to the next. If a
configuration fails, its ranks agree on the error, record it, and the sweep continues. The loss of a
rank ends the whole job.
"""

import time
from pathlib import Path
from typing import Any

from mpissd.common import guard
from mpissd.common.errors import ConfigError, FaultError, GateError, MpissdError
from mpissd.common.output import append_row, json_line
from mpissd.common.row import Row
from mpissd.common.stage import Stage
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import Refused
from mpissd.engine.job import Job
from mpissd.engine.oracle.logits import check_prompts
from mpissd.engine.session.session import Machine, opened_machine, rest
from mpissd.lab.measure.card import rank_lines
from mpissd.lab.measure.run import measure
from mpissd.lab.sweep.plan import SweepConfig, SweepPlan, SweepTask, planned
from mpissd.lab.tables.best import compare_methods, render
from mpissd.lab.tables.load import LeftOut, load_rows
from mpissd.lab.tables.uses import unit


def execute_sweep(config: SweepConfig) -> int:
    """Runs a sweep on all ranks; returns the exit code: 0, or the highest code of any failure."""
    sharpen_sleep()
    plan = planned(config)
    with opened_machine(config.run, plan.num_drafts) as machine:
        return Sweep(machine, plan, config).measure()


class Sweep:
    """One MPI rank's part in a sweep: it measures those tasks that have no result row yet."""

    def __init__(self, machine: Machine, plan: SweepPlan, config: SweepConfig) -> None:
        """Divides the ranks into target and draft ranks, and tells the machine which models all
        configurations need. All ranks of the job must call this."""
        self._machine = machine
        self._plan = plan
        self._config = config
        self._is_lead = machine.topology.is_lead
        self._out = Path(config.run.out)
        self._id = machine.topology.world.bcast(f"{time.time_ns() // 1000:x}")
        self._jobs: dict[str, Job | ConfigError] = {}
        for point in plan.points:
            try:
                if point.config is None:
                    raise ConfigError(str(point.error))
                job = machine.resolve(point.config)
                if self._is_lead:
                    check_prompts(job)
                self._jobs[point.digest] = job
            except ConfigError as refused:
                self._jobs[point.digest] = refused
        # Only rank 0 reads prompts, so a refusal by rank 0 holds for all ranks.
        refusals = {name: job for name, job in self._jobs.items() if isinstance(job, ConfigError)}
        self._jobs |= machine.topology.world.bcast(refusals)
        machine.divide(plan.drafts)
        machine.models.expect(job for job in self._jobs.values() if isinstance(job, Job))

    def measure(self) -> int:
        """Measures the tasks that have no result row yet, in the plan's order; returns the exit
        code: 0, or the highest code of any failure. All ranks must call this."""
        tasks = list(self._plan.tasks())
        world = self._machine.topology.world
        digests: set[str] = world.bcast({*self._rows()} if self._is_lead else None)
        todo = [task for task in tasks if self._digest(task) not in digests]
        if self._is_lead:
            self._print_card(len(todo), len(tasks) - len(todo))
        codes = []
        began = time.monotonic()
        for number, task in enumerate(todo, 1):
            result = self._one(task)
            codes.append(result.exit_code if isinstance(result, MpissdError) else 0)
            if self._is_lead:
                print(f"{number:>5}/{len(todo)} {self._record(task, result)}", flush=True)
        if self._is_lead:
            self._print_end(tasks, codes, time.monotonic() - began)
        return int(world.bcast(max([0, *codes])))

    def _digest(self, task: SweepTask) -> str:
        machine = self._machine
        return task.digest(machine.topology.tp, machine.target_backend, machine.infos[0].name)

    def _rows(self) -> dict[str, Row]:
        """Returns {hash of the task: row} of the rows of sweeps in OUT/runs.jsonl."""
        file = self._out / "runs.jsonl"
        with LeftOut() as left_out:
            rows = load_rows([file], left_out) if file.exists() else []
        return {row.sweep["task"]: row for row in rows if row.sweep}

    def _one(self, task: SweepTask) -> Row | MpissdError | None:
        """Measures one task; returns its error or, if it succeeded, its row (only on rank 0)."""
        job = self._jobs[task.point.digest]
        if isinstance(job, ConfigError):
            return job
        rest(self._machine.topology)
        guard.stage(Stage.OPEN)
        session = self._machine.session(job)
        if session is None:  # The configuration does not use this rank.
            return None
        try:
            row = measure(session, {"id": self._id, **self._named(task)})
        except Refused as refused:
            session.resources.close()
            if refused.exit_code == FaultError.exit_code:  # Writing later rows would fail, too.
                raise
            # A new exception has no traceback, which would keep device buffers alive.
            return Refused(str(refused), refused.exit_code)
        session.resources.close()
        return row

    def _named(self, task: SweepTask) -> dict[str, Any]:
        """Returns the keys that identify a task in the files runs.jsonl and failed.jsonl."""
        return {"task": self._digest(task), "repeat": task.repeat, "flags": dict(task.point.flags)}

    def _record(self, task: SweepTask, result: Row | MpissdError | None) -> str:
        """Returns a printed line on how a task ended, and writes a failure to failed.jsonl. Called
        on rank 0. result: the task's row, or its error."""
        name = f"{task.point}  #{task.repeat + 1}"
        if not isinstance(result, MpissdError):
            assert result is not None, "a lead without a row"
            rates = f"{result.tok_per_s:>10.1f} tok/s {result.tok_per_s_per_gpu:>9.1f}"
            return f"{rates} a {unit(result)}  {name}"
        if result.exit_code != GateError.exit_code:  # A GateError's row is in flagged.jsonl.
            failed = {"error": str(result), "exit_code": result.exit_code, "sweep": self._id}
            append_row(self._out / "failed.jsonl", {**self._named(task), **failed})
        return f"    FAILED  {name}: {result}"

    def _print_card(self, todo: int, done: int) -> None:
        """Prints the sweep's size, the number of measurements to make (todo) and of those that
        already have a row (done), and the ranks of the machine."""
        machine = self._machine
        plan = self._plan
        there = f", {done} there already" if done else ""
        lines = [
            ("sweep", f"{self._id}: {len(plan.points)} configurations x {plan.repeats}{there}"),
            ("", f"{todo} to measure"),
            ("backend", f"{machine.backend.name} ({machine.backend.dtype_name})"),
        ]
        lines += rank_lines(machine.topology, machine.infos)
        print("\n".join(f"{name:>8}  {text}" for name, text in lines), flush=True)

    def _print_end(self, tasks: list[SweepTask], codes: list[int], seconds: float) -> None:
        """Prints a table of all rows of this sweep, then a JSON object as the last line. codes: the
        exit code of each measurement. seconds: duration of all measurements."""
        by_digest = self._rows()
        rows = [by_digest[name] for task in tasks if (name := self._digest(task)) in by_digest]
        if comparisons := compare_methods(rows):
            print(f"\n{render(comparisons)}\n")
        done = codes.count(0)
        failed = len(codes) - done
        rate = 60 * done / seconds if done and seconds > 0 else None
        at = "" if rate is None else f" in {seconds:.1f} s, {rate:.0f} a minute"
        there = f"{len(rows)} rows of this sweep are there"
        print(f"{done} measured{at}; {failed} failed; {there}")
        summary = {
            "sweep": self._id,
            "measured": done,
            "failed": failed,
            "rows": len(rows),
            "seconds": round(seconds, 3),
            "per_minute": None if rate is None else round(rate, 1),
        }
        print(json_line(summary), flush=True)
