"""The command `doctor`: looks for faults that would make a run fail, and prints a table of them.

    mpissd doctor --tp=2 --mode=ssd …

It examines the machine, then starts the ranks of a run with a deadline, each as the process `mpissd
doctor --json`. They report their versions and devices, and open and close the models and
communicators as a run would. Rank 0 prints a report as one line of JSON after each step, so the
last line shows how far the ranks came if they hang or end early.
"""

import faulthandler
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import mpissd
from mpissd.common.config import PROMPTS, RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import Checked, contained, flag, integer, number, said, switch
from mpissd.common.ranks import launcher, ranks_command
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import (
    Refused,
    launcher_rank,
    launcher_size,
    open_topology,
    usable_cores,
)

OK = "ok"
WARN = "warn"
BAD = "BAD"
Check = Callable[[RunConfig], None]  # raises ConfigError for flags that `run` refuses
Facts = dict[str, Any]  # JSON about one rank, or the report of all ranks
MARK = "mpissd-doctor "  # the first word of each line on stdout that is a report of rank 0
NOT_PASSED = ("dry_run", "progress")  # flags that are not passed on to the ranks
_ASK_S = 20.0  # nvidia-smi takes seconds if GPUs are not in persistence mode
_LOAD_S = 0.5  # seconds for which the load of the CPUs is measured
_GRACE_S = 2.0  # seconds for a child process to end after a signal
_MORE_S = 10.0  # seconds, added to the deadline, for mpirun to start and to end
_SHM_A_RANK = 32 << 20  # bytes of shared memory that MPI and NCCL need for each rank
# Matches how the last line of a traceback begins.
_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit): ")
_CUPY = "make venv, or pip install 'mpissd[cuda13]' (mpissd[cuda12] before driver 580 or Turing)"
_INSTALL = "pip install 'mpissd[mpi]', or load your cluster's MPI (module load openmpi)"
# A program that prints which MPI library mpi4py loads, and /proc/self/maps, without starting MPI.
_LIBRARY = """
import mpi4py, pathlib
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.Get_library_version().replace("\\n", " "))
maps = pathlib.Path("/proc/self/maps")
print(maps.read_text() if maps.exists() else "")
"""
# (pattern of an error message of mpirun, MPI or mpissd, its fix); the first match counts.
_FIXES = (
    (
        "slots",
        "start by launch/local.sh, or export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe "
        "OMPI_MCA_rmaps_base_oversubscribe=1",
    ),
    (
        "as root",
        "start by launch/local.sh, or export OMPI_ALLOW_RUN_AS_ROOT=1 "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    ("plm_rsh", "export OMPI_MCA_plm_rsh_agent='' (one host), or install an ssh client"),
    ("No module named '?mpissd", "install mpissd into this Python: pip install ."),
    ("No module named 'mpi4py'", "pip install mpi4py (or: make venv)"),
    ("MPI library|libmpi", f"unset MPI4PY_LIBMPI, or point it at mpirun's libmpi; or {_INSTALL}"),
    ("no answer within", "try mpirun -np 2 hostname; --deadline_s=300 if the machine is slow"),
    ("libcu|libnv", "reinstall CuPy: pip uninstall -y cupy-cuda12x cupy-cuda13x; make venv"),
    ("needs", "a larger TP, fewer layers (70b@8L), or a smaller PAIR (PAIR=toy always fits)"),
    ("share .*GPU|no usable GPU", "fewer ranks on this node, a GPU node, or BACKEND=numpy"),
    ("allowed: |pip install", "as the line says; docs/troubleshooting.md"),
    ("Error: ", "a defect of mpissd or of a library: the run itself shows the traceback"),
)


@dataclass(frozen=True)
class DoctorConfig(Checked):
    """Flags of `doctor`: those of the run to examine, and a few of its own."""

    run: RunConfig = contained(
        RunConfig, deadline_s=flag(60.0, number(0.1), "longest examination, in seconds")
    )
    tp: int | None = flag(None, integer(1), "target ranks to start (default 1)")
    json: bool = flag(False, switch, "under mpirun: print the ranks' facts as lines of JSON")

    @classmethod
    def completed(cls, flags: Mapping[str, str]) -> dict[str, str]:
        """Adds the flags that `run` would add, and a prompt if a text run has none."""
        given = RunConfig.completed(super().completed(flags))
        if given.get("workload") == "text" and not given.keys() & set(PROMPTS):
            given["prompt"] = "Hello"
        return given


class Finding(NamedTuple):
    """A line of the table. what: the thing examined. detail: its state. verdict: OK; WARN if a run
    works but is slow or its times are doubtful; BAD if a run fails. fix: how to repair it."""

    what: str
    detail: str
    verdict: str = OK
    fix: str = ""


def doctor(config: DoctorConfig, check: Check) -> int:
    """Prints the table of faults; returns 0 if a run with these flags works, otherwise 2. With
    --dry_run no ranks are started. check: raises ConfigError for flags that `run` refuses."""
    run = replace(config.run, learners=0)  # a learner takes no part in opening the models
    if config.json:
        return examine_rank(run, check)
    if config.tp is None and launcher_size() is not None:
        raise ConfigError("doctor under a launcher: allowed: without one, it starts the ranks")
    num_ranks = run.world_size or run.groups * (config.tp or 1) + run.drafts
    has_gpu = {"auto", "cupy"} & {run.backend, run.draft_backend}
    gpus, gpu_error = read_gpus() if has_gpu else ([], "")
    findings = [*_of_machine(config.run, num_ranks, check), *_of_gpus(gpus, gpu_error)]
    findings += of_load(num_ranks)
    if not run.dry_run and all(finding.verdict != BAD for finding in findings):
        given = [f"--{name}={text}" for name, text in said(run).items() if name not in NOT_PASSED]
        command = ranks_command(["doctor", "--json", *given], num_ranks)
        report = last_report(*ask(command, run.deadline_s + _MORE_S, signal.SIGTERM))
        findings += judge(report, num_ranks, gpus)
    sys.stdout.write(render(findings))
    sys.stdout.flush()
    return 2 if any(finding.verdict == BAD for finding in findings) else 0


def render(findings: Sequence[Finding]) -> str:
    """Returns the table: a line for each finding, its fix on another, and the overall verdict."""
    width = max((len(finding.what) for finding in findings), default=0)
    lines = []
    for finding in findings:
        detail, fix = (" ".join(text.split()) for text in (finding.detail, finding.fix))
        lines.append(f"{finding.verdict:4}  {finding.what:{width}}  {detail}")
        if fix:
            lines.append(f"{'':4}  {'':{width}}  → {fix}")
    faults = [finding for finding in findings if finding.verdict == BAD]
    warnings = sum(finding.verdict == WARN for finding in findings)
    noted = f"; {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
    verdict = f"doctor: this run works{noted}"
    if faults:
        others = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        fix = " ".join(faults[0].fix.split())
        verdict = f"doctor: this run fails: {faults[0].what}{others}{noted}. To fix: {fix}"
    return "\n".join([*lines, "", verdict, ""])


def _fault(what: str, error: str) -> Finding:
    """Returns a BAD line of the table about the thing `what`, with an error message and its fix, if
    the table _FIXES has one."""
    fixes = (fix for pattern, fix in _FIXES if re.search(pattern, error))
    return Finding(what, error, BAD, next(fixes, "see docs/troubleshooting.md"))


def _of_machine(run: RunConfig, num_ranks: int, check: Check) -> Iterator[Finding]:
    """Yields findings about this host's Python, MPI and mpirun, and about the run's flags."""
    here, library_error = installed()
    for what, (version, place) in here.items():
        if what == "MPI library" and library_error:
            yield _fault(what, library_error)
        else:
            yield Finding(what, f"{version} {place}")
    try:
        program = launcher()[0]
        printed = ask([program, "--version"])[0]
        path = shutil.which(program) or program
        yield Finding("mpirun", f"{path} ({printed.partition(chr(10))[0]})" if printed else path)
    except ConfigError as error:
        yield Finding("mpirun", str(error), BAD, _INSTALL)
    groups = f"G={run.groups}, " * (run.groups > 1)
    tp = (num_ranks - run.drafts) // run.groups
    detail = f"MODE={run.mode}, {groups}T={tp}, D={run.drafts}, world size {num_ranks}"
    try:
        check(replace(run, dry_run=num_ranks + run.learners))
        yield Finding("run", detail)
    except ConfigError as error:
        yield _fault("run", f"{detail}: {error}")


def _of_gpus(gpus: Sequence[str], error: str) -> Iterator[Finding]:
    """Yields findings about the host's GPUs: their number, a mute driver, a missing CuPy."""
    if error:
        fix = "nvidia-smi has to answer: driver >= 525; reload it, reboot, or ask your site"
        yield Finding("driver", error, WARN, fix)
    if gpus:
        yield Finding("GPUs", f"{len(gpus)} × {gpus[0]}")
    if gpus and importlib.util.find_spec("cupy") is None:
        yield Finding("CuPy", "not installed, and there are GPUs", WARN, _CUPY)


def of_load(num_ranks: int) -> Iterator[Finding]:
    """Yields a finding if other processes keep this host's cores busy."""
    from mpissd.lab.measure.load import counters, reasons

    before = counters()
    time.sleep(_LOAD_S)
    now = counters()
    spent = {name: now[name] - value for name, value in before.items() if name in now}
    if busy := reasons([spent, *[{"own": 0.0}] * (num_ranks - 1)], len(usable_cores())):
        fix = "times measured now are too long: end the other processes, or wait"
        yield Finding("load", f"the machine is busy: {', '.join(busy)}", WARN, fix)


def judge(report: Facts, num_ranks: int, gpus: Sequence[str]) -> list[Finding]:
    """Returns the findings that follow from the ranks' report, in the order of the table. gpus: a
    line about each GPU of the host."""
    findings = list[Finding]()
    ranks = report["ranks"]
    error = report["error"]
    first = ranks[0] if ranks else None
    if first is None:
        return [_fault("ranks", error)]
    sees = f"MPI sees {first['world_size']} rank{'s' * (first['world_size'] != 1)}"
    if first["world_size"] == num_ranks:
        findings.append(Finding("launcher", sees))
    else:  # If mpirun belongs to another MPI, each rank sees only itself.
        error = ""
        fix = f"use the mpirun that belongs to {' '.join(first['versions']['MPI library'])}, set "
        fix += "MPIRUN to it, or MPI4PY_LIBMPI to the other's libmpi.so; srun needs --mpi=pmix"
        started = f"it started {first['launcher_size'] or num_ranks} processes, but {sees}"
        findings.append(Finding("launcher", started, BAD, fix))
    for what, verdict, fix in (
        ("python", WARN, "let every host see one Python: a .venv on a shared file system"),
        ("mpissd", BAD, "install the same version there, or share one .venv between the hosts"),
        ("MPI library", BAD, "load one MPI on every host"),
    ):
        expected = first["versions"][what][0]
        for rank in ranks[1:]:
            version, place = rank["versions"][what]
            if version != expected:
                detail = f"{version} {place} on rank {rank['rank']} ({rank['host']}), but "
                detail += f"{expected} on rank 0 ({first['host']})"
                findings.append(Finding(what, detail, verdict, fix))
                break
    for rank in ranks:
        device = f"{rank['device']}  " * bool(rank["device"])
        where = f"{rank['role']:6}  {rank['host']}  {device}{len(rank['cores'])} cores"
        findings.append(Finding(f"rank {rank['rank']}", where))
    for host in dict.fromkeys(rank["host"] for rank in ranks):
        local = [rank["cores"] for rank in ranks if rank["host"] == host]
        if (cores := len(set().union(*local))) < len(local):
            fix = "shared cores make times noisy: more cores (--cpus-per-task), or a smaller TP"
            detail = f"{cores} for {len(local)} ranks on {host}"
            findings.append(Finding("cores", detail, WARN, fix))
    shm = first["shm_free"]
    if len(ranks) > 1 and shm is not None and shm < _SHM_A_RANK * len(ranks):
        detail = f"{shm / 1e6:.0f} MB free for {len(ranks)} ranks"
        fix = "docker run --shm-size=1g, or remove old files"
        findings.append(Finding("/dev/shm", detail, WARN, fix))
    if error:
        findings.append(_fault("session", error))
    for what, detail in report["choices"].items():
        verdict = OK
        fix = ""
        if what == "backend" and gpus and detail.startswith("numpy"):
            verdict = WARN
            detail = f"{detail}, though there are {len(gpus)} × {gpus[0]}"
            fix = "unset CUDA_VISIBLE_DEVICES; else reinstall CuPy: pip uninstall -y cupy-cuda12x "
            fix += f"cupy-cuda13x; {_CUPY}"
        elif what == "draft":
            verdict = WARN
            fix = "a draft of this target: python -m mpissd distill --target=…"
        findings.append(Finding(what, detail, verdict, fix))
    return findings


def ask(
    command: Sequence[str], timeout_s: float = _ASK_S, first: signal.Signals = signal.SIGKILL
) -> tuple[str, str]:
    """Runs a command in a session of its own; returns its stdout, and a line that says why it
    failed, or "". first: the signal sent after `timeout_s`; SIGKILL follows. Never raises, and
    takes at most timeout_s + 4 s: a child in a driver that survives SIGKILL is left running."""
    pipe = subprocess.PIPE
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True,
            errors="replace", start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    out = err = ""
    for signum, limit_s in ((None, timeout_s), (first, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            if signum is not None:
                os.killpg(child.pid, signum)
            out, err = child.communicate(timeout=limit_s)
            break
    if signum is not None:
        return out, f"no answer within {timeout_s:.0f} s"
    if child.returncode < 0:
        return out, f"ended by signal {-child.returncode}"
    if child.returncode == 0:
        return out, ""
    lines = [line.strip() for line in f"{err}\n{out}".splitlines()]
    printed = [line for line in lines if not set(line) <= set("-=*") and MARK not in line]
    raised = [line for line in printed if _RAISED.match(line)]
    complaint = raised[-1] if raised else " ".join(printed[:4])
    return out, complaint[:300] or f"printed nothing and ended with code {child.returncode}"


def versions(library: str, maps: str) -> dict[str, tuple[str, str]]:
    """Returns {what: (version, path)} of Python, mpissd and the MPI library. library: MPI's own
    version text. maps: the content of /proc/PID/maps, which has the path of libmpi."""
    try:
        mpi4py = f"(mpi4py {metadata.version('mpi4py')})"
    except metadata.PackageNotFoundError:
        mpi4py = "(no mpi4py)"
    path = re.search(r"(/\S*libmpi(?:ch)?\.so\S*)$", maps, re.M)
    name = library.strip("\x00").strip().partition("\n")[0].partition(",")[0]
    return {
        "python": (platform.python_version(), sys.executable),
        "mpissd": (mpissd.__version__, str(Path(mpissd.__file__).parent)),
        "MPI library": (" ".join(name.split()), f"{path[1] if path else ''} {mpi4py}"),
    }


def installed() -> tuple[dict[str, tuple[str, str]], str]:
    """Returns the `versions` of this host, and why the MPI library cannot be loaded, or ""."""
    out, error = ask([sys.executable, "-c", _LIBRARY])
    library, _, maps = out.partition("\n")
    return versions(library, maps), error


def read_gpus(command: str = "nvidia-smi") -> tuple[list[str], str]:
    """Returns "name, driver" for each GPU, and why there are none, or "". Both are empty without
    `command`."""
    if shutil.which(command) is None:
        return [], ""
    out, problem = ask([command, "--query-gpu=name,driver_version", "--format=csv,noheader"])
    gpus = [] if problem else [line for line in out.splitlines() if "," in line]
    why = problem or out.strip()[:200] or "no answer"
    return gpus, "" if gpus else f"{command}: {why}"


def last_report(out: str, problem: str) -> Facts:
    """Returns the last report in mpirun's output `out`, or one with only an error if there is none.
    problem: why mpirun failed, or ""."""
    for line in reversed(out.splitlines()):
        with suppress(ValueError):  # the line is no report, or was cut off
            report: Facts = json.loads(line.partition(MARK)[2])
            if report["step"]:
                report["error"] = f"{report['step']}: {problem or 'the ranks ended early'}"
            return report
    return {"ranks": [], "choices": {}, "error": problem or "mpirun printed no report"}


def examine_rank(config: RunConfig, check: Check) -> int:
    """Examines the machine as one rank; rank 0 prints its report after each step. Returns 0.
    Collective. check: raises ConfigError for flags that `run` refuses before MPI starts. Any other
    error ends the job with a traceback, whose last line `doctor` reads."""
    from mpissd.engine.comm import mpi_patient

    report: Facts = {"ranks": [], "choices": {}, "error": ""}

    def reach(step: str) -> None:
        if launcher_rank() == 0:
            sys.stdout.write(f"{MARK}{json.dumps({**report, 'step': step})}\n")
            sys.stdout.flush()

    # This timer, in C, ends the process even if a library that hangs holds Python's GIL.
    faulthandler.dump_traceback_later(config.deadline_s + 2 * _MORE_S, exit=True)
    reach("MPI_Init")
    rank, size, library = mpi_patient.identity()
    maps = Path("/proc/self/maps")
    shm = Path("/dev/shm")
    mine: Facts = {
        "rank": rank,
        "host": socket.gethostname(),
        "versions": versions(library, maps.read_text() if maps.exists() else ""),
        "role": "?",
        "world_size": size,
        "launcher_size": launcher_size(),
        "cores": sorted(usable_cores()),
        "shm_free": shutil.disk_usage(shm).free if shm.is_dir() else None,
        "device": "",
    }
    report["ranks"] = [mine]
    reach("meeting the other ranks")
    try:
        topology = open_topology(config.drafts, config.groups)
        role = "draft" if topology.is_draft else "lead" if topology.leads_group else "target"
        report["ranks"] = topology.world.allgather({**mine, "role": role})
        reach("opening a session")
        refused = ""
        try:
            check(config)
        except ConfigError as error:
            refused = str(error)
        for reason in filter(None, topology.world.allgather(refused)):
            raise ConfigError(reason)
        report["choices"] = _try_session(config, report["ranks"])
    except (ConfigError, Refused) as error:  # raised on every rank
        report["error"] = str(error)
    reach("")
    faulthandler.cancel_dump_traceback_later()
    return 0


def _try_session(config: RunConfig, ranks: Sequence[Facts]) -> dict[str, str]:
    """Opens and closes models and communicators as a run would; returns what the lead rank chose
    (backend, all-reduce, pair), with a warning if the draft seems not to fit the target.
    Collective. Stores device names in `ranks`. Removes empty folders that it made. Raises
    ConfigError or Refused on every rank."""
    from mpissd.engine.session.session import doubt_of, opened
    from mpissd.lab.measure.card import all_reduce_text

    sharpen_sleep()
    out = Path(config.out)
    made = [p for p in (out / "rounds", out, *out.parents) if not p.exists()]
    try:
        with opened(config) as session:
            for rank, info in zip(ranks, session.infos, strict=True):
                bound = info.binding
                ids = (info.uuid, info.bus_id, f"({bound})") if bound else ()
                rank["device"] = " ".join(filter(None, (info.name, *ids)))
            job = session.job
            chosen = {
                "backend": f"{session.backend.name} on {session.infos[0].name}",
                "all-reduce": all_reduce_text(session),
                "pair": " / ".join(model.name for model in (job.target, job.draft) if model),
            }
            if config.draft_backend:
                place = session.infos[session.topology.first_draft].name
                chosen["draft backend"] = f"{config.draft_backend} on {place}"
            doubt = doubt_of(job)
            return {**chosen, "draft": doubt} if doubt else chosen
    finally:
        for folder in made:
            with suppress(OSError):  # another rank removed it
                folder.rmdir()
