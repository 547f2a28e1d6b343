"""Starts a command: under mpirun by `python -m mpi4py -m mpissd COMMAND …`, in one process by
`python -m mpissd COMMAND …`.

Arguments are checked before MPI starts. Exit codes: 0 success, 2 wrong usage or configuration, 3 a
result failed its consistency checks, 130 Ctrl-C, 141 the reader of stdout is gone (`| head`), any
other code a fault.
"""

# ruff: noqa: E402
import os
import signal
import sys

# launch/local.sh ignores Ctrl-C up to here, as a starting Python would print a traceback.
# During the imports below Ctrl-C ends the process without a traceback.
_is_ignored = os.environ.pop("MPISSD_CHECKS", None) is not None
if __name__ == "__main__" and (_is_ignored or signal.getsignal(2) is signal.default_int_handler):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import time
from pathlib import Path
from typing import Any

# NumPy reads these at import: one thread for each rank, as more would compete.
for _variable in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from mpissd.cli import arguments as cli
from mpissd.common import guard
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError, FaultError, MpissdError, line_of
from mpissd.common.output import fault_of_disk, open_streams, unless_unread
from mpissd.common.ranks import RanksFlags
from mpissd.common.stage import Stage
from mpissd.common.wait import Overdue
from mpissd.common.workloads import imported
from mpissd.engine.comm.topology import (
    Refused,
    check_recovery,
    check_world,
    launcher_rank,
    launcher_size,
)
from mpissd.lab.sweep.plan import SweepConfig

HEAD_START_S = 5.0
HTTP = ("starlette", "uvicorn", "prometheus_client", "httpx")
ONE_HOST = "MPISSD_ONE_HOST"  # set by launch/env.sh
# Each command's function, imported when called: --help needs neither NumPy nor MPI.
FRONTS = {  # these run in the process that the user starts, which starts the ranks
    "chat": "mpissd.lab.chat:chat",
    "serve": "mpissd.serve.front:serve",
}
RANKS = {  # on every rank
    "run": "mpissd.lab.measure.run:execute",
    "serve": "mpissd.serve.ranks:execute_serve",
    "probe": "mpissd.lab.probe.command:execute_probe",
    "sweep": "mpissd.lab.sweep.run:execute_sweep",
}
ALONE = {  # without MPI
    "compare": "mpissd.cli.commands:compare",
    "plan": "mpissd.cli.commands:plan",
    "draft": "mpissd.engine.features.draft_server:draft",
    "pair": "mpissd.lab.pair.record:pair",
    "replicas": "mpissd.serve.replicas:replicas",
    "load": "mpissd.lab.load.command:load",
    "distill": "mpissd.learn.command:distill",
    "doctor": "mpissd.ops.doctor:doctor",
}


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code, 141 if the reader of stdout is gone (`| head`)."""
    open_streams()
    is_rank = launcher_size() is not None  # mpi4py aborts the other ranks if one raises
    try:
        return execute(arguments) if is_rank else unless_unread(lambda: execute(arguments))
    except FaultError as fault:  # of unless_unread
        print(f"mpissd: {fault}", file=sys.stderr)
        return fault.exit_code
    except ModuleNotFoundError as missing:
        package = (missing.name or "mpissd").partition(".")[0]
        if package == "mpissd":
            raise
        venv = Path(__file__).resolve().parents[1] / ".venv/bin/python"
        use = f"use {venv}" if venv.exists() else "pip install . there, or make venv"
        if package in HTTP:
            use = "pip install 'mpissd[serve]'"
        print(f"mpissd: {sys.executable} has no {package}: {use}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # Ctrl-C in a command that does not handle it itself
        if is_rank:
            raise
        return 130


def execute(arguments: list[str] | None) -> int:
    """Checks the arguments, and runs the command; returns its exit code."""
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        command = cli.parse(arguments)
        size = launcher_size()
        is_sweep = isinstance(command.config, SweepConfig)
        if size is None and os.environ.get(ONE_HOST) and command.name in FRONTS | RANKS:
            imported("mpissd.engine.backend.registry:check_here")(command.run.backend)
        if isinstance(command.config, RanksFlags) and size is None:
            words = [arguments] if command.name == "serve" else []
            return int(imported(FRONTS[command.name])(command.config, *words))
        if command.name == "chat":
            raise ConfigError("chat under a launcher: allowed: without one, it starts the ranks")
        if command.run.learners and command.name in ("serve", "probe", "sweep"):
            raise ConfigError(f"learners={command.run.learners} with {command.name}: allowed: run")
        if command.name in ALONE:
            extra: dict[str, Any] = {"doctor": [check_before_mpi], "plan": [command.given]}
            return int(imported(ALONE[command.name])(command.config, *extra.get(command.name, [])))
        if size is not None and not command.run.dry_run:
            guard.join(
                launcher_rank(),
                size,
                deadline_s=command.run.deadline_s,
                may_lose=[size - 1] if command.run.on_draft_loss == "ar" else [],
                hint="; the same command resumes" if is_sweep else "",
            )
        if is_sweep:
            imported("mpissd.lab.sweep.commands:check_sweep")(command.config, command.given)
        elif isinstance(command.config, RanksFlags):
            command.config.fit_world(command.name, size or 1)
        else:
            check_before_mpi(command.run)
    except ConfigError as error:
        guard.leave(error.exit_code)
        guard.stage(Stage.DONE)
        if launcher_rank() == 0:
            print(f"mpissd: {line_of(error)}", file=sys.stderr, flush=True)
        else:  # a launcher ends all ranks when one exits, so rank 0 has to print first
            time.sleep(HEAD_START_S)
        return error.exit_code
    if not command.run.dry_run:
        return launch(command)
    if is_sweep and launcher_rank() == 0:
        imported("mpissd.lab.sweep.commands:list_plan")(command.config)
    return 0


def check_before_mpi(config: RunConfig) -> None:
    """Raises ConfigError for faults that can be found without MPI and without opening a device."""
    from mpissd.common.output import check_file, check_output
    from mpissd.engine.job import resolve_unopened

    size = config.world_size or launcher_size()
    tp = 1 if size is None else check_world(size - config.learners, config.drafts, config.groups)
    is_shared = config.dry_run and bool(os.environ.get(ONE_HOST))
    job = resolve_unopened(config, tp, size if is_shared else None)
    if config.is_text and launcher_rank() % tp == 0 and launcher_rank() // tp < config.groups:
        imported("mpissd.engine.oracle.logits:check_prompts")(job)
    if config.learners and launcher_rank() == 0:
        imported("mpissd.online.process:check_trainer")()
    if config.on_draft_loss == "ar":
        check_recovery()
    check_output(config.out)
    if config.trace is not None:
        check_file("trace", config.trace)


def launch(command: cli.Command) -> int:
    """Starts MPI and runs the command on this rank; returns its exit code. Prints an error unless
    the host's watchdog process has printed it."""
    from mpi4py import MPI

    from mpissd.engine.comm.mpi_patient import PatientComm

    guard.stage(Stage.OPEN)
    PatientComm.deadline_s = command.run.deadline_s
    try:
        extra: list[Any] = [command.given] if command.name == "run" else []
        extra += [command.config.name, command.config.brief] if command.name == "probe" else []
        config = command.config if command.name != "probe" else command.run
        code = int(imported(RANKS[command.name])(config, *extra))
    except Refused as refused:  # every rank raises it, so MPI can be finalised
        code = refused.exit_code
        if MPI.COMM_WORLD.rank == 0 and launcher_rank() == 0:
            print(f"mpissd: {refused}", file=sys.stderr, flush=True)
    except (MpissdError, OSError) as problem:
        error = fault_of_disk(problem) if isinstance(problem, OSError) else problem
        if error is None:
            raise
        kind = "waited" if isinstance(error, Overdue) else "failed"
        if not guard.failed(str(error), kind):
            print(f"mpissd: rank {MPI.COMM_WORLD.rank}: {error}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(error.exit_code)
        return error.exit_code
    guard.leave(code)
    if guard.lost():  # MPI_Finalize would wait for the lost ranks
        guard.stage(Stage.DONE)
        sys.stdout.flush()
        os._exit(code)
    MPI.Finalize()
    guard.stage(Stage.DONE)
    return code


if __name__ == "__main__":
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
