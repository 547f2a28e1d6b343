"""Misconfigurations of the healthy machine, one at a time."""

from __future__ import annotations

from dataclasses import replace

from mpissd.ops.doctor.facts import Facts, SessionFacts
from mpissd.ops.doctor.finding import BAD, WARN
from tests.ops.doctor_facts import (
    HEALTHY,
    HOST,
    LAUNCH,
    RANKS,
    SESSION,
    asked,
    cuda,
    gpu,
    host,
    launch,
    ranks,
    session,
)

BLOCKED = [[True, False, True, True], [False, True, True, True], [True] * 4, [True] * 4]
IDLE_NUMPY = replace(SESSION, backend="numpy", device_name="a CPU", all_reduce="mpi", memory=[])
NO_GPU = replace(
    HEALTHY,
    hosts=[replace(HOST, gpus=[], links={})],
    ranks=[replace(rank, cuda=None, gpu_numa=None) for rank in RANKS],
    session=IDLE_NUMPY,
    launch=replace(LAUNCH, packages={"mpi4py": "4.1.2"}),
)
BOTH = {"cupy-cuda12x": "14.0.1", "cupy-cuda13x": "14.0.1"}
OLDER = [replace(g, driver="570.86.15") for g in HOST.gpus]
VOLTA = [replace(g, name="Tesla V100-SXM2-32GB", capability=7.0) for g in HOST.gpus]
ALONE = [replace(RANKS[0], world_size=1)]
TWO_HOSTS = replace(
    HEALTHY,
    hosts=[HOST, replace(HOST, host="gpu2", locked_bytes=65536, links={})],
    ranks=[*RANKS[:2], replace(RANKS[2], host="gpu2", local_rank=0)],
)
USER = HOST.gpus[0].uuid

SEEDED: list[tuple[str, Facts, str, str, str]] = [
    # what is wrong, the facts, the line that says so, how bad, a word of its fix
    ("an old Python", launch(python_version="3.9.2"), "python", BAD, "PYTHON="),
    ("another Python", ranks(2, python_version="3.10.1"), "python", WARN, "one Python"),
    ("another mpissd", ranks(1, mpissd="0.0.9"), "mpissd", BAD, "install 0.1.0"),
    ("a second copy", ranks(1, folder="/old/mpissd"), "mpissd", WARN, "pip uninstall"),
    (
        "no mpirun",
        replace(
            launch(mpirun_path="", mpirun_version=""), ranks=[], hosts=[], session=None, tried=False
        ),
        "mpirun",
        BAD,
        "pip install",
    ),
    (
        "a library that will not load",
        launch(mpi4py_error="cannot load MPI library"),
        "MPI library",
        BAD,
        "MPI4PY_LIBMPI",
    ),
    (
        "no mpi4py",
        launch(mpi4py="", mpi4py_error="No module named 'mpi4py'"),
        "MPI library",
        BAD,
        "pip install mpi4py",
    ),
    ("two libraries", ranks(2, library="MPICH Version: 4.2.1"), "MPI library", BAD, "one MPI"),
    (
        "another MPI's mpirun that works",
        launch(mpirun_version="HYDRA build details: 4.2"),
        "MPI library",
        WARN,
        "MPIRUN",
    ),
    (
        "an older mpirun",
        launch(mpirun_version="mpirun (Open MPI) 4.1.4"),
        "MPI library",
        WARN,
        "MPIRUN",
    ),
    (
        "memory that cannot be mapped",
        session(
            all_reduce="nccl",
            all_reduce_why="all-reduce 'oneshot': mapping each other's memory failed on rank 1 "
            "(cudaErrorMapBufferObjectFailed)",
        ),
        "CUDA IPC",
        WARN,
        "--ipc=host",
    ),
    (
        "singletons",
        replace(
            HEALTHY,
            ranks=ALONE,
            hosts=[],
            session=SessionFacts(error="launcher mismatch: it started 3 processes, but MPI sees 1"),
        ),
        "launcher",
        BAD,
        "MPI4PY_LIBMPI",
    ),
    ("fewer ranks than asked", replace(launch(num_ranks=4)), "launcher", BAD, "-np 4"),
    ("a launcher's leftovers", launch(stray=["OMPI_COMM_WORLD_SIZE"]), "launcher", WARN, "unset"),
    (
        "T that divides nothing",
        launch(config_error="llama: num_heads=64 is not divisible by tp=3; allowed for it: 1, 2"),
        "run",
        BAD,
        "another TP",
    ),
    ("a full disk", launch(out_free=4096), "out", BAD, "make room"),
    ("a nearly full disk", launch(out_free=100 << 20), "out", WARN, "make room"),
    (
        "an allocation of one task",
        launch(slurm={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1"}),
        "Slurm",
        WARN,
        "--ntasks=3",
    ),
    (
        "an allocation of one GPU",
        launch(slurm={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_GPUS_ON_NODE": "1"}),
        "Slurm",
        WARN,
        "--gpus=3",
    ),
    (
        "a minute left",
        launch(slurm={"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3"}, slurm_seconds_left=60.0),
        "Slurm time",
        WARN,
        "--time",
    ),
    (
        "mpirun refuses root",
        replace(
            launch(trial_error="mpirun has detected an attempt to run as root."),
            ranks=[],
            hosts=[],
            session=None,
        ),
        "ranks",
        BAD,
        "OMPI_ALLOW_RUN_AS_ROOT",
    ),
    (
        "mpirun hangs",
        replace(launch(trial_error="no answer within 80 s"), ranks=[], hosts=[], session=None),
        "ranks",
        BAD,
        "mpirun -np 2 hostname",
    ),
    (
        "two ranks on one GPU",
        replace(HEALTHY, ranks=[*RANKS[:2], replace(RANKS[2], visible="0", cuda=RANKS[0].cuda)]),
        "GPUs",
        WARN,
        "CUDA_VISIBLE_DEVICES",
    ),
    ("fewer cores than ranks", host(cores=2), "cores", WARN, "--cpus-per-task"),
    ("a GPU far from its cores", ranks(1, gpu_numa=1), "NUMA", WARN, "--bind-to"),
    ("uncapped threads", ranks(blas_threads=48), "BLAS threads", WARN, "OPENBLAS_NUM_THREADS=1"),
    ("Docker's shared memory", host(shm_free=64 << 20), "/dev/shm", WARN, "--shm-size"),
    ("a container without CMA", ranks(reads_neighbour=False), "single copy", WARN, "CMA_ENABLE"),
    ("few files", host(open_files=256), "open files", WARN, "ulimit -n"),
    ("little locked memory", TWO_HOSTS, "locked memory", WARN, "ulimit -l"),
    (
        "no pidfd",
        host(watch_error="pidfd_open or an abstract socket: Operation not permitted"),
        "watch",
        WARN,
        "seccomp",
    ),
    ("a slow clock", host(clock_source="hpet", clock_ns=1200.0), "clock", WARN, "tsc"),
    (
        "a driver that hangs",
        host(gpus=[], links={}, gpu_error="nvidia-smi: no answer within 20 s"),
        "driver",
        WARN,
        "nvidia-smi",
    ),
    ("both CuPys", launch(packages=BOTH), "CuPy", WARN, "pip uninstall -y cupy-cuda12x"),
    ("no CuPy", launch(packages={}), "CuPy", WARN, "mpissd[cuda13]"),
    ("a driver too old for CUDA 13", host(gpus=OLDER), "CuPy", WARN, "mpissd[cuda12]"),
    ("a driver too old for any", gpu(2, driver="470.57.02"), "driver", WARN, ">= 525"),
    ("CUDA 13 on Volta", host(gpus=VOLTA), "CuPy", WARN, "mpissd[cuda12]"),
    (
        "a broken CuPy",
        cuda(error="ImportError: libcudart.so.13", cupy=""),
        "CuPy",
        BAD,
        "pip uninstall",
    ),
    (
        "no GPU is visible",
        asked(
            ranks(0, visible="", cuda=replace(RANKS[0].cuda, count=0, error="cudaErrorNoDevice")),
            backend="cupy",
        ),
        "CUDA",
        BAD,
        "BACKEND=numpy",
    ),
    ("more ranks than GPUs", cuda(count=2), "CUDA", BAD, "fewer ranks"),
    ("a runtime newer than the driver", cuda(runtime=14000), "CUDA", WARN, "uninstall"),
    ("no nvmath", cuda(nvmath_error="No module named 'nvmath'"), "nvmath", WARN, "nvmath-python"),
    ("no NCCL", cuda(nccl=None), "NCCL", WARN, "nvidia-nccl-cu12"),
    ("an older NCCL than CuPy's", cuda(nccl=21805), "NCCL", WARN, "LD_LIBRARY_PATH"),
    ("two NCCLs", cuda(1, nccl=22907), "NCCL", WARN, "one .venv"),
    ("no peer access", cuda(peers=BLOCKED), "peer access", WARN, "ACS"),
    (
        "no NVLink",
        host(links={"GPU0": {"GPU1": "SYS"}, "GPU1": {"GPU0": "SYS"}}),
        "NVLink",
        WARN,
        "topo -m",
    ),
    ("throttled clocks", gpu(1, throttle=0x40, clock=345), "GPU 1", WARN, "PERFORMANCE"),
    ("a power cap", gpu(1, throttle=0x4), "GPU 1", WARN, "PERFORMANCE"),
    ("memory errors", gpu(0, ecc_errors=3), "GPU 0", WARN, "reset"),
    ("an exclusive GPU", gpu(2, compute_mode="Exclusive_Process"), "GPU 2", WARN, "-c 0"),
    ("a divided GPU", gpu(0, mig=True), "GPU 0", WARN, "whole GPUs"),
    ("no persistence mode", gpu(0, persistence=False), "GPU 0", WARN, "-pm 1"),
    ("memory that nobody admits to", gpu(0, memory_free=50 << 30), "GPU 0", WARN, "nvidia-smi"),
    (
        "a pair too large",
        session(
            error="llama-3.1-70b at tp=2 needs 70.5 GB a rank and 1.1 GB to "
            "spare; the device has 34.0 GB: use a larger TP"
        ),
        "session",
        BAD,
        "larger TP",
    ),
    (
        "a session that never opens",
        session(error="opening a session: not over after 60 s"),
        "session",
        BAD,
        "--deadline_s",
    ),
    ("a GPU left idle", replace(HEALTHY, session=IDLE_NUMPY), "backend", WARN, "make venv"),
]
