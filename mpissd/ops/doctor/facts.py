"""Reads facts of a machine: before MPI starts, and on the ranks of a short trial.

Drivers are asked in child processes with a time limit. The trial starts `mpirun -np N … doctor
--json`; its rank 0 prints one line of JSON after each step, so that the last line shows how far a
job came that hangs or ends early. None, "" and an empty list mean that a fact is unknown; a field
…_error holds the reason.
"""

from __future__ import annotations

import csv
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import mpissd
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.flags import said
from mpissd.common.ranks import launcher, ranks_command
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.topology import (
    Refused,
    Topology,
    launcher_rank,
    launcher_size,
    open_topology,
    usable_cores,
)

if TYPE_CHECKING:
    from mpissd.engine.session.session import Session  # importing it starts MPI

Kind = TypeVar("Kind")
OK, WARN, BAD = "ok", "warn", "BAD"
Check = Callable[[RunConfig], None]
ASK_S = 20.0  # nvidia-smi takes seconds if GPUs are not in persistence mode
MARK = "mpissd-doctor "  # begins rank 0's lines of facts on stdout
_GRACE_S = 2.0  # time for a child to end after a signal
_MORE_S = 10.0  # time beyond the deadline for mpirun to start and to end
_NOT_PASSED = ("dry_run", "progress")
_SMI = ("name", "driver_version", "compute_cap")
_STRAY = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"  # set by launchers
_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception|Exit): ")  # a traceback's last line
_WHY = {
    "mpi": "host arrays",
    "oneshot": "the target's GPUs map each other's memory",
    "device": "--all_reduce=mpi",
}
# Prints which library mpi4py loads, without starting MPI.
_LIBRARY = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
try:
    maps = open("/proc/self/maps").read()
except OSError:
    maps = ""
print(json.dumps([MPI.Get_library_version(), maps]))
"""


@dataclass(frozen=True)
class Gpu:
    """One GPU, from nvidia-smi. driver: the first number of its version, 0 if unknown."""

    name: str
    driver: int = 0
    capability: float | None = None


@dataclass(frozen=True)
class CudaView:
    """CuPy's view of a rank's environment, from mpissd.engine.backend.cupy_facts."""

    error: str = ""
    cupy: str = ""
    runtime: int | None = None  # 13020 is 13.2
    driver: int | None = None  # the newest CUDA that the driver serves
    nvmath_error: str = ""
    count: int = 0
    name: str = ""
    uuid: str = ""
    bus_id: str = ""


@dataclass(frozen=True)
class Machine:
    """Facts that are read before MPI starts.

    versions: (version, place) of Python, mpissd and the MPI library. stray: a launcher's variables,
    although no launcher started this process. shm_free: bytes of /dev/shm, which the ranks of a
    host share.
    """

    versions: dict[str, Sequence[str]]
    num_ranks: int
    mpirun: str = ""
    mpirun_error: str = ""
    library_error: str = ""
    packages: Sequence[str] = ()
    stray: Sequence[str] = ()
    config_error: str = ""
    slurm_tasks: int | None = None
    shm_free: int | None = None
    gpus: Sequence[Gpu] = ()
    gpu_error: str = ""


@dataclass(frozen=True)
class RankFacts:
    """One rank; world_size is MPI's, launcher_size is from the environment."""

    rank: int
    host: str
    versions: dict[str, Sequence[str]]
    role: str = "?"
    local_rank: int = 0
    world_size: int | None = None
    launcher_size: int | None = None
    cores: list[int] = field(default_factory=list)
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    cuda: CudaView | None = None  # None: CuPy is not installed


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    what: the thing that was examined. detail: its state. verdict: ok; warn for a run that works but
    is slower or less trustworthy; BAD for a run that fails. fix: the repair, "" if it is ok.
    """

    what: str
    detail: str
    verdict: str = OK
    fix: str = ""


@dataclass
class Report:
    """The facts of the ranks so far.

    choices: of a session that was opened and closed again; error: why there is none. step: the
    ranks' current step, "" at the end.
    """

    ranks: list[RankFacts] = field(default_factory=list)
    choices: list[Finding] = field(default_factory=list)
    error: str = ""
    step: str = ""

    def to_json(self) -> str:
        """Returns the report as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Returns the report of a line of to_json; raises ValueError, TypeError or KeyError."""
        data = json.loads(text)
        ranks = [build_rank(rank) for rank in data["ranks"]]
        choices = [build(Finding, finding) for finding in data["choices"]]
        return cls(ranks, choices, data["error"], data["step"])


@dataclass(frozen=True)
class Answer:
    """The output of a child process.

    code: its exit code; None if it did not start or was ended, and then `error` is the reason.
    """

    code: int | None
    out: str = ""
    err: str = ""
    error: str = ""

    @property
    def problem(self) -> str:
        """Why the child failed, in one line; "" where it succeeded."""
        if self.error or self.code == 0:
            return self.error
        if (self.code or 0) < 0:
            return f"ended by signal {-(self.code or 0)}"
        lines = [line.strip() for line in (self.err or self.out).splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"failed with code {self.code}"


def ask(
    command: Sequence[str], timeout_s: float = ASK_S, first: signal.Signals = signal.SIGKILL
) -> Answer:
    """Runs a command in a session of its own and returns its output. Never raises.

    Takes timeout_s + 4 s at most: a child that hangs in a driver and survives SIGKILL is left
    running. first: the signal that it gets when its time is over; SIGKILL follows.
    """
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        return Answer(None, error=f"{command[0]}: {error.strerror}")
    out = err = ""
    for signum, limit_s in ((None, timeout_s), (first, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            if signum is not None:
                os.killpg(child.pid, signum)
            out, err = child.communicate(timeout=limit_s)
            if signum is None:
                return Answer(child.returncode, out, err)
            break
    return Answer(None, out, err, f"no answer within {timeout_s:.0f} s")


def ask_json(command: Sequence[str], timeout_s: float = ASK_S) -> tuple[Any, str]:
    """Returns (the JSON of the last line that a command printed, why there is none)."""
    answer = ask(command, timeout_s)
    if answer.problem:
        return None, answer.problem
    try:
        return json.loads(answer.out.splitlines()[-1]), ""
    except (ValueError, IndexError):
        return None, f"no answer: {answer.out[-200:]!r}"


def build(kind: type[Kind], data: Mapping[str, Any]) -> Kind:
    """Returns a record from its fields as JSON; ignores fields of another version of mpissd."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in known})


def build_rank(data: Mapping[str, Any]) -> RankFacts:
    """Returns a RankFacts, with its CudaView, from its fields as JSON."""
    return build(RankFacts, {**data, "cuda": data["cuda"] and build(CudaView, data["cuda"])})


def read_machine(config: RunConfig, num_ranks: int, check: Check) -> Machine:
    """Returns the facts of this process and of the launcher that it would use.

    check: raises ConfigError for flags that `run` refuses before MPI starts.
    """
    try:
        mpirun, mpirun_error = _version(launcher()), ""
    except ConfigError as error:
        mpirun, mpirun_error = "", str(error)
    packages = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions()}
    library, library_error = ask_json([sys.executable, "-c", _LIBRARY])
    gpus, gpu_error = read_gpus()
    tasks = os.environ.get("SLURM_NTASKS", "")
    return Machine(
        _versions(*(library or ("", ""))),
        num_ranks,
        mpirun,
        mpirun_error,
        library_error,
        packages=list(packages),
        stray=[name for name in _STRAY if name in os.environ],
        config_error=refusal(replace(config, dry_run=num_ranks), check),
        slurm_tasks=int(tasks) if tasks.isdecimal() else None,
        shm_free=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        gpus=gpus,
        gpu_error=gpu_error,
    )


def refusal(config: RunConfig, check: Check) -> str:
    """Returns why `check` refuses a configuration; "" if it does not."""
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


def _versions(library: str, maps: str) -> dict[str, Sequence[str]]:
    """Returns (version, place) by part. library: MPI's text; maps: the text of /proc/PID/maps."""
    try:
        mpi4py = f"(mpi4py {metadata.version('mpi4py')})"
    except metadata.PackageNotFoundError:
        mpi4py = "(no mpi4py)"
    return {
        "python": (platform.python_version(), sys.executable),
        "mpissd": (mpissd.__version__, str(Path(mpissd.__file__).parent)),
        "MPI library": (one_line(library), f"{library_path(maps)} {mpi4py}"),
    }


def one_line(library: str) -> str:
    """Returns the name and version from an MPI library's long version text: "Open MPI v5.0.11"."""
    first = library.strip("\x00").strip().partition("\n")[0].partition(",")[0]
    return " ".join(first.split())


def library_path(maps: str) -> str:
    """Returns the path of libmpi in the text of /proc/PID/maps; "" without one."""
    match = re.search(r"(/\S*libmpi(?:ch)?\.so\S*)$", maps, re.M)
    return match[1] if match else ""


def _version(command: Sequence[str]) -> str:
    """Returns the launcher's path and the version that it prints."""
    words = " ".join(ask([command[0], "--version"]).out.split())
    match = re.match(r".{0,100}?\d+(\.\w+)+", words)
    path = shutil.which(command[0]) or command[0]
    return f"{path} ({match[0]})" if match else path


def read_gpus(command: str = "nvidia-smi") -> tuple[list[Gpu], str]:
    """Returns (this host's GPUs, why there are none); ([], "") where there is no nvidia-smi."""
    if shutil.which(command) is None:
        return [], ""
    answer = ask([command, f"--query-gpu={','.join(_SMI)}", "--format=csv,noheader,nounits"])
    gpus = [] if answer.problem else parse_gpus(answer.out)
    why = answer.problem or answer.out.strip()[:200] or "no answer"
    return gpus, "" if gpus else f"{command}: {why}"


def parse_gpus(text: str) -> list[Gpu]:
    """Returns the GPUs in the output of nvidia-smi, whose numbers may be "[N/A]"."""
    gpus = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == len(_SMI):
            major = row[1].partition(".")[0]
            capability = float(row[2]) if re.fullmatch(r"\d+\.\d+", row[2]) else None
            gpus.append(Gpu(row[0], int(major) if major.isdecimal() else 0, capability))
    return gpus


def read_cuda(local_rank: int, timeout_s: float = 3 * ASK_S) -> CudaView:
    """Returns CuPy's facts. A child asks it, because an import may crash and a driver hang."""
    program = [sys.executable, "-m", "mpissd.engine.backend.cupy_facts", str(local_rank)]
    view, problem = ask_json(program, timeout_s)
    return CudaView(error=problem) if problem else build(CudaView, view)


def try_ranks(config: RunConfig, num_ranks: int) -> tuple[Report, str]:
    """Starts the ranks; returns (their facts, why there are none).

    Takes the deadline and 14 s at most.
    """
    given = [f"--{name}={text}" for name, text in said(config).items() if name not in _NOT_PASSED]
    command = ranks_command(["doctor", "--json", *given], num_ranks)
    return read(ask(command, config.deadline_s + _MORE_S, signal.SIGTERM))


def read(answer: Answer) -> tuple[Report, str]:
    """Returns the ranks' last report and "", or an empty report and mpirun's complaint."""
    for line in reversed(answer.out.splitlines()):
        try:
            report = Report.from_json(line.partition(MARK)[2])
        except (ValueError, TypeError, KeyError):  # another print, or a line that was cut off
            continue
        if report.step:
            report.error = f"{report.step}: {answer.error or complaint(answer)}"
        return report, ""
    return Report(), answer.error or complaint(answer)


def complaint(answer: Answer) -> str:
    """Returns the informative part of mpirun's output, in one line of up to 300 characters."""
    lines = [line.strip() for line in f"{answer.err}\n{answer.out}".splitlines()]
    printed = [line for line in lines if not set(line) <= set("-=*") and MARK not in line]
    if not printed:
        return f"mpirun printed nothing and ended with code {answer.code}"
    raised = [line for line in printed if _RAISED.match(line)]
    return (raised[-1] if raised else " ".join(printed[:4]))[:300]


def examine_rank(config: RunConfig, check: Check) -> int:
    """Examines the machine as one of the ranks; rank 0 prints its report after each step.

    check: raises ConfigError for flags that a rank of `run` refuses before MPI starts. An error of
    the examined code ends the job with its traceback, of which the command reads the last line.
    Collective.
    """
    from mpissd.engine.comm import mpi_patient

    report = Report(step="MPI_Init")
    # A library that hangs while it holds Python's lock stops every Python thread, so C ends it.
    faulthandler.dump_traceback_later(config.deadline_s + 2 * _MORE_S, exit=True)
    _print(report)
    rank, size, library = mpi_patient.identity()
    maps = Path("/proc/self/maps")
    mine = RankFacts(
        rank,
        socket.gethostname(),
        _versions(library, maps.read_text() if maps.exists() else ""),
        world_size=size,
        launcher_size=launcher_size(),
        cores=sorted(usable_cores()),
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )
    report.ranks = [mine]
    try:
        topology = open_topology(config.drafts, config.groups)
        report.ranks = _all_ranks(topology, mine, config.deadline_s)
        report.step = "opening a session"
        _print(report)
        refused = list(filter(None, topology.world.allgather(refusal(config, check))))
        if refused:
            raise ConfigError(refused[0])
        report.choices = _session(config, report.ranks)
    except (ConfigError, Refused) as error:  # on every rank
        report.error = str(error)
    report.step = ""
    _print(report)
    faulthandler.cancel_dump_traceback_later()
    return 0


def _print(report: Report) -> None:
    if launcher_rank() == 0:
        sys.stdout.write(f"{MARK}{report.to_json()}\n")
        sys.stdout.flush()


def _all_ranks(topology: Topology, mine: RankFacts, deadline_s: float) -> list[RankFacts]:
    """Returns the facts of every rank, on every rank. Collective."""
    has_cupy = importlib.util.find_spec("cupy") is not None
    cuda = read_cuda(topology.local_rank, min(ASK_S, deadline_s / 2)) if has_cupy else None
    role = "draft" if topology.is_draft else "lead" if topology.leads_group else "target"
    own = replace(mine, role=role, local_rank=topology.local_rank, cuda=cuda)
    return [
        build_rank(json.loads(one)) for one in topology.world.allgather(json.dumps(asdict(own)))
    ]


def _session(config: RunConfig, ranks: Sequence[RankFacts]) -> list[Finding]:
    """Opens and closes a session as a run would; returns the lead's findings about its choices.

    Removes the empty folders that it made. Raises ConfigError or Refused on every rank. Collective.
    """
    from mpissd.engine.session.session import opened

    for rank in ranks if config.backend in ("auto", "cupy") else ():
        if rank.cuda and rank.cuda.error and not rank.cuda.cupy:  # its import could end every rank
            raise ConfigError(f"CuPy on rank {rank.rank}: {rank.cuda.error}")
    sharpen_sleep()
    out = Path(config.out)
    made = [p for p in (out / "rounds", out / "profiles", out, *out.parents) if not p.exists()]
    try:
        with opened(config) as session:
            return _choices(session, _reason(session))
    finally:
        for folder in made:
            with suppress(OSError):  # another rank removed it
                folder.rmdir()


def _choices(session: Session, reason: str) -> list[Finding]:
    """Returns the findings about a session's choices. reason: why this all-reduce was chosen."""
    from mpissd.engine.session.doubts import doubts
    from mpissd.engine.session.session import memory_shares

    job, topology, infos = session.job, session.topology, session.infos
    run, backend = job.config, session.backend.name
    device, draft = infos[0].name, infos[topology.first_draft :]
    if draft and draft[0].name != device:
        device = f"{device}, drafts on {draft[0].name}"
    why = "asked for"
    if run.backend == "auto":
        has_cupy = importlib.util.find_spec("cupy") is not None
        why = "CuPy finds no GPU" if has_cupy else "CuPy is not installed"
        why = "CuPy finds a GPU" if backend == "cupy" else why
    findings = [
        Finding("backend", f"{backend} on {device}: {why}"),
        Finding("all-reduce", f"{session.group.name}: {reason}"),
    ]
    if "failed on rank" in reason:
        fix = "in containers: docker run --ipc=host; else: one CUDA_VISIBLE_DEVICES for all ranks"
        findings.append(Finding("CUDA IPC", reason, WARN, fix))
    why = "asked for"
    if not (run.pair or run.target):
        why = "the default here: the largest default pair that fits"
        if backend == "numpy":
            why = "the default here (NumPy on the CPU can hold no more than a toy)"
    pair = job.target.name if job.draft is None else f"{job.target.name} / {job.draft.name}"
    needed = max(job.rank_bytes(4 if backend == "numpy" else 2))
    detail = f"{pair}: {why}; {needed / 1e9:.2f} GB of weights a rank"
    shares = memory_shares(infos, topology.hosts)
    if memory := [have for have in shares if have is not None]:
        detail += f", {min(memory) / 1e9:.1f} GB a rank at least"
    findings.append(Finding("pair", detail))
    if topology.is_lead:
        fix = "a draft of this target: python -m mpissd distill --target=…"
        findings += [Finding("draft", doubt, WARN, fix) for doubt in doubts(job)]
    return findings


def _reason(session: Session) -> str:
    """Returns why this all-reduce was chosen, or why the fastest one was not."""
    from mpissd.engine.comm.mpi_group import open_group

    group, asked = session.group, session.job.config.all_reduce
    if session.topology.tp == 1:
        return "one target rank"
    if session.backend.name == "emulated":
        return "modelled"
    if session.topology.is_draft or group.name not in ("nccl", "staged") or asked != "auto":
        return "asked for" if asked == group.name else _WHY.get(group.name, "")
    try:
        open_group(session.backend, session.topology.group, "oneshot", session.waiter).close()
    except ConfigError as error:  # all target ranks raise the same error here
        return str(error).partition("; allowed")[0]
    return "oneshot opens now, but did not a moment ago"
