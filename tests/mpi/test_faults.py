"""A rank that dies, stops or raises ends the job, is named once, and nothing is left of the job. A
refusal is one line, with exit code 2, and writes nothing. With --on_draft_loss=ar the targets go on
without their draft if the launcher lets them."""

import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from mpissd.common.errors import FaultError
from mpissd.common.row import Row
from mpissd.lab.gates import violations
from tests.mpi.harness import DIRECT, Job, Started, ended, launch, needs_mpi, shim, start
from tests.mpi.struck import Strike, faults_of
from tests.needs import lack

pytestmark = needs_mpi

NULL = "--backend=emulated --device=null --pair=toy --batch_size=1".split()
LEAD, FOLLOWER, DRAFT = 0, 1, 2
STRIKES = [
    Strike(LEAD, "kill", "join", 1),
    Strike(LEAD, "raise", "verify", 700),
    Strike(FOLLOWER, "exit", "warm-up", 1),
    Strike(FOLLOWER, "hang", "verify", 300),
    Strike(DRAFT, "stop", "growth", 300),
]


def test_the_lead_of_a_second_group_is_named() -> None:
    assert faults_of(Strike(1, "kill", "verify", 300), "--groups=2") == []


@pytest.mark.parametrize("strike", STRIKES, ids=str)
def test_a_struck_rank_is_named_and_the_job_is_gone(strike: Strike) -> None:
    assert faults_of(strike) == []


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_a_full_disk_is_named_and_the_row_is_printed(tmp_path: Path, command: str) -> None:
    """Also where stderr is a file, over which the launcher writes its own lines."""
    out, err = tmp_path / "out", tmp_path / "err"
    out.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(out)]
    if os.geteuid() or subprocess.run(mount).returncode:
        lack("root that may mount a tmpfs")
    try:
        with suppress(OSError):
            (out / "filler").write_bytes(bytes(1 << 17))
        flags = [*NULL, "--rounds=30", f"--out={out}", "--num_drafts=1"]
        flags += ["--mode=ssd"] if command == "run" else ["--repeats=1", "--grid=mode=ssd"]
        shell = f"{DIRECT} 2>{shlex.quote(str(err))}"
        done = ended(Started(["bash", "-c", shell, "mpirun", "2", "mpissd", command, *flags]))
        assert done.code == FaultError.exit_code and "Traceback" not in err.read_text()
        (line,) = [line for line in err.read_text().splitlines() if line.startswith("mpissd: ")]
        assert f"{out}/" in line and line.endswith("No space left on device")
        assert Row.from_dict(json.loads(done.out.splitlines()[-1])).tok_per_s > 0
        assert not [*out.rglob("*.part"), *out.rglob("runs.jsonl")]
    finally:
        subprocess.run(["umount", out], check=True)


@contextmanager
def endless(np_: int, tmp_path: Path, *flags: str, **env: str) -> Iterator[Started]:
    """A job in the midst of its measured rounds."""
    told = [*flags, "--rounds=100000000", "--progress=on", f"--out={tmp_path / 'out'}"]
    with start(np_, "mpissd", "run", *told, env=env) as job:
        job.read_until(" rounds, ")
        yield job


def test_who_ends_the_launcher_reads_one_line(tmp_path: Path) -> None:
    """Ctrl-C goes to the terminal's foreground group."""
    with endless(3, tmp_path, *NULL) as job:
        os.killpg(job.process.pid, signal.SIGINT)
        code, out, err = job.finish()
        assert code != 0 and "schema" not in out
        assert job.is_gone()
    said = err.splitlines()[-1]
    assert "mpissd: ended by signal " in err and err.count("mpissd:") == 1, said
    assert "Traceback" not in err
    assert not (tmp_path / "out" / "runs.jsonl").exists()


def test_a_job_that_is_suspended_as_a_whole_goes_on(tmp_path: Path) -> None:
    """All ranks pause for longer than the deadline: that is job control, no fault."""
    with endless(2, tmp_path, *NULL, "--deadline_s=1") as job:
        ranks = [job.rank(0), job.rank(1)]
        for signum, pause_s in ((signal.SIGSTOP, 2.0), (signal.SIGCONT, 1.5)):
            for pid in ranks:
                os.kill(pid, signum)
            time.sleep(pause_s)
        assert set(ranks) <= set(job.alive())


def test_an_exception_on_the_lead_ends_every_rank(tmp_path: Path) -> None:
    """The rounds are measured, and then the row can't be written: the lead can't name files."""
    env = shim(tmp_path / "sabotage", "import pathlib; pathlib.Path.replace = None", 0)
    done = launch(3, *NULL, "--rounds=5", folder=tmp_path / "out", direct=True, env=env)
    assert done.code not in (0, 2, 3)
    (line,) = done.lines
    assert line.startswith("mpissd: rank 0 (") and "failed in gather: Type" in line
    assert done.err.count("Traceback") == 1
    assert not (tmp_path / "out" / "runs.jsonl").exists()
    assert not list((tmp_path / "out" / "rounds").iterdir())


EMULATED = ("--backend=emulated", "--device=null")


def test_it_is_said_once_and_nothing_is_written(tmp_path: Path) -> None:
    flags = "--backend=emulated", "--device=v100-32", "--pair=70b/1b"
    done = launch(2, *flags, folder=tmp_path / "out")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "needs 136.9 GB a rank and 1.1 GB to spare; the device has 32.0 GB" in done.lines[0]
    assert list(tmp_path.iterdir()) == []


def test_the_rank_that_speaks_is_heard_where_it_is_the_last(tmp_path: Path) -> None:
    """mpirun ends every rank when one has left with an error; rank 0 imports slowly here."""
    flags, env = (*EMULATED, "--mode=sdd"), shim(tmp_path / "slow", "time.sleep(1)", 0)
    done = launch(3, *flags, folder=tmp_path / "out", direct=True, env=env)
    assert done.code == 2
    assert len(done.lines) == 1 and "unknown mode 'sdd'" in done.lines[0]


def test_a_folder_that_only_the_lead_finds_unwritable(tmp_path: Path) -> None:
    """Detected when MPI runs already: every rank exits cleanly."""
    (tmp_path / "rounds").write_text("a file where a folder has to be")
    done = launch(3, *EMULATED, folder=tmp_path)
    assert done.code == 2 and done.out == ""
    assert len(done.lines) == 1 and "cannot be written" in done.lines[0]
    assert "Traceback" not in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["rounds"]


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_a_launcher_that_is_not_this_mpi_s(rank: str, lines: int, tmp_path: Path) -> None:
    """Two processes were started, each of which believes to be the only one."""
    env = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": rank}
    flags = (*EMULATED, "--mode=ar", f"--out={tmp_path / 'out'}")
    program = '. launch/env.sh; exec "$PYTHON" -m mpi4py -m mpissd run "$@"'
    with Started(["bash", "-c", program, "python", *flags], env) as job:
        done = Job(*job.finish(), tmp_path)
    assert (done.code, done.out, len(done.lines)) == (2, "", lines)
    assert all("it started 2 processes, but MPI sees 1" in line for line in done.lines)
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_leaves_nothing(tmp_path: Path) -> None:
    done = ended(start(2, "mpissd", "run", *EMULATED, "--dry_run", f"--out={tmp_path / 'out'}"))
    assert (done.code, done.out, done.err) == (0, "", "")
    assert list(tmp_path.iterdir()) == []


# Forwards take some ms, in which a rank sleeps: four ranks share two cores without a stir.
BASE = ["--pair=8b/1b", "--backend=emulated", "--device=h100", "--progress=off"]
FIRST = [*BASE, "--mode=ssd", "--seed=11"]
SECOND = [*BASE, "--mode=ssd", "--rounds=50", "--seed=12", "--lookahead=3"]
OWN = "outcome_digest token_digest num_tokens accept_histogram hit_rate rank_digests".split()


def test_two_at_once_are_two_alone_and_one_that_fails_is_ended_alone(tmp_path: Path) -> None:
    alone = launch(2, *SECOND, folder=tmp_path / "alone", direct=True).row
    both = [
        Started(["launch/local.sh", "2", *flags, f"--out={tmp_path}"])
        for flags in ([*FIRST, "--rounds=2000"], SECOND)
    ]
    with both[0] as lost, both[1] as kept:
        os.kill(lost.rank(1), signal.SIGKILL)
        code, _, _ = lost.finish()
        found = Job(*kept.finish(), tmp_path)
        assert lost.is_gone() and kept.is_gone()
    assert code != 0
    assert {key: found.row[key] for key in OWN} == {key: alone[key] for key in OWN}
    assert [row["run_id"] for row in found.saved] == [found.row["run_id"]]


JOB = "--backend=emulated --device=null --pair=toy --rounds=800 --progress=off".split()
RECOVERING = f"{os.environ.get('MPIRUN', 'mpirun').split()[0]} --enable-recovery"
NEEDED = "allowed: on_draft_loss=abort, or mpirun --enable-recovery of Open MPI 5 on one host"


def is_open_mpi_5() -> bool:
    done = ended(Started(["bash", "-c", ". launch/env.sh; $MPIRUN --version"]))
    return "(Open MPI) 5" in done.out


@pytest.mark.parametrize("how", ["kill", "hang"])
def test_a_lost_draft_is_said_and_the_tokens_stay_the_same(tmp_path: Path, how: str) -> None:
    if not is_open_mpi_5():
        lack("Open MPI 5: it alone keeps survivors")
    folder, strike = tmp_path / "out", {"STRIKE": f"2 {how} growth 1500", "MPIRUN": RECOVERING}
    told = ["tests.mpi.struck", "run", *JOB, "--on_draft_loss=ar", f"--out={folder}"]
    told.append("--deadline_s=6")
    done = ended(start(3, *told, env={**strike, "STRUCK": str(tmp_path / "struck")}), folder)
    row, arrays = Row.from_dict(done.row), done.arrays
    assert len(done.lines) == 1 and done.lines[0].startswith("mpissd: rank 2 (")
    assert done.lines[0].endswith("the targets go on with K=0 (--on_draft_loss=ar)")
    lost = row["draft_lost_round"]
    assert 0 < lost < 800 and row["num_rounds"] == 800
    drafted = arrays["sequences"][:, 7]
    assert (drafted[:lost] > 0).all() and not drafted[lost:].any()
    assert row["predicted_tok_per_s"] is None and row["phases_us"]["draft"] is None
    assert row["rank_digests"][2] is None and None not in row["rank_digests"][:2]
    assert not violations(row, arrays)
    forged = row | {"draft_lost_round": lost + 5}
    assert any("backup_lookahead" in line for line in violations(forged, arrays))
    forged = row | {"draft_lost_round": lost - 5}
    assert any("draft_lost_round" in line for line in violations(forged, arrays))
    alone = launch(2, *JOB, "--mode=ar", folder=tmp_path / "ar", direct=True)
    assert row["token_digest"] == alone.row["token_digest"]
    assert np.array_equal(alone.arrays["tokens"], arrays["tokens"][:800])


def test_a_launcher_that_keeps_nobody_is_refused_at_start(tmp_path: Path) -> None:
    done = launch(3, *JOB, "--on_draft_loss=ar", folder=tmp_path, direct=True)
    assert done.code == 2 and len(done.lines) == 1 and done.lines[0].endswith(NEEDED)
