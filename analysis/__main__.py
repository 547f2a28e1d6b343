"""Runs `python -m analysis FIGURE [--results=…] [--out=…]`, `python -m analysis all` and `…
report`.

Exit codes: 0 done; 2 a usage error, or no row that a figure could be drawn from; 141 stdout was
closed by its reader.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from analysis import cli
from analysis.build import Drawn, build_all, draw, outcome_line
from analysis.load import load
from analysis.select import on_machine
from mpissd.common.errors import MpissdError
from mpissd.common.unread import unless_unread


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        return unless_unread(lambda: execute(cli.parse(given)))
    except MpissdError as error:
        print(f"analysis: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("analysis: ended by a signal; what was drawn stays", file=sys.stderr)
        return 128 + signal.SIGINT


def execute(plan: cli.Plan) -> int:
    """Draws what the plan names, and returns the exit code.

    Notes go to stderr, the names of written files to stdout.
    """
    data = load(plan.paths)
    for line in data.notes.lines:
        print(f"analysis: {line}", file=sys.stderr)
    if plan.device is not None and plan.what in cli.OTHERS:
        data = on_machine(data, plan.device)
    out = Path(plan.out)
    if plan.what == "report":
        from analysis.report import write_report

        print(write_report(data, out, lambda line: print(line, file=sys.stderr)))
        return 0
    if plan.what == "all":
        drew = False
        for line in build_all(data, out, plan.kinds, plan.workers):
            print(line, flush=True)
            drew |= ": skipped: " not in line
        return 0 if drew else 2
    items = list(draw(data, plan.what, plan.device))
    for note in dict.fromkeys(n for i in items if isinstance(i, Drawn) for n in i.notes):
        print(f"analysis: {note}", file=sys.stderr)
    for item in items:
        line = outcome_line(item, out, plan.kinds)
        print(line, file=sys.stdout if isinstance(item, Drawn) else sys.stderr)
    return 0 if any(isinstance(item, Drawn) for item in items) else 2


if __name__ == "__main__":
    sys.exit(main())
