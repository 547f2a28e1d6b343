"""Each fault of a healthy machine is one line of the doctor's table; how its facts are read."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from typing import Any

import pytest

from mpissd.common.config import RunConfig
from mpissd.common.flags import parse_into, said
from mpissd.ops.doctor.checks import Facts, judge, render, wanted
from mpissd.ops.doctor.command import DoctorConfig
from mpissd.ops.doctor.facts import (
    _NOT_PASSED,
    BAD,
    MARK,
    OK,
    WARN,
    Answer,
    CudaView,
    Finding,
    Machine,
    RankFacts,
    Report,
    ask,
    library_path,
    one_line,
    parse_gpus,
    read,
)

GPUS = parse_gpus("NVIDIA H200, 580.95.05, 9.0\n" * 4)
VERSIONS = {
    "python": ("3.12.4", "/home/user/.venv/bin/python"),
    "mpissd": ("0.1.0", "/home/user/mpissd"),
    "MPI library": ("Open MPI v5.0.11", "(mpi4py 4.1.2)"),
}
MACHINE = Machine(
    VERSIONS,
    num_ranks=3,
    mpirun="/usr/bin/mpirun (mpirun (Open MPI) 5.0.11)",
    packages=["cupy-cuda13x", "mpi4py"],
    shm_free=10**11,
    gpus=GPUS,
)
RANKS = [
    RankFacts(
        n,
        "gpu1",
        VERSIONS,
        role=("lead", "target", "draft")[n],
        local_rank=n,
        world_size=3,
        launcher_size=3,
        cores=list(range(48)),
        cuda=CudaView(
            cupy="14.0.1",
            runtime=13020,
            driver=13000,  # of the same generation: it serves a newer runtime
            count=4,
            name="NVIDIA H200",
            uuid=f"GPU-{n}a1b",
            bus_id=f"0000:{n}8:00.0",
        ),
    )
    for n in range(3)
]
CHOICES = [Finding("backend", "cupy on NVIDIA H200: CuPy finds a GPU")]
HEALTHY = Facts(RunConfig(mode="ssd"), MACHINE, Report(RANKS, CHOICES))


def machine(**changes: Any) -> Facts:
    return replace(HEALTHY, machine=replace(MACHINE, **changes))


def report(ranks: list[RankFacts], error: str = "", choices: list[Finding] = CHOICES) -> Facts:
    return replace(HEALTHY, report=Report(ranks, choices, error))


def ranks(which: int | None = None, **changes: Any) -> Facts:
    return report([replace(r, **changes) if which in (None, r.rank) else r for r in RANKS])


def version(what: str, text: str) -> Facts:
    return ranks(2, versions={**VERSIONS, what: (text, "/there")})


def cuda(**changes: Any) -> Facts:
    return report([replace(r, cuda=replace(r.cuda or CudaView(), **changes)) for r in RANKS])


def untried(**changes: Any) -> Facts:
    return replace(HEALTHY, report=None, **changes)


NO_MPIRUN = replace(MACHINE, mpirun="", mpirun_error="no mpirun: load an MPI module")
BLIND = replace(ranks(0, visible="", cuda=CudaView(cupy="14")), run=RunConfig(backend="cupy"))

FAULTS: list[tuple[str, Facts, str, str, str]] = [
    # the fault, the facts, the line's subject, its verdict, a word of its fix
    ("another Python", version("python", "3.10.1"), "python", WARN, "one Python"),
    ("another mpissd", version("mpissd", "0.0.9"), "mpissd", BAD, "the same version"),
    ("no mpirun", untried(machine=NO_MPIRUN), "mpirun", BAD, "pip install"),
    ("no library", machine(library_error="cannot load MPI library"), "MPI library", BAD, "LIBMPI"),
    ("no mpi4py", machine(library_error="No module named 'mpi4py'"), "MPI library", BAD,
     "pip install mpi4py"),
    ("two libraries", version("MPI library", "MPICH 4.2.1"), "MPI library", BAD, "one MPI"),
    ("singletons", report([replace(RANKS[0], world_size=1)], "launcher mismatch: 3", []),
     "launcher", BAD, "MPI4PY_LIBMPI"),
    ("fewer ranks than asked", machine(num_ranks=4), "launcher", BAD, "-np 4"),
    ("a launcher's leftovers", machine(stray=["PMI_SIZE"]), "launcher", WARN, "unset PMI_SIZE"),
    ("a T that divides nothing", machine(config_error="num_heads=64 is not divisible by tp=3"),
     "run", BAD, "another TP"),
    ("an allocation of one task", machine(slurm_tasks=1), "Slurm", WARN, "--ntasks=3"),
    ("a launcher that hangs", untried(trial_error="no answer within 80 s"), "ranks", BAD,
     "mpirun -np 2 hostname"),
    ("two ranks on one GPU", ranks(2, cuda=RANKS[0].cuda), "GPUs", WARN, "CUDA_VISIBLE_DEVICES"),
    ("few cores", ranks(cores=[0, 1]), "cores", WARN, "--cpus-per-task"),
    ("Docker's shared memory", machine(shm_free=64 << 20), "/dev/shm", WARN, "--shm-size"),
    ("a driver that hangs", machine(gpus=[], gpu_error="nvidia-smi: no answer within 20 s"),
     "driver", WARN, "nvidia-smi"),
    ("no CuPy", machine(packages=[]), "CuPy", WARN, "mpissd[cuda13]"),
    ("a broken CuPy", cuda(error="libcudart.so.13", cupy=""), "CuPy", BAD, "pip uninstall"),
    ("an old driver", cuda(error="CUDA driver version is insufficient"), "CUDA", WARN, "mpissd["),
    ("no visible GPU", BLIND, "CUDA", BAD, "BACKEND=numpy"),
    ("more ranks than GPUs", cuda(count=2), "CUDA", BAD, "fewer ranks"),
    ("a runtime newer than the driver", cuda(runtime=14000), "CUDA", WARN, "uninstall"),
    ("no nvmath", cuda(nvmath_error="No module named 'nvmath'"), "nvmath", BAD, "nvmath-python"),
    ("too large a pair", report(RANKS, "70b at tp=2 needs 70.5 GB a rank", []), "session", BAD,
     "larger TP"),
    ("an idle GPU", report(RANKS, "", [Finding("backend", "numpy on a CPU: CuPy finds no GPU")]),
     "backend", WARN, "make venv"),
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
    on_a_cpu = report(
        [replace(rank, cuda=None) for rank in RANKS],
        choices=[Finding("backend", "numpy on a CPU: CuPy is not installed")],
    )
    on_a_cpu = replace(on_a_cpu, machine=replace(MACHINE, gpus=[], packages=[]))
    emulated = replace(HEALTHY, run=RunConfig(backend="emulated"))
    for facts in (HEALTHY, on_a_cpu, emulated):
        assert [finding for finding in judge(facts) if finding.verdict != OK] == []
        assert render(judge(facts)).endswith("\ndoctor: this run works\n")


def test_the_cupy_of_a_driver_and_of_gpus() -> None:
    """nvidia-smi may not know everything."""
    odd, old, volta = parse_gpus(
        '"NVIDIA RTX, odd", 580.1, [N/A]\na line that is no GPU\nA100, 525.147.05, 8.0\n'
        "Tesla V100-SXM2-32GB, 580.95.05, 7.0\n"
    )
    assert (odd.name, odd.capability, old.driver) == ("NVIDIA RTX, odd", None, 525)
    assert parse_gpus("No devices were found\n") == []
    extras = [wanted(gpus)[-8:-2] for gpus in ([odd], [odd, old], [volta], [])]
    assert extras == ["cuda13", "cuda12", "cuda12", "cuda12"]


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("print('fine')", ""),
        ("raise ImportError('libx.so')", "ImportError: libx.so"),
        ("import os; os.kill(os.getpid(), 11)", "ended by signal 11"),
    ],
)
def test_a_child_answers(script: str, problem: str) -> None:
    assert ask([sys.executable, "-S", "-c", script]).problem == problem


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
    first, second = Report(step="MPI_Init"), Report([replace(RANKS[0], versions={})], CHOICES)
    lines = [f"{MARK}{each.to_json()}" for each in (first, second)]
    cut = lines[1][: len(lines[1]) // 2]
    assert read(Answer(0, "\n".join(["noise", *lines, cut]))) == (second, "")
    hung, _ = read(Answer(None, lines[0], error="no answer within 70 s"))
    assert hung.error == "MPI_Init: no answer within 70 s"


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
    assert read(answer) == (Report(), complaint)


def test_the_ranks_get_the_same_flags() -> None:
    given = {"mode": "sd", "num_drafts": "0", "pair": "8b/1b", "lm_head": "true", "tp": "2"}
    config = parse_into(DoctorConfig, given)
    passed = {name: text for name, text in said(config.run).items() if name not in _NOT_PASSED}
    assert parse_into(DoctorConfig, {**passed, "tp": "2"}) == config
    text = parse_into(DoctorConfig, {"workload": "text", "pair": "toy"}).run
    assert (text.workload, text.prompt) == ("text", "Hello")  # a prompt that only the trial needs
