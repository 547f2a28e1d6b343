"""Each fault of a healthy machine is one line of the doctor's table; how its facts are read."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.flags import parse_into, said
from mpissd.ops.doctor.checks import BAD, OK, WARN, Facts, judge, render, wanted
from mpissd.ops.doctor.config import DoctorConfig
from mpissd.ops.doctor.machine import (
    Answer,
    CudaView,
    Machine,
    ask,
    library_path,
    one_line,
    parse_gpus,
    read_gpus,
)
from mpissd.ops.doctor.ranks import _NOT_PASSED, MARK, RankFacts, Seen, SessionFacts, read

SMI = "".join(f"{n}, GPU-{n}a1b, NVIDIA H200, 580.95.05, 9.0, 4\n" for n in range(4))
GPUS = parse_gpus(SMI)
MACHINE = Machine(
    python="/home/user/.venv/bin/python",
    python_version="3.12.4",
    mpissd="0.1.0",
    folder="/home/user/mpissd",
    num_ranks=3,
    mpirun="/usr/bin/mpirun (mpirun (Open MPI) 5.0.11)",
    mpi4py="4.1.2",
    library="Open MPI v5.0.11",
    packages={"cupy-cuda13x": "14.0.1", "mpi4py": "4.1.2"},
    shm_free=10**11,
    gpus=GPUS,
)
RANKS = [
    RankFacts(
        rank=n,
        host="gpu1",
        python_version="3.12.4",
        mpissd="0.1.0",
        folder="/home/user/mpissd",
        role=("lead", "target", "draft")[n],
        local_rank=n,
        world_size=3,
        launcher_size=3,
        library="Open MPI v5.0.11",
        cores=list(range(48)),
        cuda=CudaView(
            cupy="14.0.1",
            runtime=13020,
            driver=13000,  # of the same generation: it serves a newer runtime
            count=4,
            name="NVIDIA H200",
            uuid=GPUS[n].uuid,
            bus_id=f"0000:{n}8:00.0",
        ),
    )
    for n in range(3)
]
SESSION = SessionFacts(
    backend="cupy",
    device_name="NVIDIA H200",
    all_reduce="oneshot",
    target="llama-3.1-70b",
    draft="llama-3.2-1b",
    needs=[68_500_000_000] * 2 + [1_900_000_000],
    memory=[150_000_000_000] * 3,
)
HEALTHY = Facts(RunConfig(mode="ssd"), MACHINE, RANKS, SESSION, tried=True)
NUMPY = replace(SESSION, backend="numpy", device_name="a CPU", all_reduce="mpi", memory=[])


def machine(**changes: Any) -> Facts:
    return replace(HEALTHY, machine=replace(MACHINE, **changes))


def gpus(**changes: Any) -> Facts:
    return machine(gpus=[replace(gpu, **changes) for gpu in GPUS])


def ranks(which: int | None = None, **changes: Any) -> Facts:
    every = [replace(r, **changes) if which in (None, r.rank) else r for r in RANKS]
    return replace(HEALTHY, ranks=every)


def cuda(**changes: Any) -> Facts:
    every = [replace(r, cuda=replace(r.cuda or CudaView(), **changes)) for r in RANKS]
    return replace(HEALTHY, ranks=every)


def session(**changes: Any) -> Facts:
    return replace(HEALTHY, session=replace(SESSION, **changes))


def untried(**changes: Any) -> Facts:
    return replace(HEALTHY, ranks=[], session=None, **changes)


NO_MPIRUN = replace(MACHINE, mpirun="", mpirun_error="no mpirun: load an MPI module")
ONE = replace(RANKS[0], world_size=1)
BLIND = replace(ranks(0, visible="", cuda=CudaView(cupy="14")), run=RunConfig(backend="cupy"))

FAULTS: list[tuple[str, Facts, str, str, str]] = [
    # the fault, the facts, the line's subject, its verdict, a word of its fix
    ("another Python", ranks(2, python_version="3.10.1"), "python", WARN, "one Python"),
    ("another mpissd", ranks(1, mpissd="0.0.9"), "mpissd", BAD, "install 0.1.0"),
    ("no mpirun", untried(machine=NO_MPIRUN, tried=False), "mpirun", BAD, "pip install"),
    ("no library", machine(library_error="cannot load MPI library"), "MPI library", BAD, "LIBMPI"),
    ("no mpi4py", machine(mpi4py="", library_error="No module named 'mpi4py'"), "MPI library", BAD,
     "pip install mpi4py"),
    ("two libraries", ranks(2, library="MPICH Version: 4.2.1"), "MPI library", BAD, "one MPI"),
    ("singletons", replace(HEALTHY, ranks=[ONE], session=SessionFacts("launcher mismatch: 3")),
     "launcher", BAD, "MPI4PY_LIBMPI"),
    ("fewer ranks than asked", machine(num_ranks=4), "launcher", BAD, "-np 4"),
    ("a launcher's leftovers", machine(stray=["PMI_SIZE"]), "launcher", WARN, "unset PMI_SIZE"),
    ("a T that divides nothing", machine(config_error="num_heads=64 is not divisible by tp=3"),
     "run", BAD, "another TP"),
    ("an allocation of one task", machine(slurm_tasks=1), "Slurm", WARN, "--ntasks=3"),
    ("root", untried(trial_error="an attempt to run as root."), "ranks", BAD, "ALLOW_RUN_AS_ROOT"),
    ("a launcher that hangs", untried(trial_error="no answer within 80 s"), "ranks", BAD,
     "mpirun -np 2 hostname"),
    ("two ranks on one GPU", ranks(2, cuda=RANKS[0].cuda), "GPUs", WARN, "CUDA_VISIBLE_DEVICES"),
    ("few cores", ranks(cores=[0, 1]), "cores", WARN, "--cpus-per-task"),
    ("Docker's shared memory", machine(shm_free=64 << 20), "/dev/shm", WARN, "--shm-size"),
    ("a driver that hangs", machine(gpus=[], gpu_error="nvidia-smi: no answer within 20 s"),
     "driver", WARN, "nvidia-smi"),
    ("both CuPys", machine(packages={"cupy-cuda12x": "14", "cupy-cuda13x": "14"}), "CuPy", WARN,
     "pip uninstall -y cupy-cuda12x"),
    ("no CuPy", machine(packages={}), "CuPy", WARN, "mpissd[cuda13]"),
    ("a driver too old for CUDA 13", gpus(driver="570.86.15"), "CuPy", WARN, "mpissd[cuda12]"),
    ("a driver too old for any", gpus(driver="470.57.02"), "driver", WARN, ">= 525"),
    ("CUDA 13 on Volta", gpus(capability=7.0), "CuPy", WARN, "mpissd[cuda12]"),
    ("a GPU in use", machine(gpus=[replace(GPUS[0], used_bytes=50 << 30)]), "GPU 0", WARN,
     "another program"),
    ("a broken CuPy", cuda(error="libcudart.so.13", cupy=""), "CuPy", BAD, "pip uninstall"),
    ("no visible GPU", BLIND, "CUDA", BAD, "BACKEND=numpy"),
    ("more ranks than GPUs", cuda(count=2), "CUDA", BAD, "fewer ranks"),
    ("a runtime newer than the driver", cuda(runtime=14000), "CUDA", WARN, "uninstall"),
    ("no nvmath", cuda(nvmath_error="No module named 'nvmath'"), "nvmath", WARN, "nvmath-python"),
    ("no memory of others", session(all_reduce="nccl", all_reduce_why="mapping failed on rank 1"),
     "CUDA IPC", WARN, "--ipc=host"),
    ("too large a pair", session(error="70b at tp=2 needs 70.5 GB a rank"), "session", BAD,
     "larger TP"),
    ("a session that never opens", session(error="opening a session: no answer within 70 s"),
     "session", BAD, "--deadline_s"),
    ("a session that ended", replace(HEALTHY, session=None), "session", BAD, "troubleshooting"),
    ("an idle GPU", replace(HEALTHY, session=NUMPY), "backend", WARN, "make venv"),
    ("a draft of another target", session(doubts=["d was made for t"]), "draft", WARN, "distill"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "what", "verdict", "fix"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_fault_is_the_line_of_its_subject(
    facts: Facts, what: str, verdict: str, fix: str
) -> None:
    faults = [finding for finding in judge(facts) if finding.verdict != OK]
    assert {(fault.what, fault.verdict) for fault in faults} == {(what, verdict)}, faults
    assert fix in faults[0].fix
    last = render(faults).splitlines()[-1]
    assert last.startswith(f"doctor: this run {'fails: ' + what if verdict == BAD else 'works'}")


def test_healthy_machines_have_no_fault() -> None:
    without = replace(
        HEALTHY,
        ranks=[replace(rank, cuda=None) for rank in RANKS],
        machine=replace(MACHINE, gpus=[], packages={}),
        session=NUMPY,
    )
    emulated = replace(HEALTHY, run=RunConfig(backend="emulated"))
    for facts in (HEALTHY, without, emulated):
        assert [finding for finding in judge(facts) if finding.verdict != OK] == []
        assert render(judge(facts)).endswith("\ndoctor: this run works\n")
    assert wanted([]) == "pip install 'mpissd[cuda12]'"


def test_nvidia_smi_may_not_know_everything() -> None:
    first, second = parse_gpus(
        '0, GPU-1, "NVIDIA RTX, odd", [Unknown Error], [N/A], [N/A]\n'
        "a line that is no GPU\n"
        "3, GPU-55aa, Tesla V100-SXM2-32GB, 525.147.05, 7.0, 1021\n"
    )
    assert (first.name, first.capability, first.used_bytes) == ("NVIDIA RTX, odd", None, None)
    assert (second.index, second.capability, second.used_bytes) == (3, 7.0, 1021 << 20)
    for text in ("", "\n", "No devices were found\n", "\x00"):
        assert parse_gpus(text) == []


def test_a_driver_that_does_not_answer(tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/bash\necho 'NVIDIA-SMI has failed'; exit 9\n")
    smi.chmod(0o755)
    assert read_gpus(str(smi)) == ([], f"{smi}: NVIDIA-SMI has failed")
    assert read_gpus("/nowhere/nvidia-smi") == ([], "")


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("print('fine')", ""),
        ("raise ImportError('libx.so')", "ImportError: libx.so"),
        ("import sys; sys.exit(3)", "failed with code 3"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
    ],
)
def test_a_child_answers(script: str, problem: str) -> None:
    assert ask([sys.executable, "-c", script]).problem == problem


def test_a_child_that_hangs_is_ended_with_its_children() -> None:
    """The grandchild holds the pipes."""
    script = "echo $$; trap '' TERM; sleep 60 & wait; sleep 60"
    answer = ask(["bash", "-c", script], 0.3, signal.SIGTERM)
    assert answer.problem == "no answer within 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(answer.out), 0)
    assert ask(["/nowhere/it"]).problem == "/nowhere/it: No such file or directory"


def test_the_name_of_the_library() -> None:
    assert one_line("Open MPI v5.0.11, package: Open MPI user@host\x00") == "Open MPI v5.0.11"
    maps = "7f00-7f01 r-xp 0 00:00 1  /opt/x/lib/libmpi.so.40.40.7\n7f02-7f03 rw-p 0 00:00 0\n"
    assert library_path(maps) == "/opt/x/lib/libmpi.so.40.40.7" and library_path("") == ""


def test_the_last_report_counts() -> None:
    seen = Seen(RANKS[:1], SessionFacts(error="x"))
    line = f"{MARK}{seen.to_json()}"
    cut = line[: len(line) // 2]
    first = f"{MARK}{Seen(step='MPI_Init').to_json()}"
    assert read(Answer(0, f"noise\n{first}\n{line}\n{cut}\n")) == (seen, "")
    hung, _ = read(Answer(None, first, error="no answer within 70 s"))
    assert hung.session == SessionFacts(error="MPI_Init: no answer within 70 s")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(None, error="no answer within 80 s"), "no answer within 80 s"),
        (Answer(1, err="---\nThere are not enough slots\navailable in\n---"),
         "There are not enough slots available in"),
        (Answer(1, err="Traceback\n  File\nImportError: libx\nMPI_ABORT was\nErrorcode: 1"),
         "ImportError: libx"),
        (Answer(7), "mpirun printed nothing and ended with code 7"),
    ],
)  # fmt: skip
def test_what_mpirun_complains_of(answer: Answer, complaint: str) -> None:
    assert read(answer) == (Seen(), complaint)


def test_the_ranks_get_the_same_flags() -> None:
    given = {"mode": "sd", "num_drafts": "0", "pair": "8b/1b", "lm_head": "true", "tp": "2"}
    config = parse_into(DoctorConfig, given)
    passed = {name: text for name, text in said(config.run).items() if name not in _NOT_PASSED}
    assert parse_into(DoctorConfig, {**passed, "tp": "2"}) == config


def test_a_pair_with_weights_is_examined_without_a_prompt() -> None:
    given = parse_into(DoctorConfig, {"workload": "text", "pair": "toy"}).run
    assert (given.workload, given.prompt) == ("text", "Hello")
    assert parse_into(DoctorConfig, {"workload": "text", "prompt_ids": "5"}).run.prompt is None
