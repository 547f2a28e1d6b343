"""Checks the run itself: its flags, its folder, its Slurm allocation, and what it would choose."""

from __future__ import annotations

from collections.abc import Iterator

from mpissd.ops.doctor.facts import Facts, SessionFacts
from mpissd.ops.doctor.finding import Finding, bad, ok, ok_if, warn

_OUT_LEAST, _OUT_FEW = 1 << 20, 256 << 20
_SHORT_S = 600.0  # an allocation that ends sooner is worth a warning
# (words in an error message, how to fix it); the first match is used.
_FIXES = (
    ("is not divisible by tp", "another TP (1, 2, 4 or 8 divide most models), or another PAIR"),
    ("too small for num_drafts", "more ranks: make … TP=1, or fewer drafts: DRAFTS=0 with MODE=sd"),
    ("do not divide into", "G·T + D ranks: make … GROUPS=G TP=T DRAFTS=D starts as many"),
    ("needs", "a larger TP, --num_layers=…, or a smaller PAIR (PAIR=toy always fits)"),
    ("out=", "another folder: OUT=~/mpissd-out"),
    ("CuPy is not installed", "make venv on a GPU node, or pip install 'mpissd[cuda12]'"),
    ("no usable GPU", "BACKEND=numpy or emulated, or run on a GPU node (srun --gpus=…)"),
    ("visible GPU", "fewer ranks on this node, more GPUs, or BACKEND=emulated"),
    ("share GPU", "one rank a GPU (CUDA_VISIBLE_DEVICES, fewer ranks), or --all_reduce=auto"),
    ("all-reduce", "--all_reduce=auto"),
    ("unknown pair", "make … PAIR=toy|8b/1b|70b/1b, or --target and --draft"),
    ("unknown model", "make … PAIR=toy|8b/1b|70b/1b, or --target and --draft"),
    (
        "on_draft_loss=ar",
        "MPIRUN='mpirun --enable-recovery' (Open MPI 5), or abort",
    ),
    ("Error: ", "a defect of mpissd or of what it imports: the run itself shows the traceback"),
    ("launcher mismatch", "set MPIRUN to the mpirun of mpi4py's library"),
    ("backends by rank", "say which: BACKEND=cupy or BACKEND=numpy"),
    ("CuPy on rank", "reinstall it: pip uninstall -y cupy-cuda12x cupy-cuda13x; make venv"),
    ("not over after", "look at the lines above; --deadline_s=300 where the machine is slow"),
)


def fix_of(error: str) -> str:
    """Returns how to fix the cause of an error message."""
    return next((fix for words, fix in _FIXES if words in error), "see docs/troubleshooting.md")


def check_request(facts: Facts) -> Iterator[Finding]:
    """Reports an error for which `run` would stop before MPI starts."""
    asked, launch = facts.asked, facts.launch
    groups = f"G={asked.groups}, " * (asked.groups > 1)
    ranks = f"{groups}T={asked.tp}, D={asked.drafts}, world size {launch.num_ranks}"
    detail = f"MODE={asked.mode}, {ranks}"
    if launch.config_error:
        yield bad("run", f"{detail}: {launch.config_error}", fix_of(launch.config_error))
    else:
        yield ok("run", detail)


def check_output(facts: Facts) -> Iterator[Finding]:
    """Finds too little room for rows and rounds. `run` itself checks whether it can write there."""
    launch = facts.launch
    if launch.config_error.startswith("out="):
        return
    if launch.out_free is None:
        yield ok("out", launch.out)
        return
    detail = f"{launch.out}, {launch.out_free / 1e9:.1f} GB free"
    fix = "make room, or another folder: OUT=…"
    if launch.out_free < _OUT_LEAST:
        yield bad("out", detail, fix)
    else:
        yield ok_if(launch.out_free >= _OUT_FEW, "out", detail, fix)


def check_slurm(facts: Facts) -> Iterator[Finding]:
    """Finds a Slurm allocation with too few tasks or GPUs for the ranks, or that ends soon."""
    launch = facts.launch
    job = launch.slurm.get("SLURM_JOB_ID")
    if job is None:
        if launch.has_slurm and not any(host.gpus for host in facts.hosts):
            yield ok("Slurm", "no allocation (on a login node: docs/bridges2.md)")
        return
    tasks, nodes = launch.slurm.get("SLURM_NTASKS", ""), launch.slurm.get("SLURM_JOB_NUM_NODES", "")
    gpus = launch.slurm.get("SLURM_GPUS_ON_NODE", launch.slurm.get("SLURM_GPUS", ""))
    detail = f"job {job}: {tasks or '?'} tasks, {gpus or 'no'} GPUs a node, {nodes or 1} node(s)"
    num_ranks, left = launch.num_ranks, launch.slurm_seconds_left
    is_gpu_job = facts.asked.backend in ("auto", "cupy")
    if tasks.isdigit() and int(tasks) < num_ranks:
        fix = f"sbatch --ntasks={num_ranks} (ranks would share the cores of {tasks})"
        yield warn("Slurm", f"{detail}, for {num_ranks} ranks", fix)
    elif is_gpu_job and gpus.isdigit() and nodes in ("", "1") and int(gpus) < num_ranks:
        fix = f"sbatch --gpus={num_ranks}, or a smaller TP"
        yield warn("Slurm", f"{detail}, for {num_ranks} ranks", fix)
    else:
        yield ok("Slurm", detail)
    if left is not None and left < _SHORT_S:
        fix = "scontrol update needs an operator: start a new job with a longer --time"
        yield warn("Slurm time", f"{left:.0f} s left", fix)


def check_choice(facts: Facts) -> Iterator[Finding]:
    """Says what the run would choose and why; finds a session that cannot be opened."""
    session, asked = facts.session, facts.asked
    if facts.tried and session is None and facts.ranks:
        yield bad("session", "the ranks ended before it was open", fix_of(""))
    if session is None:
        return
    if session.error:
        mismatch = any(r.launcher_size not in (None, r.world_size) for r in facts.ranks)
        if not mismatch and session.error != facts.launch.config_error:
            yield bad("session", session.error, fix_of(session.error))
        return
    yield _backend(facts, session)
    yield ok("all-reduce", f"{session.all_reduce}: {session.all_reduce_why}")
    if session.all_reduce == "oneshot":
        yield ok("CUDA IPC", "target ranks map each other's memory, and sums are right")
    elif "failed on rank" in session.all_reduce_why:
        fix = "in containers: docker run --ipc=host; else: the same CUDA_VISIBLE_DEVICES everywhere"
        yield warn("CUDA IPC", session.all_reduce_why, fix)
    memory = [have for have in session.memory if have is not None]
    fits = f", {min(memory) / 1e9:.1f} GB a rank at least" if memory else ""
    why = "asked for" if asked.pair else f"the default here{_default(session)}"
    draft = f" / {session.draft}" if session.draft else ""
    need = f"{max(session.needs, default=0) / 1e9:.2f} GB of weights a rank"
    yield ok("pair", f"{session.target}{draft}: {why}; {need}{fits}")
    for doubt in session.doubts:
        yield warn("draft", doubt, "a draft of this target: python -m mpissd distill --target=…")


def _default(session: SessionFacts) -> str:
    if session.backend == "numpy":
        return " (NumPy on the CPU can hold no more than a toy)"
    return ": the largest default pair that fits"


def _backend(facts: Facts, session: SessionFacts) -> Finding:
    """Returns the finding about the backend: a warning where a run would leave a GPU idle."""
    asked = facts.asked
    detail = f"{session.backend} on {session.device_name}"
    idle = next((host for host in facts.hosts if host.gpus), None)
    if asked.backend != "auto":
        return ok("backend", f"{detail}: asked for")
    if session.backend == "cupy":
        return ok("backend", f"{detail}: CuPy finds a GPU")
    if idle is not None:
        return warn(
            "backend",
            f"{detail}, though {idle.host} has {len(idle.gpus)} × {idle.gpus[0].name}",
            "fix CUDA as above, or: make venv on this node installs CuPy",
        )
    cuda = next((rank.cuda for rank in facts.ranks if rank.cuda is not None), None)
    why = "CuPy is not installed" if cuda is None else "CuPy finds no GPU"
    return ok("backend", f"{detail}: {why}")
