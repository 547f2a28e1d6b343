"""Checks Python, mpissd, mpirun and the MPI library, and that all ranks have the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mpissd.ops.doctor.facts import Facts, RankFacts
from mpissd.ops.doctor.finding import Finding, bad, ok, warn

_LEAST_PYTHON = (3, 10)
_INSTALL = "pip install 'mpissd[mpi]', or load your cluster's MPI (module load openmpi)"
# (words in mpirun's error, how to fix it); the first match is used.
_COMPLAINTS = (
    (
        ("not enough slots", "slots"),
        "start by launch/local.sh, or export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe "
        "OMPI_MCA_rmaps_base_oversubscribe=1",
    ),
    (
        ("as root",),
        "start by launch/local.sh, or export OMPI_ALLOW_RUN_AS_ROOT=1 "
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
    ),
    (("plm_rsh", "ssh"), "export OMPI_MCA_plm_rsh_agent='' (one host), or install an ssh client"),
    (
        ("No module named mpissd", "No module named 'mpissd'"),
        "install mpissd into this Python: pip install .",
    ),
    (("cannot load MPI library", "libmpi"), "unset MPI4PY_LIBMPI, or point it at mpirun's libmpi"),
    (("no answer within",), "try: mpirun -np 2 hostname; where that hangs too, ask your site"),
)


def check_python(facts: Facts) -> Iterator[Finding]:
    """Finds a Python that is too old or differs between ranks."""
    launch = facts.launch
    number = tuple(int(part) for part in launch.python_version.split(".")[:2] if part.isdigit())
    version = f"{launch.python_version} {launch.python}"
    if number < _LEAST_PYTHON:
        yield bad("python", version, "use Python >= 3.10: make … PYTHON=python3.12")
        return
    for rank in facts.ranks:
        if rank.python_version != launch.python_version:
            where = f"{rank.python_version} {rank.python} on rank {rank.rank} ({rank.host})"
            yield warn(
                "python",
                f"{version}, but {where}",
                "let every host see one Python: a .venv on a shared file system, or PYTHON=…",
            )
            return
    yield ok("python", version)


def check_versions(facts: Facts) -> Iterator[Finding]:
    """Finds ranks with another version or another copy of mpissd."""
    launch = facts.launch
    version = f"{launch.mpissd} {launch.folder}"
    for rank in facts.ranks:
        where = f"{rank.mpissd} {rank.folder} on rank {rank.rank} ({rank.host})"
        if rank.mpissd != launch.mpissd:
            fix = f"install {launch.mpissd} there too, or share one .venv between the hosts"
            yield bad("mpissd", f"{version}, but {where}", fix)
            return
        if rank.folder != launch.folder and rank.host == facts.ranks[0].host:
            fix = "two copies are installed: pip uninstall one, or unset PYTHONPATH"
            yield warn("mpissd", f"{version}, but {where}", fix)
            return
    yield ok("mpissd", version)


def check_mpirun(facts: Facts) -> Iterator[Finding]:
    """Reports a missing mpirun."""
    launch = facts.launch
    if launch.mpirun_path:
        version = f" ({launch.mpirun_version})" if launch.mpirun_version else ""
        yield ok("mpirun", f"{launch.mpirun_path}{version}")
    elif launch.inside:
        yield ok("mpirun", f"{launch.mpirun}: not on PATH, but the ranks are there")
    else:
        yield bad("mpirun", f"{launch.mpirun}: not found", _INSTALL)


def check_library(facts: Facts) -> Iterator[Finding]:
    """Finds an MPI library that mpi4py cannot load, or that is not mpirun's."""
    launch = facts.launch
    if launch.mpi4py_error:
        detail = f"mpi4py {launch.mpi4py or 'missing'}: {launch.mpi4py_error}"
        yield bad("MPI library", detail, _library_fix(launch.mpi4py, launch.mpi4py_error))
        return
    first = facts.ranks[0] if facts.ranks else launch
    library, path = first.library, first.library_path
    detail = f"{library} {path} (mpi4py {launch.mpi4py})"
    other = next((rank for rank in facts.ranks if rank.library != library), None)
    if other is not None:
        where = f"{other.library} on rank {other.rank} ({other.host})"
        yield bad("MPI library", f"{detail}, but {where}", "load one MPI on every host")
        return
    if differ(library, launch.mpirun_version):
        fix = "use one MPI: set MPIRUN to its mpirun, or MPI4PY_LIBMPI to its libmpi.so"
        alone = not facts.ranks or any(r.world_size != r.launcher_size for r in facts.ranks)
        make = bad if facts.tried and alone else warn
        yield make("MPI library", f"{detail}, but mpirun is {launch.mpirun_version}", fix)
        return
    yield ok("MPI library", detail)


def _library_fix(installed: str, error: str) -> str:
    if not installed or "No module named 'mpi4py'" in error:
        return "pip install mpi4py (or: make venv)"
    if "cannot load MPI library" in error or "libmpi" in error:
        return f"unset MPI4PY_LIBMPI, or point it at mpirun's libmpi; or {_INSTALL}"
    return "pip install --force-reinstall mpi4py, and unset PYTHONPATH"


def differ(library: str, mpirun: str) -> bool:
    """Returns whether a library and an mpirun are of two MPIs, or of two versions of Open MPI.

    Both are version texts; the answer is False where one does not name its MPI.
    """
    ours, theirs = family(library), family(mpirun)
    if not ours or not theirs or ours != theirs:
        return bool(ours and theirs)
    numbers = [re.search(r"Open MPI\D*(\d+)\.", text) for text in (library, mpirun)]
    return all(numbers) and len({number[1] for number in numbers if number}) > 1


def family(text: str) -> str:
    """Returns the MPI of a version text, or "". MVAPICH counts as MPICH, whose launcher it has."""
    known = (
        (("Open MPI", "OpenRTE", "PRRTE"), "Open MPI"),
        (("Intel(R) MPI",), "Intel MPI"),
        (("MPICH", "HYDRA"), "MPICH"),
    )
    return next((name for words, name in known if any(w in text for w in words)), "")


def check_launcher(facts: Facts) -> Iterator[Finding]:
    """Finds a launcher that started another number of ranks than MPI sees.

    The launcher then belongs to another MPI, and each rank believes that it is alone.
    """
    launch = facts.launch
    if launch.stray:
        yield warn(
            "launcher",
            f"{', '.join(launch.stray)} set, but no launcher started this process",
            f"unset {' '.join(launch.stray)}",
        )
    if not facts.ranks:
        return
    first = facts.ranks[0]
    launched = first.launcher_size
    if launched is not None and launched != first.world_size:
        yield bad(
            "launcher",
            f"it started {launched} processes, but MPI sees {_ranks(first.world_size)}",
            f"use the mpirun that belongs to {first.library} "
            f"({first.library_path or 'mpi4py'}), or set MPI4PY_LIBMPI to the other's libmpi.so",
        )
    elif first.world_size != launch.num_ranks:
        yield bad(
            "launcher",
            f"MPI sees {_ranks(first.world_size)}, asked were {launch.num_ranks}",
            f"{launch.mpirun or 'mpirun'} did not start -np {launch.num_ranks}: start them by "
            "the mpirun of this MPI, or set MPIRUN",
        )
    else:
        source = "" if launched is None else ", as the launcher says"
        yield ok("launcher", f"MPI sees {_ranks(first.world_size)}{source}")


def check_started(facts: Facts) -> Iterator[Finding]:
    """Lists the ranks with their hosts and devices; finds that they could not be started."""
    if not facts.tried:
        return
    problem = facts.launch.trial_error
    if problem:
        yield bad("ranks", problem, _complaint_fix(problem))
    for rank in facts.ranks:
        yield ok(f"rank {rank.rank}", _seat(rank, facts))


def _complaint_fix(problem: str) -> str:
    fitting = (fix for words, fix in _COMPLAINTS if any(word in problem for word in words))
    return next(fitting, "try: mpirun -np 2 hostname; then the same with python -m mpi4py")


def _seat(rank: RankFacts, facts: Facts) -> str:
    parts = [f"{rank.role:6}", rank.host]
    if rank.cuda is not None and rank.cuda.name:
        numa = "" if rank.gpu_numa is None else f" NUMA {rank.gpu_numa}"
        uuids = {
            gpu.bus_id: gpu.uuid
            for host in facts.hosts
            for gpu in host.gpus
            if host.host == rank.host
        }
        uuid = rank.cuda.uuid or uuids.get(rank.cuda.bus_id.lower(), "")
        parts.append(f"{rank.cuda.name} {uuid} {rank.cuda.bus_id}{numa}")
    nodes = "" if not rank.core_numa else f" NUMA {','.join(map(str, rank.core_numa))}"
    parts.append(f"cores {_spans(rank.cores)}{nodes}")
    return "  ".join(parts)


def _spans(numbers: list[int]) -> str:
    """Returns numbers as text with ranges: [0, 1, 2, 3, 8] is "0-3,8"."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or "unknown"


def _ranks(count: int | None) -> str:
    return f"{count} rank{'s' * (count != 1)}"
