"""make run and launch/local.sh, with a Python and an mpirun that report how they were called."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# As Python it refuses what has "bad" in it, as `mpissd run --dry_run` does; as mpirun it prints its
# arguments and environment.
FAKE = f"""#!{sys.executable}
import json, os, sys
if "python" in sys.argv[0]:
    open("dry_runs", "a").write(json.dumps(sys.argv[1:]) + "\\n")
    bad = any("bad" in word for word in sys.argv)
    sys.exit(bad and (print("one line", file=sys.stderr) or 2))
print(json.dumps([sys.argv[1:], dict(os.environ)]))
"""


@pytest.fixture
def box(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("python", "mpirun"):
        path = tmp_path / "fakes" / "bin" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(FAKE)
        path.chmod(0o755)
    return tmp_path


def call(box: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    # Without the MAKEFLAGS of a make around the tests, and without the user's MPI settings.
    fresh = {"PATH": os.environ["PATH"], "HOME": str(box)}
    return subprocess.run(
        command,
        cwd=box,
        env={**fresh, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def make_run(box: Path, *variables: str, **env: str) -> subprocess.CompletedProcess[str]:
    fakes = ["PYTHON=fakes/bin/python", "MPIRUN=fakes/bin/mpirun"]
    return call(box, "make", "run", *fakes, *variables, **env)


def launched(box: Path, *variables: str, **env: str) -> tuple[int, list[str]]:
    """How many ranks were launched, with which flags of `mpissd run`."""
    done = make_run(box, *variables, **env)
    assert done.returncode == 0, done.stderr
    argv = json.loads(done.stdout.splitlines()[-1])[0]
    prefix = ["-np", argv[1], "fakes/bin/python", "-m", "mpi4py", "-m", "mpissd", "run"]
    assert argv[: len(prefix)] == prefix
    return int(argv[1]), argv[len(prefix) :]


def variables(box: Path) -> list[str]:
    table = (box / "Makefile").read_text().split("flag_of :=")[1].split("\nflags =")[0]
    return ["TP", *re.findall(r"(\w+):\w+", table), "ARGS"]


def test_nothing_given(box: Path) -> None:
    assert launched(box) == (2, [])


@pytest.mark.parametrize(
    ("variables", "num_ranks", "flags"),
    [
        ("TP=2", 3, []),
        ("MODE=ar", 1, ["--mode=ar"]),
        ("MODE=sd TP=4", 5, ["--mode=sd"]),
        ("MODE=ar DRAFTS=1", 2, ["--mode=ar", "--num_drafts=1"]),
        ("DRAFTS=2 TP=2", 4, ["--num_drafts=2"]),
        ("DRAFTS=0 MODE=sd", 1, ["--mode=sd", "--num_drafts=0"]),
        ("PAIR=70b/1b K=7 SEED=3", 2, ["--pair=70b/1b", "--lookahead=7", "--seed=3"]),
        ("FANOUT=list:4,4,3 OUT=a/b", 2, ["--fan_out=list:4,4,3", "--out=a/b"]),
        ("BACKEND=emulated DEVICE=h100", 2, ["--backend=emulated", "--device=h100"]),
        ("WORKLOAD=markov BATCH=4", 2, ["--workload=markov", "--batch_size=4"]),
        ("ALPHA=0.8 PHIT=0.9 ROUNDS=5", 2, ["--alpha=0.8", "--p_hit=0.9", "--rounds=5"]),
        ("K=", 2, []),
    ],
)
def test_flags(box: Path, variables: str, num_ranks: int, flags: list[str]) -> None:
    assert launched(box, *variables.split()) == (num_ranks, flags)


def test_words_survive(box: Path) -> None:
    assert launched(box, "OUT=it's  a \"$HOME\" `dir`") == (2, ["--out=it's  a \"$HOME\" `dir`"])
    assert launched(box, "ARGS=--a=1 --b='x y'") == (2, ["--a=1", "--b=x y"])


def test_environment_does_not_count(box: Path) -> None:
    assert launched(box, **dict.fromkeys(variables(box), "7")) == (2, [])


def test_python_from_the_environment_does_not_count(box: Path) -> None:
    commands = call(box, "make", "-n", "run", PYTHON="/usr/bin/python2").stdout
    assert "launch/setup.sh" in commands and "PYTHON='.venv/bin/python'" in commands


@pytest.mark.parametrize("bad", ["TP=abc", "TP=0", "TP=1.5", "TP=2 2", "DRAFTS=-1", "DRAFTS=$(x)"])
def test_refuses_a_bad_count(box: Path, bad: str) -> None:
    done = make_run(box, bad)
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"[^\n]* is a whole number, [01] or more\.  Stop\.\n", done.stderr)
    assert bad in done.stderr


def test_refuses_an_unknown_variable(box: Path) -> None:
    done = make_run(box, "LOOKAHEAD=7")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r"[^\n]*LOOKAHEAD is no variable of run; [^\n]*\bK\b[^\n]*\n", done.stderr)


def test_a_refused_flag_starts_no_mpirun(box: Path) -> None:
    done = make_run(box, "MODE=bad", "TP=3")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[0] == "one line"
    dry_run = json.loads((box / "dry_runs").read_text())
    assert dry_run == ["-m", "mpissd", "run", "--dry_run", "--world_size=4", "--mode=bad"]


def test_help_names_every_variable(box: Path) -> None:
    done = call(box, "make")
    assert done.returncode == 0
    for name in variables(box):
        assert re.search(rf"\b{name}=", done.stdout), name


def environment(box: Path, **env: str) -> dict[str, str]:
    """The environment in which launch/local.sh starts mpirun."""
    given = {"PYTHON": "fakes/bin/python", "MPIRUN": "fakes/bin/mpirun", **env}
    done = call(box, "launch/local.sh", "3", **given)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout)[1])


def test_environment_of_the_ranks(box: Path) -> None:
    env = environment(box)
    assert env["OPENBLAS_NUM_THREADS"] == "1"
    assert env["OMPI_MCA_btl"] == "self,vader"
    assert env["PRTE_MCA_rmaps_default_mapping_policy"] == ":oversubscribe"
    assert "MPI4PY_LIBMPI" not in env  # the library beside Python is this mpirun's


def test_users_settings_stay(box: Path) -> None:
    env = environment(box, OMPI_MCA_btl="self,tcp", OMP_NUM_THREADS="4")
    assert (env["OMPI_MCA_btl"], env["OMP_NUM_THREADS"]) == ("self,tcp", "4")


def test_several_nodes_keep_the_network(box: Path) -> None:
    assert "OMPI_MCA_btl" not in environment(box, SLURM_JOB_NUM_NODES="2")
    assert "OMPI_MCA_btl" not in environment(box, MPIRUN="fakes/bin/mpirun --hostfile x")


def test_library_follows_mpirun(box: Path) -> None:
    shutil.copytree(box / "fakes", box / "module")
    libraries = environment(box, MPIRUN="module/bin/mpirun")["MPI4PY_LIBMPI"].split(":")
    assert libraries == ["module/lib", "module/lib64", "libmpi.so.40", "libmpi.so.12"]


@pytest.mark.parametrize("missing", ["PYTHON", "MPIRUN"])
def test_missing_programs(box: Path, missing: str) -> None:
    given = {"PYTHON": "fakes/bin/python", "MPIRUN": "fakes/bin/mpirun", missing: "/nowhere/it"}
    done = call(box, "launch/local.sh", "2", **given)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "/nowhere/it" in done.stderr


@pytest.mark.parametrize("words", [[], ["two"], ["-1"], ["--mode=ar"]])
def test_local_wants_a_number_of_ranks(box: Path, words: list[str]) -> None:
    done = call(box, "launch/local.sh", *words)
    assert done.returncode == 2 and done.stderr.startswith("usage: launch/local.sh NP")
