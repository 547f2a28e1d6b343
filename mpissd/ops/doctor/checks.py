"""Turns facts into the lines of the doctor's table, and prints the table with its verdict."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mpissd.common.config import RunConfig
from mpissd.ops.doctor.machine import Gpu, Machine
from mpissd.ops.doctor.ranks import RankFacts, SessionFacts

OK, WARN, BAD = "ok", "warn", "BAD"
_INSTALL = "pip install 'mpissd[mpi]', or load your cluster's MPI (module load openmpi)"
_DRIVER_13, _DRIVER_12, _TURING = 580, 525, 7.5
_BUSY_BYTES = 1 << 30
_SHM_A_RANK = 32 << 20  # shared memory of MPI and NCCL for each rank
_CUPY = re.compile(r"cupy-cuda(\d+)x")
# (words in an error of mpirun or of a session, how to fix it); the first match is used.
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
    ("No module named mpissd", "install mpissd into this Python: pip install ."),
    ("No module named 'mpissd'", "install mpissd into this Python: pip install ."),
    ("libmpi", "unset MPI4PY_LIBMPI, or point it at mpirun's libmpi"),
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
    ("unknown pair", "make … PAIR=toy|8b/1b|70b/1b, or --target and --draft"),
    ("unknown model", "make … PAIR=toy|8b/1b|70b/1b, or --target and --draft"),
    ("on_draft_loss=ar", "MPIRUN='mpirun --enable-recovery' (Open MPI 5), or abort"),
    ("backends by rank", "say which: BACKEND=cupy or BACKEND=numpy"),
    ("CuPy on rank", "reinstall it: pip uninstall -y cupy-cuda12x cupy-cuda13x; make venv"),
    ("Error: ", "a defect of mpissd or of what it imports: the run itself shows the traceback"),
)


@dataclass(frozen=True)
class Facts:
    """All facts about a run.

    ranks: empty if they were not started or could not start (trial_error gives the reason). tried:
    whether they were started.
    """

    run: RunConfig
    machine: Machine
    ranks: list[RankFacts] = field(default_factory=list)
    session: SessionFacts | None = None
    tried: bool = False
    trial_error: str = ""

    @property
    def may_use_gpus(self) -> bool:
        """Whether the backend of the run can be CuPy."""
        return self.run.backend in ("auto", "cupy")


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


def judge(facts: Facts) -> list[Finding]:
    """Returns all findings, in the order of the table."""
    return [
        *_versions(facts),
        *_launcher(facts),
        *_request(facts),
        *_ranks(facts),
        *_cuda(facts),
        *_choices(facts),
    ]


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
    return next((fix for words, fix in _FIXES if words in error), "see docs/troubleshooting.md")


def _versions(facts: Facts) -> Iterator[Finding]:
    """Compares Python, mpissd and the MPI library of all ranks with the launching process."""
    machine = facts.machine
    python = f"{machine.python_version} {machine.python}"
    version = f"{machine.mpissd} {machine.folder}"
    library = f"{machine.library} {machine.library_path} (mpi4py {machine.mpi4py})"
    unlike = [rank for rank in facts.ranks if rank.python_version != machine.python_version]
    if unlike:
        detail = f"{python}, but {unlike[0].python_version} on {_place(unlike[0])}"
        fix = "let every host see one Python: a .venv on a shared file system, or PYTHON=…"
        yield Finding("python", detail, WARN, fix)
    else:
        yield Finding("python", python)
    unlike = [rank for rank in facts.ranks if rank.mpissd != machine.mpissd]
    if unlike:
        detail = f"{version}, but {unlike[0].mpissd} {unlike[0].folder} on {_place(unlike[0])}"
        fix = f"install {machine.mpissd} there too, or share one .venv between the hosts"
        yield Finding("mpissd", detail, BAD, fix)
    else:
        yield Finding("mpissd", version)
    if machine.library_error:
        detail = f"mpi4py {machine.mpi4py or 'missing'}: {machine.library_error}"
        fix = "pip install --force-reinstall mpi4py, and unset PYTHONPATH"
        if not machine.mpi4py or "No module named 'mpi4py'" in machine.library_error:
            fix = "pip install mpi4py (or: make venv)"
        elif "MPI library" in machine.library_error or "libmpi" in machine.library_error:
            fix = f"unset MPI4PY_LIBMPI, or point it at mpirun's libmpi; or {_INSTALL}"
        yield Finding("MPI library", detail, BAD, fix)
        return
    if facts.ranks:
        first = facts.ranks[0]
        library = f"{first.library} {first.library_path} (mpi4py {machine.mpi4py})"
        unlike = [rank for rank in facts.ranks if rank.library != first.library]
    if unlike and unlike[0].library:
        detail = f"{library}, but {unlike[0].library} on {_place(unlike[0])}"
        yield Finding("MPI library", detail, BAD, "load one MPI on every host")
    else:
        yield Finding("MPI library", library)


def _launcher(facts: Facts) -> Iterator[Finding]:
    """Finds a missing mpirun, and one that started another number of ranks than MPI sees.

    Such an mpirun belongs to another MPI, and each rank then runs as a job of one.
    """
    machine = facts.machine
    if not machine.mpirun_error:
        yield Finding("mpirun", machine.mpirun)
    elif machine.inside:
        yield Finding("mpirun", "not on PATH, but the ranks are there")
    else:
        yield Finding("mpirun", machine.mpirun_error, BAD, _INSTALL)
    if machine.stray:
        names = " ".join(machine.stray)
        detail = f"{names} set, but no launcher started this process"
        yield Finding("launcher", detail, WARN, f"unset {names}")
    if not facts.ranks or facts.ranks[0].world_size is None:
        return
    first = facts.ranks[0]
    sees = f"MPI sees {first.world_size} rank{'s' * (first.world_size != 1)}"
    if first.launcher_size not in (None, first.world_size):
        fix = (
            f"use the mpirun that belongs to {first.library} ({first.library_path or 'mpi4py'}), "
            "or set MPI4PY_LIBMPI to the other's libmpi.so"
        )
        detail = f"it started {first.launcher_size} processes, but {sees}"
        yield Finding("launcher", detail, BAD, fix)
    elif first.world_size != machine.num_ranks:
        fix = (
            f"mpirun did not start -np {machine.num_ranks}: start them by the mpirun of this MPI, "
            "or set MPIRUN"
        )
        yield Finding("launcher", f"{sees}, asked were {machine.num_ranks}", BAD, fix)
    else:
        yield Finding("launcher", sees)


def _request(facts: Facts) -> Iterator[Finding]:
    """Reports an error for which `run` would stop before MPI starts, and a small allocation."""
    run, machine = facts.run, facts.machine
    tp = (machine.num_ranks - run.drafts) // run.groups
    groups = f"G={run.groups}, " * (run.groups > 1)
    detail = f"MODE={run.mode}, {groups}T={tp}, D={run.drafts}, world size {machine.num_ranks}"
    if machine.config_error:
        error = machine.config_error
        yield Finding("run", f"{detail}: {error}", BAD, fix_of(error))
    else:
        yield Finding("run", detail)
    if machine.slurm_tasks is not None and machine.slurm_tasks < machine.num_ranks:
        detail = f"the allocation has {machine.slurm_tasks} tasks, for {machine.num_ranks} ranks"
        yield Finding("Slurm", detail, WARN, f"sbatch --ntasks={machine.num_ranks}")


def _ranks(facts: Facts) -> Iterator[Finding]:
    """Lists the ranks with their hosts and devices; finds too few cores and shared GPUs."""
    if facts.trial_error:
        yield Finding("ranks", facts.trial_error, BAD, fix_of(facts.trial_error))
    gpu_of: dict[tuple[str, str], int] = {}
    for rank in facts.ranks:
        device = ""
        if rank.cuda is not None and rank.cuda.name:
            device = f"{rank.cuda.name} {rank.cuda.uuid} {rank.cuda.bus_id}  "
        detail = f"{rank.role:6}  {rank.host}  {device}{len(rank.cores)} cores"
        yield Finding(f"rank {rank.rank}", detail)
        if rank.cuda is None or not rank.cuda.bus_id or not facts.may_use_gpus:
            continue
        other = gpu_of.setdefault((rank.host, rank.cuda.bus_id), rank.rank)
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
    """Finds a driver, a CUDA runtime and a CuPy that don't fit each other or the GPUs."""
    machine = facts.machine
    if not facts.may_use_gpus:
        return
    if machine.gpu_error:
        fix = "nvidia-smi has to answer: driver >= 525; reload it, reboot, or ask your site"
        yield Finding("driver", machine.gpu_error, WARN, fix)
    yield from _extra(machine)
    for rank in facts.ranks:
        finding = _view(facts, rank)
        if finding is not None:  # other ranks would repeat it
            yield finding
            return
    view = facts.ranks[0].cuda if facts.ranks else None
    if view is not None and view.count:
        runtime, driver = cuda_version(view.runtime), cuda_version(view.driver)
        detail = f"CuPy {view.cupy}, runtime {runtime}, driver serves {driver}"
        yield Finding("CUDA", detail)
    used = {rank.cuda.uuid for rank in facts.ranks if rank.cuda is not None}
    for gpu in () if machine.inside else machine.gpus:
        if gpu.uuid in used and (gpu.used_bytes or 0) > _BUSY_BYTES:
            detail = f"{(gpu.used_bytes or 0) / 1e9:.1f} GB of {gpu.name} were taken before"
            fix = "another program uses it: end that, or choose another GPU (CUDA_VISIBLE_DEVICES)"
            yield Finding(f"GPU {gpu.index}", detail, WARN, fix)


def _extra(machine: Machine) -> Iterator[Finding]:
    """Finds a CuPy that is missing, installed twice, or not for this driver and these GPUs."""
    gpus, fix = machine.gpus, wanted(machine.gpus)
    installed = sorted(name for name in machine.packages if _CUPY.fullmatch(name))
    if len(installed) > 1:
        detail = f"{' and '.join(installed)} overwrite each other's files"
        fix = f"pip uninstall -y {' '.join(installed)}; then install the one: {fix}"
        yield Finding("CuPy", detail, WARN, fix)
        return
    if not gpus:
        return
    oldest = min(gpus, key=_driver)
    if _driver(oldest) and _driver(oldest) < _DRIVER_12:
        fix = f"driver >= {_DRIVER_12} (CUDA 12) or >= {_DRIVER_13} (CUDA 13)"
        yield Finding("driver", f"{oldest.driver} is too old for CUDA 12", WARN, fix)
    elif not installed:
        if not any(name.startswith("cupy") for name in machine.packages):
            detail = f"not installed, and there are {len(gpus)} × {gpus[0].name}"
            yield Finding("CuPy", detail, WARN, fix)
    elif installed[0] == "cupy-cuda13x" and "cuda13" not in fix:
        detail = f"{installed[0]} needs driver >= {_DRIVER_13} and a GPU from Turing on; here: "
        detail += f"driver {oldest.driver}, {gpus[0].name}"
        yield Finding("CuPy", detail, WARN, f"pip uninstall -y {installed[0]}; {fix}")


def wanted(gpus: Sequence[Gpu]) -> str:
    """Returns the command that installs the CuPy for the oldest driver and GPU."""
    is_new = all(
        _driver(gpu) >= _DRIVER_13 and (gpu.capability or _TURING) >= _TURING for gpu in gpus
    )
    return f"pip install 'mpissd[{'cuda13' if gpus and is_new else 'cuda12'}]'"


def _view(facts: Facts, rank: RankFacts) -> Finding | None:
    """Returns a fault of one rank's CuPy; None for none."""
    view, gpus = rank.cuda, facts.machine.gpus
    if view is None:
        return None
    if view.error and not view.cupy:  # `run` would import CuPy as well, and fail
        fix = f"pip uninstall -y cupy-cuda12x cupy-cuda13x; then {wanted(gpus)}"
        return Finding("CuPy", f"cannot be imported on {_place(rank)}: {view.error}", BAD, fix)
    if view.error or not view.count:
        detail = f"{view.error or 'no GPU is visible'} on {_place(rank)}"
        if rank.visible is not None:
            detail += f" (CUDA_VISIBLE_DEVICES={rank.visible})"
        if facts.run.backend == "cupy":
            return Finding("CUDA", detail, BAD, "run on a GPU node, or BACKEND=numpy")
        if gpus:
            return Finding("CUDA", detail, WARN, "unset CUDA_VISIBLE_DEVICES; else: nvidia-smi -q")
        return None
    if rank.local_rank >= view.count:
        detail = f"{view.count} visible GPU(s) for local rank {rank.local_rank}, {_place(rank)}"
        fix = "fewer ranks on this node, more GPUs, or BACKEND=numpy"
        return Finding("CUDA", detail, BAD, fix)
    if (view.runtime or 0) // 1000 > (view.driver or 10**6) // 1000:
        detail = f"runtime {cuda_version(view.runtime)}, driver serves {cuda_version(view.driver)}"
        fix = f"pip uninstall CuPy; {wanted([])}"
        return Finding("CUDA", f"{detail} on {_place(rank)}", WARN, fix)
    if view.nvmath_error:
        fix = "pip install nvmath-python (without it forwards are not CUDA graphs)"
        return Finding("nvmath", f"{view.nvmath_error} on {_place(rank)}", WARN, fix)
    return None


def _choices(facts: Facts) -> Iterator[Finding]:
    """Lists the run's choices and their reasons; reports a session that cannot be opened."""
    session, first = facts.session, facts.ranks[0] if facts.ranks else None
    if facts.tried and session is None and first is not None:
        yield Finding("session", "the ranks ended before it was open", BAD, fix_of(""))
    if session is None:
        return
    if session.error:
        is_known = first is not None and first.launcher_size not in (None, first.world_size)
        if not is_known and session.error != facts.machine.config_error:
            yield Finding("session", session.error, BAD, fix_of(session.error))
        return
    detail, gpus = f"{session.backend} on {session.device_name}", facts.machine.gpus
    if facts.run.backend != "auto":
        yield Finding("backend", f"{detail}: asked for")
    elif session.backend == "cupy":
        yield Finding("backend", f"{detail}: CuPy finds a GPU")
    elif gpus:
        detail += f", though there are {len(gpus)} × {gpus[0].name}"
        fix = "fix CUDA as above, or: make venv on this node installs CuPy"
        yield Finding("backend", detail, WARN, fix)
    else:
        has_cupy = any(rank.cuda is not None for rank in facts.ranks)
        why = "CuPy finds no GPU" if has_cupy else "CuPy is not installed"
        yield Finding("backend", f"{detail}: {why}")
    yield Finding("all-reduce", f"{session.all_reduce}: {session.all_reduce_why}")
    if "failed on rank" in session.all_reduce_why:
        fix = "in containers: docker run --ipc=host; else: one CUDA_VISIBLE_DEVICES for all ranks"
        yield Finding("CUDA IPC", session.all_reduce_why, WARN, fix)
    why = "asked for"
    if not (facts.run.pair or facts.run.target):
        is_toy = session.backend == "numpy"
        why = "the default here" + (
            " (NumPy on the CPU can hold no more than a toy)"
            if is_toy
            else ": the largest default pair that fits"
        )
    pair = f"{session.target} / {session.draft}" if session.draft else session.target
    detail = f"{pair}: {why}; {max(session.needs, default=0) / 1e9:.2f} GB of weights a rank"
    memory = [have for have in session.memory if have is not None]
    if memory:
        detail += f", {min(memory) / 1e9:.1f} GB a rank at least"
    yield Finding("pair", detail)
    for doubt in session.doubts:
        fix = "a draft of this target: python -m mpissd distill --target=…"
        yield Finding("draft", doubt, WARN, fix)


def _place(rank: RankFacts) -> str:
    return f"rank {rank.rank} ({rank.host})"


def cuda_version(number: int | None) -> str:
    """Returns CUDA's version number as text: 13020 is "13.2"."""
    return "unknown" if number is None else f"{number // 1000}.{number % 1000 // 10}"


def _driver(gpu: Gpu) -> int:
    """Returns the first number of a driver's version: "580.95.05" gives 580; 0 for none."""
    head = gpu.driver.partition(".")[0]
    return int(head) if head.isdigit() else 0
