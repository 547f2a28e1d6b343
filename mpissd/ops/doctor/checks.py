"""Turns facts into the lines of the doctor's table, and prints the table with its verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mpissd.common.config import RunConfig
from mpissd.ops.doctor.facts import BAD, WARN, Finding, Gpu, Machine, RankFacts, Report

_INSTALL = "pip install 'mpissd[mpi]', or load your cluster's MPI (module load openmpi)"
_DRIVER_13, _TURING = 580, 7.5
_SHM_A_RANK = 32 << 20  # shared memory of MPI and NCCL for each rank
# (pattern of an error of mpirun, MPI or a session, how to fix it); the first match is used.
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
    ("launcher mismatch", "set MPIRUN to the mpirun of mpi4py's library"),
    ("no answer within", "try mpirun -np 2 hostname; --deadline_s=300 if the machine is slow"),
    ("is not divisible by tp", "another TP (1, 2, 4 or 8 divide most models), or another PAIR"),
    ("too small for num_drafts", "more ranks: make … TP=1, or fewer drafts: DRAFTS=0 with MODE=sd"),
    ("do not divide into", "G·T + D ranks: make … GROUPS=G TP=T DRAFTS=D starts as many"),
    ("needs", "a larger TP, fewer layers (70b@8L), or a smaller PAIR (PAIR=toy always fits)"),
    ("out=", "another folder: OUT=~/mpissd-out"),
    ("CuPy is not installed", "make venv on a GPU node, or pip install 'mpissd[cuda12]'"),
    ("no usable GPU", "BACKEND=numpy or emulated, or run on a GPU node (srun --gpus=…)"),
    ("visible GPU", "fewer ranks on this node, more GPUs, or BACKEND=emulated"),
    ("share GPU", "one rank a GPU (CUDA_VISIBLE_DEVICES, fewer ranks), or --all_reduce=auto"),
    ("all-reduce", "--all_reduce=auto"),
    ("unknown (pair|model)", "make … PAIR=toy|8b/1b|70b/1b, or --target and --draft"),
    ("on_draft_loss=ar", "MPIRUN='mpirun --enable-recovery' (Open MPI 5), or abort"),
    ("backends by rank", "say which: BACKEND=cupy or BACKEND=numpy"),
    ("CuPy on rank", "reinstall it: pip uninstall -y cupy-cuda12x cupy-cuda13x; make venv"),
    ("Error: ", "a defect of mpissd or of what it imports: the run itself shows the traceback"),
)


@dataclass(frozen=True)
class Facts:
    """All facts about a run.

    report: of the ranks, None if they were not started; trial_error: why they could not start.
    """

    run: RunConfig
    machine: Machine
    report: Report | None = None
    trial_error: str = ""

    @property
    def ranks(self) -> list[RankFacts]:
        """The ranks that were started."""
        return self.report.ranks if self.report else []


def judge(facts: Facts) -> list[Finding]:
    """Returns all findings, in the order of the table."""
    cuda = _cuda(facts) if facts.run.backend in ("auto", "cupy") else ()
    return [*_versions(facts), *_launcher(facts), *_ranks(facts), *cuda, *_choices(facts)]


def render(findings: Sequence[Finding]) -> str:
    """Returns a line for each finding, a line with its fix if it has one, and the verdict."""
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
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        fix = " ".join(faults[0].fix.split())
        verdict = f"doctor: this run fails: {faults[0].what}{more}{noted}. To fix: {fix}"
    return "\n".join([*lines, "", verdict, ""])


def fix_of(error: str) -> str:
    """Returns how to fix the cause of an error message."""
    fixes = (fix for pattern, fix in _FIXES if re.search(pattern, error))
    return next(fixes, "see docs/troubleshooting.md")


def _versions(facts: Facts) -> Iterator[Finding]:
    """Compares Python, mpissd and the MPI library of all ranks with the first rank's."""
    machine = facts.machine
    differs = {
        "python": (WARN, "let every host see one Python: a .venv on a shared file system"),
        "mpissd": (BAD, "install the same version there, or share one .venv between the hosts"),
        "MPI library": (BAD, "load one MPI on every host"),
    }
    for what, (verdict, fix) in differs.items():
        if what == "MPI library" and machine.library_error:
            yield Finding(what, machine.library_error, BAD, fix_of(machine.library_error))
            continue
        own = (facts.ranks[0] if facts.ranks else machine).versions[what]
        detail = " ".join(own)
        other = next((rank for rank in facts.ranks if rank.versions[what][0] != own[0]), None)
        if other is None:
            yield Finding(what, detail)
        else:
            detail += f", but {' '.join(other.versions[what])} on {_place(other)}"
            yield Finding(what, detail, verdict, fix)


def _launcher(facts: Facts) -> Iterator[Finding]:
    """Finds a missing mpirun, one of another MPI, flags that a run refuses, a small allocation.

    Under an mpirun of another MPI each rank believes to be the only one.
    """
    machine, run, num_ranks = facts.machine, facts.run, facts.machine.num_ranks
    if machine.mpirun_error:
        yield Finding("mpirun", machine.mpirun_error, BAD, _INSTALL)
    else:
        yield Finding("mpirun", machine.mpirun)
    if machine.stray:
        names = " ".join(machine.stray)
        detail = f"{names} set, but no launcher started this process"
        yield Finding("launcher", detail, WARN, f"unset {names}")
    first = facts.ranks[0] if facts.ranks else None
    if first is not None and first.world_size is not None:
        sees = f"MPI sees {first.world_size} rank{'s' * (first.world_size != 1)}"
        if first.launcher_size not in (None, first.world_size):
            fix = (
                f"use the mpirun that belongs to {' '.join(first.versions['MPI library'])}, or set "
                "MPI4PY_LIBMPI to the other's libmpi.so"
            )
            detail = f"it started {first.launcher_size} processes, but {sees}"
            yield Finding("launcher", detail, BAD, fix)
        elif first.world_size != num_ranks:
            fix = (
                f"mpirun did not start -np {num_ranks}: start them by the mpirun of this MPI, or "
                "set MPIRUN"
            )
            yield Finding("launcher", f"{sees}, asked were {num_ranks}", BAD, fix)
        else:
            yield Finding("launcher", sees)
    groups = f"G={run.groups}, " * (run.groups > 1)
    tp = (num_ranks - run.drafts) // run.groups
    detail = f"MODE={run.mode}, {groups}T={tp}, D={run.drafts}, world size {num_ranks}"
    if error := machine.config_error:
        yield Finding("run", f"{detail}: {error}", BAD, fix_of(error))
    else:
        yield Finding("run", detail)
    if machine.slurm_tasks is not None and machine.slurm_tasks < num_ranks:
        detail = f"the allocation has {machine.slurm_tasks} tasks, for {num_ranks} ranks"
        yield Finding("Slurm", detail, WARN, f"sbatch --ntasks={num_ranks}")


def _ranks(facts: Facts) -> Iterator[Finding]:
    """Lists the ranks with their hosts and devices; finds too few cores or shared memory."""
    if facts.trial_error:
        yield Finding("ranks", facts.trial_error, BAD, fix_of(facts.trial_error))
    for rank in facts.ranks:
        device = ""
        if rank.cuda is not None and rank.cuda.name:
            device = f"{rank.cuda.name} {rank.cuda.uuid} {rank.cuda.bus_id}  "
        detail = f"{rank.role:6}  {rank.host}  {device}{len(rank.cores)} cores"
        yield Finding(f"rank {rank.rank}", detail)
    for host in dict.fromkeys(rank.host for rank in facts.ranks):
        local = [rank for rank in facts.ranks if rank.host == host]
        cores = set().union(*(rank.cores for rank in local))
        if len(cores) < len(local):
            fix = "shared cores make times noisy: more cores (--cpus-per-task), or a smaller TP"
            yield Finding("cores", f"{len(cores)} for {len(local)} ranks on {host}", WARN, fix)
    shm = facts.machine.shm_free
    if len(facts.ranks) > 1 and shm is not None and shm < _SHM_A_RANK * len(facts.ranks):
        detail = f"{shm / 1e6:.0f} MB free for {len(facts.ranks)} ranks"
        yield Finding("/dev/shm", detail, WARN, "docker run --shm-size=1g, or remove old files")


def _cuda(facts: Facts) -> Iterator[Finding]:
    """Finds a driver, a CUDA runtime and a CuPy that don't fit each other or the ranks."""
    machine = facts.machine
    if machine.gpu_error:
        fix = "nvidia-smi has to answer: driver >= 525; reload it, reboot, or ask your site"
        yield Finding("driver", machine.gpu_error, WARN, fix)
    gpus = machine.gpus
    if gpus and not any(name.startswith("cupy") for name in machine.packages):
        detail = f"not installed, and there are {len(gpus)} × {gpus[0].name}"
        yield Finding("CuPy", detail, WARN, wanted(gpus))
    faults = (_view(facts, rank) for rank in facts.ranks)
    fault = next(filter(None, faults), None)  # other ranks would repeat it
    view = facts.ranks[0].cuda if facts.ranks else None
    if fault is not None:
        yield fault
    elif view is not None and view.count:
        runtime, driver = cuda_version(view.runtime), cuda_version(view.driver)
        yield Finding("CUDA", f"CuPy {view.cupy}, runtime {runtime}, driver serves {driver}")
    rank_of: dict[tuple[str, str], int] = {}
    for rank in facts.ranks:
        if rank.cuda is None or not rank.cuda.bus_id:
            continue
        other = rank_of.setdefault((rank.host, rank.cuda.bus_id), rank.rank)
        if other != rank.rank:
            detail = (
                f"ranks {other} and {rank.rank} share {rank.cuda.uuid or rank.cuda.bus_id} of "
                f"{rank.host} (CUDA_VISIBLE_DEVICES={rank.visible})"
            )
            fix = (
                "one rank a GPU: unset CUDA_VISIBLE_DEVICES, fewer ranks or more GPUs; with a "
                "shared GPU all-reduces are staged through the host"
            )
            yield Finding("GPUs", detail, WARN, fix)


def wanted(gpus: Sequence[Gpu]) -> str:
    """Returns the command that installs the CuPy for the oldest driver and GPU."""
    is_new = all(
        gpu.driver >= _DRIVER_13 and (gpu.capability or _TURING) >= _TURING for gpu in gpus
    )
    return f"pip install 'mpissd[{'cuda13' if gpus and is_new else 'cuda12'}]'"


def _view(facts: Facts, rank: RankFacts) -> Finding | None:
    """Returns a fault of one rank's CuPy; None for none."""
    view, gpus = rank.cuda, facts.machine.gpus
    if view is None:
        return None
    reinstall = f"pip uninstall -y cupy-cuda12x cupy-cuda13x; then {wanted(gpus)}"
    if view.error and not view.cupy:  # `run` would import CuPy as well, and fail
        detail = f"cannot be imported on {_place(rank)}: {view.error}"
        return Finding("CuPy", detail, BAD, reinstall)
    if view.error or not view.count:
        detail = f"{view.error or 'no GPU is visible'} on {_place(rank)}"
        if rank.visible is not None:
            detail += f" (CUDA_VISIBLE_DEVICES={rank.visible})"
        if facts.run.backend == "cupy":
            return Finding("CUDA", detail, BAD, "run on a GPU node, or BACKEND=numpy")
        if gpus:
            fix = "unset CUDA_VISIBLE_DEVICES"
            fix = f"{reinstall}; else: nvidia-smi -q" if rank.visible is None else fix
            return Finding("CUDA", detail, WARN, fix)
        return None
    if rank.local_rank >= view.count:
        detail = f"{view.count} visible GPU(s) for local rank {rank.local_rank}, {_place(rank)}"
        fix = "fewer ranks on this node, more GPUs, or BACKEND=numpy"
        return Finding("CUDA", detail, BAD, fix)
    if (view.runtime or 0) // 1000 > (view.driver or 10**6) // 1000:
        detail = f"runtime {cuda_version(view.runtime)}, driver serves {cuda_version(view.driver)}"
        return Finding("CUDA", f"{detail} on {_place(rank)}", WARN, reinstall)
    if view.nvmath_error:
        fix = "pip install nvmath-python (products are its cuBLAS's)"
        return Finding("nvmath", f"{view.nvmath_error} on {_place(rank)}", BAD, fix)
    return None


def _choices(facts: Facts) -> Iterator[Finding]:
    """Lists the session's choices; reports a session that cannot be opened."""
    report, gpus = facts.report, facts.machine.gpus
    if report is None:
        return
    if report.error:
        first = report.ranks[0] if report.ranks else None
        is_known = first is not None and first.launcher_size not in (None, first.world_size)
        if not is_known:  # `_launcher` has reported a launcher of another MPI
            yield Finding("session", report.error, BAD, fix_of(report.error))
    for finding in report.choices:
        if gpus and finding.detail.endswith(("CuPy finds no GPU", "CuPy is not installed")):
            detail = f"{finding.detail}, though there are {len(gpus)} × {gpus[0].name}"
            fix = "fix CUDA as above, or: make venv on this node installs CuPy"
            finding = Finding("backend", detail, WARN, fix)
        yield finding


def _place(rank: RankFacts) -> str:
    return f"rank {rank.rank} ({rank.host})"


def cuda_version(number: int | None) -> str:
    """Returns CUDA's version number as text: 13020 is "13.2"."""
    return "unknown" if number is None else f"{number // 1000}.{number % 1000 // 10}"
