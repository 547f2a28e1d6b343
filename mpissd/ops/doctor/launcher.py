"""Gathers the facts that are known before MPI starts, in the process that would call mpirun."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import mpissd
from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.engine.comm.topology import launcher_size
from mpissd.ops.doctor.child import ask
from mpissd.ops.doctor.facts import LaunchFacts
from mpissd.ops.doctor.host import free_space

# A program that prints which library mpi4py loads, without starting MPI.
_LIBRARY = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps([MPI.Get_library_version(), open("/proc/self/maps").read()
                  if __import__("os").path.exists("/proc/self/maps") else ""]))
"""
_PACKAGES = re.compile(r"(cupy.*|nvidia-nccl-.*|numpy|mpi4py|openmpi|mpich|impi-rt|nvmath-python)")
_STRAY = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
_SLURM = (
    "SLURM_JOB_ID SLURM_NTASKS SLURM_JOB_NUM_NODES SLURM_GPUS_ON_NODE SLURM_GPUS "
    "SLURM_JOB_PARTITION SLURM_JOB_END_TIME SLURM_CPUS_ON_NODE"
).split()
_VERSION_S = 20.0


def read_launch(
    config: RunConfig, num_ranks: int, inside: bool, check: Callable[[RunConfig], None]
) -> LaunchFacts:
    """Returns the facts of this process and of the launcher that it would use.

    inside: whether a launcher started this process. check: raises ConfigError for what `run`
    refuses before MPI starts.
    """

    def check_here(config: RunConfig) -> None:
        is_here = launcher_size() == num_ranks
        check(config if is_here else replace(config, dry_run=True, world_size=num_ranks))

    mpirun = os.environ.get("MPIRUN") or "mpirun"
    path = find_mpirun(mpirun)
    library, library_path, error = ("", "", "") if inside else _library()
    installed = packages()
    slurm = {name: os.environ[name] for name in _SLURM if name in os.environ}
    return LaunchFacts(
        python=sys.executable,
        python_version=platform.python_version(),
        mpissd=mpissd.__version__,
        folder=str(Path(mpissd.__file__).parent),
        num_ranks=num_ranks,
        inside=inside,
        mpirun=mpirun,
        mpirun_path=path,
        mpirun_version=_mpirun_version(path) if path else "",
        mpi4py=installed.get("mpi4py", ""),
        mpi4py_error=error,
        library=library,
        library_path=library_path,
        packages=installed,
        stray=[] if inside else [name for name in _STRAY if name in os.environ],
        out=str(Path(config.out).absolute()),
        out_free=free_space(config.out),
        config_error=refusal(config, check_here),
        slurm=slurm,
        slurm_seconds_left=_seconds_left(slurm),
        has_slurm=shutil.which("sbatch") is not None,
    )


def find_mpirun(mpirun: str) -> str:
    """Returns the path of the program in `mpirun`, which may hold options; "" where there is none.

    It is looked for on PATH and beside Python.
    """
    words = mpirun.split()  # Split like a shell splits $MPIRUN.
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), beside])
    return (shutil.which(words[0], path=path) if words else None) or ""


def user_environment() -> dict[str, str]:
    """Returns the variables that were set when this process started, as a run would get them."""
    try:
        first = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return dict(os.environ)
    names = {os.fsdecode(line.partition(b"=")[0]) for line in first}
    return {name: value for name, value in os.environ.items() if name in names}


def packages() -> dict[str, str]:
    """Returns {distribution: version} of installed packages that may contradict each other."""
    versions: dict[str, str] = {}
    for one in metadata.distributions():
        name = str(one.metadata["Name"] or "").lower()
        if _PACKAGES.fullmatch(name):
            versions.setdefault(name, one.version)  # Python imports the first one on its path.
    return dict(sorted(versions.items()))


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
    answer = ask([sys.executable, "-c", _LIBRARY], _VERSION_S, env=user_environment())
    if answer.problem:
        return "", "", answer.problem
    try:
        version, maps = json.loads(answer.out.splitlines()[-1])
    except (ValueError, IndexError):
        return "", "", f"no answer: {answer.out[-200:]!r}"
    return one_line(version), library_path(maps), ""


def _mpirun_version(path: str) -> str:
    """Returns what `mpirun --version` prints, up to the first number; "" where it fails."""
    answer = ask([path, "--version"], _VERSION_S, env=user_environment())
    if answer.problem:
        return ""
    words = " ".join(answer.out.split())
    match = re.match(r".{0,100}?\d+(\.\w+)+", words)
    return match[0] if match else words[:80]


def refusal(config: RunConfig, check: Callable[[RunConfig], None]) -> str:
    """Returns why a configuration is refused before MPI starts; "" if it is not."""
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


def _seconds_left(slurm: Mapping[str, str]) -> float | None:
    """Returns the seconds that are left of the Slurm allocation; None outside one or if unknown."""
    end = slurm.get("SLURM_JOB_END_TIME", "")
    if end.isdigit():
        return int(end) - time.time()
    if "SLURM_JOB_ID" not in slurm:
        return None
    answer = ask(["squeue", "-h", "-j", slurm["SLURM_JOB_ID"], "-o", "%L"], 10.0)
    return None if answer.problem else slurm_seconds(answer.out.strip())


def slurm_seconds(text: str) -> float | None:
    """Returns the seconds in Slurm's [days-][hours:]minutes:seconds; None for other words."""
    days, _, clock = text.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdigit() for part in [*parts, *([days] if days else [])]):
        return None
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + int(part)
    return float(86400 * int(days or 0) + seconds)
