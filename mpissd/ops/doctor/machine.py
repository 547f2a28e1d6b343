"""Reads facts of a machine before MPI starts. Drivers are asked in children with a time limit.

None, "" and an empty list mean that a fact is unknown; a field …_error holds the reason.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import mpissd
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.ranks import launcher
from mpissd.engine.comm.topology import launcher_size

Kind = TypeVar("Kind")
ASK_S = 20.0  # nvidia-smi takes seconds if GPUs are not in persistence mode
_GRACE_S = 2.0  # time for a child to end after a signal
_SMI = "index uuid name driver_version compute_cap memory.used".split()
_PACKAGES = re.compile(r"cupy.*|nvidia-nccl-.*|numpy|mpi4py|openmpi|mpich|impi-rt|nvmath-python")
_STRAY = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"  # set by launchers
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


@dataclass(frozen=True)
class Gpu:
    """One GPU, from nvidia-smi; used_bytes: taken by any process when the doctor started."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: float | None = None
    used_bytes: int | None = None


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
    """Facts that `doctor` reads before MPI starts; inside: whether it is a rank itself."""

    python: str
    python_version: str
    mpissd: str
    folder: str
    num_ranks: int
    inside: bool = False
    mpirun: str = ""
    mpirun_error: str = ""
    mpi4py: str = ""
    library: str = ""
    library_path: str = ""
    library_error: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    stray: list[str] = field(default_factory=list)  # a launcher's variables, set outside one
    config_error: str = ""
    slurm_tasks: int | None = None
    shm_free: int | None = None  # bytes of /dev/shm, which the ranks of a host share
    gpus: list[Gpu] = field(default_factory=list)
    gpu_error: str = ""


def read_machine(
    config: RunConfig, num_ranks: int, inside: bool, check: Callable[[RunConfig], None]
) -> Machine:
    """Returns the facts of this process and of the launcher that it would use.

    check: raises ConfigError for flags that `run` refuses before MPI starts.
    """

    def check_here(config: RunConfig) -> None:
        is_here = launcher_size() == num_ranks
        check(config if is_here else replace(config, dry_run=num_ranks))

    try:
        mpirun, mpirun_error = _version(launcher()), ""
    except ConfigError as error:
        mpirun, mpirun_error = "", str(error)
    packages = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions()}
    library, path, library_error = ("", "", "") if inside else _library()
    gpus, gpu_error = read_gpus()
    tasks = os.environ.get("SLURM_NTASKS", "")
    return Machine(
        python=sys.executable,
        python_version=platform.python_version(),
        mpissd=mpissd.__version__,
        folder=str(Path(mpissd.__file__).parent),
        num_ranks=num_ranks,
        inside=inside,
        mpirun=mpirun,
        mpirun_error=mpirun_error,
        mpi4py=packages.get("mpi4py", ""),
        library=library,
        library_path=path,
        library_error=library_error,
        packages={name: packages[name] for name in packages if _PACKAGES.fullmatch(name)},
        stray=[] if inside else [name for name in _STRAY if name in os.environ],
        config_error=refusal(config, check_here),
        slurm_tasks=int(tasks) if tasks.isdecimal() else None,
        shm_free=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        gpus=gpus,
        gpu_error=gpu_error,
    )


def refusal(config: RunConfig, check: Callable[[RunConfig], None]) -> str:
    """Returns why `check` refuses a configuration; "" if it does not."""
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


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
    for signum, limit_s in ((None, timeout_s), (first, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        try:
            if signum is not None:
                os.killpg(child.pid, signum)
            out, err = child.communicate(timeout=limit_s)
        except (subprocess.TimeoutExpired, ProcessLookupError):
            continue
        if signum is None:
            return Answer(child.returncode, out, err)
        return Answer(None, out, err, f"no answer within {timeout_s:.0f} s")
    return Answer(None, error=f"no answer within {timeout_s:.0f} s")


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
        if len(row) == len(_SMI) and row[0].isdecimal():
            capability = float(row[4]) if re.fullmatch(r"\d+\.\d+", row[4]) else None
            used = int(row[5]) << 20 if row[5].isdecimal() else None
            gpus.append(Gpu(int(row[0]), row[1], row[2], row[3], capability, used))
    return gpus


def read_cuda(local_rank: int, timeout_s: float = 3 * ASK_S) -> CudaView:
    """Returns CuPy's facts. A child asks it, because an import may crash and a driver hang."""
    program = [sys.executable, "-m", "mpissd.engine.backend.cupy_facts", str(local_rank)]
    answer = ask(program, timeout_s)
    if answer.problem:
        return CudaView(error=answer.problem)
    try:
        return build(CudaView, json.loads(answer.out.splitlines()[-1]))
    except (ValueError, IndexError):
        return CudaView(error=f"no answer: {answer.out[-200:]!r}")


def build(kind: type[Kind], data: Mapping[str, Any]) -> Kind:
    """Returns a record from its fields as JSON; ignores fields of another version of mpissd."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in known})


def one_line(library: str) -> str:
    """Returns the name and version from an MPI library's long version text: "Open MPI v5.0.11"."""
    first = library.strip("\x00").strip().partition("\n")[0].partition(",")[0]
    return " ".join(first.split())


def library_path(maps: str) -> str:
    """Returns the path of libmpi in the text of /proc/PID/maps; "" without one."""
    match = re.search(r"(/\S*libmpi(?:ch)?\.so\S*)$", maps, re.M)
    return match[1] if match else ""


def _library() -> tuple[str, str, str]:
    """Returns (version, path, why there is none) of the library that mpi4py would load."""
    answer = ask([sys.executable, "-c", _LIBRARY])
    if answer.problem:
        return "", "", answer.problem
    try:
        version, maps = json.loads(answer.out.splitlines()[-1])
    except (ValueError, IndexError):
        return "", "", f"no answer: {answer.out[-200:]!r}"
    return one_line(version), library_path(maps), ""


def _version(command: Sequence[str]) -> str:
    """Returns the launcher's path and the version that it prints."""
    words = " ".join(ask([command[0], "--version"]).out.split())
    match = re.match(r".{0,100}?\d+(\.\w+)+", words)
    path = shutil.which(command[0]) or command[0]
    return f"{path} ({match[0]})" if match else path
