"""The doctor under misconfigurations as they happen: shims on PYTHONPATH, programs on PATH, limits.

Where it says BAD, `run` fails in the same environment; where it does not, `run` works.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.mpi.harness import Started, needs_mpi
from tests.needs import lack, needs_root
from tests.tiny_pair import tiny_pair

pytestmark = needs_mpi

TOY = ("--pair=toy", "--backend=numpy")
FAST = ("--backend=emulated", "--device=null", "--pair=toy")
# As MPICH's mpirun starts processes: under Open MPI's library each believes to be alone.
OTHER_MPIRUN = """#!/bin/bash
if [ "$1" = --version ]; then echo "HYDRA build details:"; echo "    Version: 4.2.1"; exit; fi
np=$2; shift 2
for ((rank = 0; rank < np; rank++)); do PMI_RANK=$rank PMI_SIZE=$np "$@" & done
code=0
for job in $(jobs -p); do wait $job || code=$?; done
exit $code
"""


@dataclass(frozen=True)
class Told:
    """What the doctor said."""

    code: int
    out: str
    err: str

    def line(self, what: str, verdict: str) -> str:
        """The line about `what`, and its fix, which is there unless it is ok."""
        lines = self.out.splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if re.match(rf"{verdict} +{re.escape(what)}  ", line):
                assert ("→" in after) == (verdict != "ok")
                return f"{line}\n{after}"
        raise AssertionError(f"no {verdict} {what}:\n{self.out}{self.err}")


def call(*words: str, env: Mapping[str, str] | None = None) -> Told:
    with Started(words, env) as started:
        done = Told(*started.finish())
        assert "Traceback" not in done.out + done.err
        return done


def doctor(*flags: str, env: Mapping[str, str] | None = None) -> Told:
    return call("launch/doctor.sh", *flags, env=env)


def run(np_: int, *flags: str, env: Mapping[str, str] | None = None) -> int:
    words = ["launch/local.sh", str(np_), *flags, "--rounds=3", "--deadline_s=20"]
    with Started(words, env) as started:
        return started.finish()[0]


def shim(tmp_path: Path, **modules: str) -> dict[str, str]:
    """PYTHONPATH with these modules in front of the real ones."""
    folder = tmp_path / "shim"
    for name, text in modules.items():
        path = folder / name / "__init__.py" if name in ("mpi4py", "cupy") else None
        path = path or folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {"PYTHONPATH": str(folder)}


def program(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / "programs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("tp", "flags"),
    [
        (2, ()),
        (1, (*FAST, "--mode=ar")),
        (1, ("--mode=sd", "--num_drafts=0", "--workload=markov", "--pair=toy")),
    ],
)
def test_where_the_doctor_says_ok_a_run_works(
    tp: int, flags: tuple[str, ...], tmp_path: Path
) -> None:
    told = doctor(f"--tp={tp}", *flags, f"--out={tmp_path}/a/b")
    assert told.code == 0, told.out + told.err
    assert told.out.splitlines()[-1].startswith("doctor: this run works")
    assert told.out.count("doctor:") == 1 and told.err == ""
    assert list(tmp_path.iterdir()) == []  # the folder that it tried is gone again
    drafts = 0 if {"--mode=ar", "--num_drafts=0"} & set(flags) else 1
    told.line("launcher", "ok")
    told.line(f"rank {tp + drafts - 1}", "ok")
    if not flags:
        assert "numpy on" in told.line("backend", "ok")
        assert "mpi: host arrays" in told.line("all-reduce", "ok")
        assert "toy-target / toy-draft: the default here" in told.line("pair", "ok")
    assert run(tp + drafts, *flags, f"--out={tmp_path}/a/b") == 0


@pytest.mark.parametrize(("script", "found"), [("exit 0", "ok"), ("echo torch", "BAD")])
def test_a_learner_is_examined_by_what_its_interpreter_has(
    script: str, found: str, tmp_path: Path
) -> None:
    """The other ranks are examined as without it; `make doctor LEARNERS=1` passes these flags."""
    env = {"MPISSD_LEARNER_PYTHON": program(tmp_path, "python", f"#!/bin/sh\n{script}\n")}
    pair = tiny_pair(tmp_path / "pair")
    flags = ["--mode=sd", "--workload=text", "--prompt_ids=1,2", "--learners=1", "--backend=numpy"]
    flags += [f"--target={pair.target}", f"--draft={pair.draft}", f"--out={tmp_path}/out"]
    told = doctor("--tp=1", *flags, env=env)
    assert told.code == (0 if found == "ok" else 2), told.out + told.err
    assert ("has no torch: pip install" in told.line("run", found)) == (found == "BAD")
    if found == "ok":
        told.line("rank 1", "ok")


BEFORE_MPI: list[tuple[str, tuple[str, ...], dict[str, str], str, str]] = [
    # what is wrong, flags, environment, the line, a word of its fix
    ("no mpirun", TOY, {"MPIRUN": "/nowhere/mpirun"}, "mpirun", "pip install"),
    ("no library", TOY, {"MPI4PY_LIBMPI": "/nowhere/libmpi.so"}, "MPI library", "MPI4PY_LIBMPI"),
    ("T divides nothing", ("--tp=3", *TOY), {}, "run", "another TP"),
    ("too small a GPU", ("--backend=emulated", "--device=v100-32", "--pair=70b/1b"), {}, "run",
     "larger TP"),
    ("a pair that nobody knows", ("--pair=9b/1b",), {}, "run", "PAIR="),
    ("out below a file", ("--out=setup.cfg/x", *TOY), {}, "run", "OUT="),
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "env", "what", "fix"), [b[1:] for b in BEFORE_MPI], ids=[b[0] for b in BEFORE_MPI]
)
def test_what_is_wrong_before_mpi_starts(
    flags: tuple[str, ...], env: dict[str, str], what: str, fix: str, tmp_path: Path
) -> None:
    told = doctor(*flags, env=env)
    assert told.code == 2 and fix in told.line(what, "BAD")
    assert told.out.splitlines()[-1].startswith(f"doctor: this run fails: {what}")
    tp = next((int(flag[5:]) for flag in flags if flag.startswith("--tp=")), 1)
    rest = [flag for flag in flags if not flag.startswith("--tp=")]
    assert run(tp + 1, *rest, env=env) != 0


def test_no_mpi4py(tmp_path: Path) -> None:
    env = shim(tmp_path, mpi4py="raise ModuleNotFoundError(\"No module named 'mpi4py'\")")
    told = doctor(*TOY, env=env)
    assert told.code == 2 and "pip install" in told.line("MPI library", "BAD")
    assert run(2, *TOY, f"--out={tmp_path}", env=env) != 0


def open_mpi() -> str:
    """The file of the Open MPI library that jobs load here, as the doctor names it."""
    found = re.search(r"Open MPI v\S+ (/\S+)", doctor(*FAST, "--mode=ar").out)
    return found[1] if found else lack("Open MPI's library")


def test_an_mpirun_of_another_mpi(tmp_path: Path) -> None:
    """The library is told: beside this mpirun there is none, and elsewhere any or none."""
    env = {
        "MPIRUN": program(tmp_path, "mpirun", OTHER_MPIRUN),
        "MPI4PY_LIBMPI": open_mpi(),
    }
    told = doctor(*FAST, env=env)
    assert told.code == 2
    told.line("MPI library", "BAD")
    assert "started 2 processes, but MPI sees 1 rank" in told.line("launcher", "BAD")
    assert run(2, *FAST, f"--out={tmp_path}/out", env=env) != 0


def test_an_mpirun_with_a_stray_quote() -> None:
    told = doctor(*FAST, env={"MPIRUN": "mpirun '"})
    assert told.code == 2 and "mpirun -np 2 hostname" in told.line("ranks", "BAD")


def test_a_launcher_that_lies() -> None:
    words = (sys.executable, "-m", "mpissd", "doctor", *FAST)
    told = call(*words, env={"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"})
    assert told.code == 2
    assert "started 4 processes, but MPI sees 1 rank" in told.line("launcher", "BAD")


@pytest.mark.parametrize("which", [pytest.param("read-only", marks=needs_root), "a file in it"])
def test_a_folder_that_only_a_write_finds_wrong(which: str, tmp_path: Path) -> None:
    out = Path("/proc/mpissd") if which == "read-only" else tmp_path
    if which == "a file in it":
        (tmp_path / "rounds").write_text("a file where a folder has to be")
    told = doctor(*FAST, f"--out={out}")
    check = "run" if which == "read-only" else "session"  # /proc is known before a rank starts
    assert told.code == 2 and "OUT=" in told.line(check, "BAD")
    assert run(2, *FAST, f"--out={out}") != 0


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("raise ImportError('libcudart.so.13: cannot open shared object file')", "libcudart.so.13"),
        ("import os; os.abort()", "signal 6"),
        pytest.param(
            "import time; time.sleep(600)", "no answer within 3 s", marks=pytest.mark.long
        ),
    ],
)
def test_a_broken_cupy(module: str, found: str, tmp_path: Path) -> None:
    env = shim(tmp_path, cupy=module)
    told = doctor("--pair=toy", "--deadline_s=6", env=env)
    assert told.code == 2 and found in told.line("CuPy", "BAD"), told.out
    if "ImportError" in module:
        assert run(2, "--pair=toy", f"--out={tmp_path}/out", env=env) != 0
        assert doctor(*TOY, "--mode=ar", env=env).code == 0  # nobody asks for CuPy


def test_both_cupys_and_gpus_that_are_left_idle(tmp_path: Path) -> None:
    for name in ("cupy_cuda12x", "cupy_cuda13x"):
        metadata = tmp_path / f"{name}-14.0.1.dist-info" / "METADATA"
        metadata.parent.mkdir()
        told = name.replace("_", "-")
        metadata.write_text(f"Metadata-Version: 2.1\nName: {told}\nVersion: 14.0.1\n")
    listing = "index, uuid, pci.bus_id, name, driver_version, compute_cap\\n" + (
        "0, GPU-1, 00000000:18:00.0, NVIDIA H200, 580.95.05, 9.0"
    )
    script = f"#!/bin/bash\nprintf '{listing}\\n'\n"
    folder = Path(program(tmp_path, "nvidia-smi", script)).parent
    path = f"{folder}:{os.environ['PATH']}"
    found = doctor("--mode=ar", env={"PYTHONPATH": str(tmp_path), "PATH": path})
    assert found.code == 0
    assert "pip uninstall -y cupy-cuda12x cupy-cuda13x" in found.line("CuPy", "warn")
    assert "1 × NVIDIA H200" in found.line("backend", "warn")


def test_what_cupy_tells_of_gpus(tmp_path: Path) -> None:
    """Asked in every rank's child, gathered from all ranks, judged once."""
    env = shim(tmp_path, cupy=Path(__file__).with_name("fake_cupy.py").read_text())
    told = doctor("--tp=2", "--mode=ar", env=env)
    assert told.code == 0, told.out
    uuid = "GPU-01020304-0506-0708-090a-0b0c0d0e0f10"
    assert f"NVIDIA H200 {uuid} 0000:18:00.0" in told.line("rank 1", "ok")
    assert f"ranks 0 and 1 share {uuid}" in told.line("GPUs", "warn")
    assert "runtime 14.0, driver serves 13.0" in told.line("CUDA", "warn")
    assert "2.18.5 loaded, CuPy was built for 2.28.3" in told.line("NCCL", "warn")
    assert "none between ranks 0-1" in told.line("peer access", "warn")


def test_too_few_slots() -> None:
    mpirun = Path(sys.executable).with_name("mpirun")
    if not mpirun.exists():
        lack("Open MPI beside Python")
    env = {
        "MPIRUN": f"{mpirun} --host localhost:1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot",
    }
    told = doctor(*FAST, env=env)
    assert told.code == 2 and "oversubscribe" in told.line("ranks", "BAD")


def test_a_rank_that_hangs(tmp_path: Path) -> None:
    sleeps = (
        "import os, socket, time\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    socket.gethostname = lambda: time.sleep(600)\n"
    )
    told = doctor(*FAST, "--deadline_s=2", env=shim(tmp_path, sitecustomize=sleeps))
    assert told.code == 2 and "not over after 2 s" in told.line("session", "BAD")


def test_another_mpissd_on_one_rank(tmp_path: Path) -> None:
    older = (
        "import os, sys\n"
        f"sys.path.insert(0, {os.getcwd()!r})\n"
        "import mpissd\n"
        "if os.environ.get('OMPI_COMM_WORLD_RANK', os.environ.get('PMI_RANK')) == '1':\n"
        "    mpissd.__version__ = '0.0.9'\n"
    )
    told = doctor(*FAST, env=shim(tmp_path, sitecustomize=older))
    assert told.code == 2 and "0.0.9" in told.line("mpissd", "BAD")


def test_few_files_and_threads_that_were_uncapped_too_late(tmp_path: Path) -> None:
    """NumPy is there before mpissd can cap its threads."""
    threads = {**shim(tmp_path, sitecustomize="import numpy"), "OPENBLAS_NUM_THREADS": "64"}
    command = 'ulimit -n 256; exec launch/doctor.sh "$@"'
    told = call("bash", "-c", command, "doctor", *FAST, "--mode=ar", "--tp=2", env=threads)
    assert told.code == 0
    assert "ulimit -n" in told.line("open files", "warn")
    if len(os.sched_getaffinity(0)) > 1:
        assert "OPENBLAS_NUM_THREADS=1" in told.line("BLAS threads", "warn")


def test_under_the_launch_script_there_is_one_table() -> None:
    told = call("launch/local.sh", "2", *FAST, env={"COMMAND": "doctor"})
    assert told.code == 0 and told.out.count("doctor: this run works") == 1
    assert told.out.count("python ") == 1
    bad = call("launch/local.sh", "2", *FAST, "--out=setup.cfg/x", env={"COMMAND": "doctor"})
    assert bad.code == 2 and bad.out == "" and bad.err.count("doctor: this run fails") == 1


def test_a_mistyped_flag_is_one_line() -> None:
    told = doctor("--mdoe=ar")
    assert told.code == 2 and told.out == "" and told.err.count("\n") == 1
    assert "did you mean '--mode'?" in told.err
