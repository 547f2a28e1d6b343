"""Prints a sweep for a person: its size, its progress, and the best methods."""

from __future__ import annotations

import json
from types import TracebackType

from tqdm import tqdm

from mpissd.common.row import Row
from mpissd.engine.session.session import Machine
from mpissd.lab.measure.card import open_bar
from mpissd.lab.sweep.forecast import duration_text, predicted_s
from mpissd.lab.sweep.plan import Plan, Task
from mpissd.lab.tables.best import compare_methods, render, to_dict

_LINES_S = 10.0


def print_sweep_card(
    machine: Machine, plan: Plan, sweep: str, todo: int, known: int, elsewhere: int
) -> None:
    """Prints which sweep runs on which machine, and how many measurements are left (to stdout).

    known: measurements that exist already. elsewhere: measurements that another job is making.
    """
    tp = machine.topology.tp
    there = f", {known} there already" if known else ""
    if elsewhere:
        there += f", {elsewhere} left to another job that is to measure them"
    share = todo / max(1, todo + known + elsewhere)
    seconds = predicted_s(plan, tp, machine.backend.name) * share
    lines = [
        ("sweep", f"{sweep}: {len(plan.points)} configurations x {plan.repeats}{there}"),
        ("", f"about {duration_text(seconds)} for the {todo} to measure"),
        ("backend", f"{machine.backend.name} ({machine.backend.dtype_name})"),
    ]
    for rank, (host, info) in enumerate(zip(machine.topology.hosts, machine.infos, strict=True)):
        role = "draft" if rank >= tp else "lead" if rank == 0 else "target"
        lines.append((f"rank {rank}", f"{role:6} {host}  {info.name}"))
    print("\n".join(f"{name:>8}  {text}" for name, text in lines), flush=True)


class Progress:
    """Shows a bar over all measurements and prints a line for each; only on the lead."""

    def __init__(self, when: str, total: int, is_lead: bool) -> None:
        shown = is_lead and when != "off"
        lines_s = 2.0 if when == "on" else _LINES_S
        self._bar = open_bar(total, "run", lines_s=lines_s, leave=True) if shown else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def row(self, task: Task, row: Row) -> None:
        """Prints the line of a measurement whose row was written, and advances the bar."""
        each = row.tok_per_s_per_gpu
        self._say(f"{row.tok_per_s:>10.1f} tok/s {each:>9.1f} a GPU  {_name(task)}")

    def failure(self, task: Task, error: str) -> None:
        """Prints why a configuration has no row, and advances the bar."""
        self._say(f"    FAILED  {_name(task)}: {error}")

    def _say(self, text: str) -> None:
        if self._bar is None:
            print(text, flush=True)
            return
        with tqdm.external_write_mode():
            print(text, flush=True)
        self._bar.update(1)


def _name(task: Task) -> str:
    return f"{task.point}  #{task.repeat + 1}"


def print_end(
    sweep: str,
    rows: list[Row],
    codes: list[int],
    seconds: float,
    earlier: int,
    elsewhere: int,
) -> None:
    """Prints the comparison of methods, then one JSON object as the last line of stdout.

    earlier: measurements that failed in an earlier job and were not repeated. elsewhere:
    measurements that were left to another job.
    """
    comparisons = compare_methods(rows)
    done, failed = codes.count(0), sum(code != 0 for code in codes)
    if comparisons:
        print(f"\n{render(comparisons)}\n")
    rate = 60 * done / seconds if done and seconds > 0 else None
    at = "" if rate is None else f" in {seconds:.1f} s, {rate:.0f} a minute"
    before = f", {earlier} before (--retry measures them again)" if earlier else ""
    others = f"; {elsewhere} left to another job" if elsewhere else ""
    there = f"{len(rows)} rows of this sweep are there"
    print(f"{done} measured{at}; {failed} failed{before}{others}; {there}")
    summary = {
        "sweep": sweep,
        "measured": done,
        "failed": failed,
        "failed_before": earlier,
        "left_to_others": elsewhere,
        "rows": len(rows),
        "seconds": round(seconds, 3),
        "per_minute": None if rate is None else round(rate, 1),
        "best": [to_dict(comparison) for comparison in comparisons],
    }
    print(json.dumps(summary), flush=True)
