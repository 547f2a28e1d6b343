"""How facts are gathered: children that fail or hang, what files say, mpirun's last words."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mpissd.common.flags import parse_into
from mpissd.ops.doctor.child import Answer, ask
from mpissd.ops.doctor.config import DoctorConfig
from mpissd.ops.doctor.facts import RankFacts, SessionFacts
from mpissd.ops.doctor.host import blas_threads, control_group_bytes, free_space, peek, watch_error
from mpissd.ops.doctor.launcher import (
    find_mpirun,
    library_path,
    one_line,
    slurm_seconds,
    user_environment,
)
from mpissd.ops.doctor.ranks import Seen
from mpissd.ops.doctor.trial import MARK, flags, read
from tests.needs import needs_linux

SEEN = Seen([RankFacts(0, "h", 1, "p", "3.12", "0.1.0", "/m")], [], SessionFacts(error="x"))


@pytest.mark.parametrize(
    ("script", "code", "problem"),
    [
        ("print('fine')", 0, ""),
        ("import sys; sys.exit('the cause')", 1, "the cause"),
        ("raise ImportError('libx.so')", 1, "ImportError: libx.so"),
        ("import sys; sys.exit(3)", 3, "failed with code 3"),
        ("import os; os.kill(os.getpid(), 11)", -11, "ended by signal 11"),
    ],
)
def test_a_child_that_answers(script: str, code: int, problem: str) -> None:
    answer = ask([sys.executable, "-c", script])
    assert (answer.code, answer.problem) == (code, problem)


def test_a_child_that_is_not_there() -> None:
    assert ask(["/nowhere/it"]).problem == "/nowhere/it: No such file or directory"


@pytest.mark.slow
def test_a_child_that_hangs_is_ended_with_its_own() -> None:
    """The grandchild holds the pipes, and would be waited for."""
    answer = ask(["bash", "-c", "echo $$; trap '' TERM; sleep 60 & wait; sleep 60"], 0.3,
                 end=signal.SIGTERM)  # fmt: skip
    assert answer.problem == "no answer within 0 s"
    with pytest.raises(ProcessLookupError):
        os.kill(int(answer.out), 0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("59:30", 3570.0),
        ("1-00:00:10", 86410.0),
        ("2:00:00", 7200.0),
        ("UNLIMITED", None),
        ("", None),
    ],
)
def test_time_left(text: str, seconds: float | None) -> None:
    assert slurm_seconds(text) == seconds


def test_whose_library() -> None:
    assert one_line("Open MPI v5.0.11, package: Open MPI user@host\x00") == "Open MPI v5.0.11"
    assert one_line("MPICH Version:      4.2.1\nMPICH Release date: x") == "MPICH Version: 4.2.1"
    maps = "7f00-7f01 r-xp 0 00:00 1  /opt/x/lib/libmpi.so.40.40.7\n7f02-7f03 rw-p 0 00:00 0\n"
    assert library_path(maps) == "/opt/x/lib/libmpi.so.40.40.7" and library_path("") == ""


def test_where_mpirun_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_mpirun("/nowhere/mpirun") == find_mpirun("  ") == ""
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_mpirun("mpirun --hostfile 'my hosts'") == str(program)


def test_the_environment_of_the_user() -> None:
    """What this process set for itself is not passed on."""
    program = (
        "import os; os.environ['OURS'] = '1'\n"
        "from mpissd.ops.doctor.launcher import user_environment as u\n"
        "print('OURS' in u(), u()['THEIRS'])"
    )
    env = {**os.environ, "THEIRS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(not Path("/proc/self/environ").exists()), "2"]
    assert user_environment().items() <= os.environ.items()


def test_what_a_control_group_leaves(tmp_path: Path) -> None:
    assert control_group_bytes(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100\n")
    assert control_group_bytes(str(tmp_path)) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert control_group_bytes(str(tmp_path)) == 900


def test_free_space_where_nothing_is_yet(tmp_path: Path) -> None:
    found = free_space(str(tmp_path / "a" / "b"))
    assert found is not None and found > 0


@needs_linux
def test_memory_of_another_process() -> None:
    program = (
        "import ctypes, os, sys\n"
        "kept = ctypes.create_string_buffer(b'here I am')\n"
        "print(ctypes.addressof(kept), flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None and child.stdin is not None
        address = int(child.stdout.readline())
        assert peek(child.pid, address, 9) in (b"here I am", None)  # None: a container forbids it
        assert peek(child.pid, 1, 9) is None
        child.stdin.close()
    mine = ctypes.create_string_buffer(b"own")
    assert peek(os.getpid(), ctypes.addressof(mine), 3) in (b"own", None)


@needs_linux
def test_threads_of_the_blas_that_is_loaded() -> None:
    program = "import numpy; from mpissd.ops.doctor.host import blas_threads as b; print(b())"
    told = []
    for count in ("1", "3"):
        env = {**os.environ, "OPENBLAS_NUM_THREADS": count, "MKL_NUM_THREADS": count}
        done = ask([sys.executable, "-c", program], env=env)
        assert not done.problem
        told.append(done.out.strip())
    if told[0] != "None":  # a BLAS that cannot be asked
        assert told == ["1", str(min(3, os.cpu_count() or 1))]
    assert blas_threads("/nowhere") is None


def test_the_watch_has_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused, raising=False)
    assert "Operation not permitted" in watch_error()
    monkeypatch.delattr(os, "pidfd_open")
    assert "pidfd_open" in watch_error()


def test_the_last_report_counts() -> None:
    line = f"{MARK}{SEEN.to_json()}"
    cut = line[: len(line) // 2]
    assert read(Answer(0, f"noise\n{MARK}{Seen().to_json()}\n{line}\n{cut}\n")) == (SEEN, "")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (Answer(None, error="no answer within 80 s"), "no answer within 80 s"),
        (Answer(1, err="---\nThere are not enough slots\navailable in\n---"),
         "There are not enough slots available in"),
        (Answer(1, err="Traceback\n  File\nImportError: libx\nMPI_ABORT was\nErrorcode: 1"),
         "ImportError: libx"),
        (Answer(7), "it said nothing and ended with code 7"),
    ],
)  # fmt: skip
def test_what_mpirun_complains_of(answer: Answer, complaint: str) -> None:
    assert read(answer) == (Seen(), complaint)


def test_the_ranks_get_the_same_flags() -> None:
    given = {"mode": "sd", "num_drafts": "0", "pair": "8b/1b", "lm_head": "true", "tp": "2"}
    config = parse_into(DoctorConfig, given)
    told = dict(flag.removeprefix("--").split("=", 1) for flag in flags(config.run))
    assert parse_into(DoctorConfig, {**told, "tp": "2"}) == config
    assert "tp" not in told


def test_a_pair_with_weights_is_examined_without_a_prompt() -> None:
    given = parse_into(DoctorConfig, {"workload": "text", "pair": "toy"}).run
    assert (given.workload, given.prompt) == ("text", "Hello")
    assert parse_into(DoctorConfig, {"workload": "text", "prompt_ids": "5"}).run.prompt is None
    assert parse_into(DoctorConfig, {"pair": "toy"}).run.prompt is None
