"""The warden's verdicts about real processes, and ranks that have one; no MPI."""

import json
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import uuid4

import pytest

from mpissd.common.stage import SIZE, STAGE, WAITING, Page, Stage
from mpissd.ops.warden import Peer, Warden
from tests.needs import missing, needs, needs_linux
from tests.scripts import ROOT, spawn

pytestmark = needs_linux
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]
DEADLINE_S = 10.0


class Job:
    """Three sleeping ranks as a warden would hold them; `pages` are the ranks' own ends."""

    def __init__(self) -> None:
        self.host, self.pages, self.links = Warden(), [], []
        self.processes = [subprocess.Popen(SLEEP) for _ in range(3)]
        told = {"size": 3, "local_size": 3, "host": "h", "deadline_s": DEADLINE_S}
        for rank, process in enumerate(self.processes):
            page = os.memfd_create("page")
            os.ftruncate(page, SIZE)
            self.pages.append(os.dup(page))
            link, own = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.setblocking(False)
            self.links.append(own)
            peer = Peer(link, process.pid, page, {**told, "rank": rank, "may_lose": [2]})
            self.host.peers[rank] = peer
            self.set(rank, STAGE, Stage.ROUNDS)

    def set(self, rank: int, place: int, value: int) -> None:
        os.pwrite(self.pages[rank], bytes([value]), place)

    def end(self, rank: int, signum: int = signal.SIGKILL, *, at: float = 0.0) -> None:
        if signum == signal.SIGTERM:  # as Python's handler does
            self.links[rank].send(bytes([signum]))
        self.processes[rank].send_signal(signum)
        self.processes[rank].wait()
        assert self.host.peers[rank].look()
        self.host._read(self.host.peers[rank])
        self.host.peers[rank].gone_at = at


@pytest.fixture
def job() -> Iterator[Job]:
    found = Job()
    yield found
    for process in found.processes:
        process.kill()
        process.wait()


def test_a_python_without_memfd_shares_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conda's Python was built for a glibc before 2.27."""
    monkeypatch.delattr(os, "memfd_create")
    page = Page()
    page.bytes[STAGE] = Stage.ROUNDS
    fd = page.share()
    assert mmap.mmap(fd, SIZE)[STAGE] == Stage.ROUNDS
    os.close(fd)


def test_a_process_that_got_the_pid_of_a_rank_is_not_killed(job: Job) -> None:
    peer, other = job.host.peers[0], job.processes[1]
    job.end(0)
    peer.pid = other.pid
    peer.kill()
    time.sleep(0.1)
    assert other.poll() is None


def test_all_ended_by_the_launcher_is_nobodys_fault(job: Job) -> None:
    for rank in range(3):
        job.end(rank, signal.SIGTERM)
    found = job.host.dead()
    assert found is not None and found.culprit is None and "signal 15 to all ranks" in found.line
    for peer in job.host.peers.values():  # on one of several hosts the fault may be elsewhere
        peer.about["size"] = 5
    found = job.host.dead()
    assert found is not None and "to the ranks of this host" in found.line


def test_who_is_killed_in_the_start_with_its_launcher_is_nobodys_fault(job: Job) -> None:
    """Ctrl-C: mpirun's SIGKILL overtakes its SIGTERM. It outlives a rank that another one kills."""
    for rank in range(3):
        job.set(rank, STAGE, Stage.START)
        job.end(rank, signal.SIGKILL, at=1.0)
    for gone_at, is_fault in ((1.02, False), (1.3, True)):
        job.host._swept_at = gone_at
        found = job.host.dead()
        assert found is not None and (found.culprit is not None) is is_fault
        assert ("ended by signal 9 to all ranks (Ctrl-C" in found.line) is not is_fault


def test_the_last_message_counts_of_a_rank_that_left_one_unread(job: Job) -> None:
    peer = job.host.peers[0]
    job.host._events.register(peer.link, selectors.EVENT_READ, peer)
    peer.send("lost 2")
    job.links[0].send(bytes([signal.SIGTERM]))
    job.links[0].close()
    job.host._read(peer)
    assert peer.ordered == signal.SIGTERM and peer.is_closed


def test_who_waits_names_who_does_not(job: Job) -> None:
    for rank in (0, 2):
        job.set(rank, WAITING, 1)
    found = job.host.waited(job.host.peers[0], "plan: nothing", 0.0)
    assert found.culprit is job.host.peers[1] and "rank 0 waited: plan: nothing" in found.line
    job.set(1, WAITING, 1)
    found = job.host.waited(job.host.peers[0], "plan", 0.0)
    assert found.culprit is job.host.peers[0] and found.line.endswith("in rounds: plan")
    job.host.peers[0].about["size"] = 4
    assert job.host.waited(job.host.peers[0], "plan", 0.0).line.endswith(
        "plan; a rank of another host may be why"
    )


LEAVER = """
import json, os, socket, sys
from mpissd.common.stage import OWN, STAGE, Stage
link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
link.connect(sys.argv[1])
told = {"rank": 0, "size": 1, "local_size": 1, "host": "h", "launcher": 0, "deadline_s": 10.0}
told["hint"] = sys.argv[3]
socket.send_fds(link, [json.dumps(told).encode()], [OWN.share()])
sys.stdin.readline()
code = int(sys.argv[2])
if code > 128:
    link.send(bytes([code - 128]))
else:
    link.send(json.dumps({"kind": "leave", "code": code}).encode())
    OWN.bytes[STAGE] = Stage.DONE
os._exit(code)
"""
TERMINATED = "mpissd: ended by signal 15 to all ranks (Ctrl-C, scancel or the launcher) in start\n"


RESUMES = "; the same command resumes"


@pytest.mark.parametrize(
    ("code", "hint", "said"),
    [(0, RESUMES, ""), (3, "", ""), (128 + 15, RESUMES, TERMINATED.replace("\n", f"{RESUMES}\n"))],
)
def test_who_ends_between_two_looks_is_judged_by_all_that_it_said(
    code: int,
    hint: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The rank ends between the warden's wait and its next look, however soon that follows."""
    monkeypatch.setattr("mpissd.ops.warden._WAKE_S", 60.0)
    name = str(tmp_path / "warden")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(name)
        listener.listen()
        command = [sys.executable, "-c", LEAVER, name, str(code), hint]
        rank = subprocess.Popen(command, stdin=subprocess.PIPE)

        class Late(Peer):
            def look(self) -> bool:
                if not rank.stdin.closed:
                    rank.stdin.close()
                    os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
                return super().look()

        monkeypatch.setattr("mpissd.ops.warden.Peer", Late)
        Warden().run(listener)
    assert rank.wait() == code
    assert capfd.readouterr().err == said


def test_a_draft_may_be_lost_while_the_lead_measures(job: Job) -> None:
    draft, follower = job.host.peers[2], job.host.peers[1]
    assert job.host.can_do_without(draft) and not job.host.can_do_without(follower)
    job.set(0, STAGE, Stage.GATHER)
    assert not job.host.can_do_without(draft)


@pytest.mark.parametrize("is_stopped", [True, False])
@pytest.mark.parametrize("stage", [Stage.ROUNDS, Stage.GATHER])
def test_a_draft_that_hangs_is_killed_if_the_job_can_go_on(
    job: Job, capfd: pytest.CaptureFixture[str], stage: Stage, is_stopped: bool
) -> None:
    """It is stopped for half of the deadline, or the lead reports it."""
    host, draft = job.host, job.processes[2]
    job.set(0, STAGE, stage)
    if is_stopped:
        draft.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, draft.pid, os.WSTOPPED | os.WNOWAIT)
        host._look(0.0)
        host._looked_at = 0.6 * DEADLINE_S  # this process was not stopped
        host._look(0.6 * DEADLINE_S)
    else:
        report = {"kind": "hangs", "rank": 2, "text": "draft: speculation"}
        job.links[0].send(json.dumps(report).encode())
        host._read(host.peers[0])
    if stage == Stage.GATHER:
        assert host.peers[2].hang is None and draft.poll() is None
        return
    os.waitid(os.P_PID, draft.pid, os.WEXITED | os.WNOWAIT)
    host._look(0.6 * DEADLINE_S)
    (line,) = capfd.readouterr().err.splitlines()
    assert ("stopped in rounds" if is_stopped else "hangs in rounds: rank 0 waits") in line
    assert line.endswith("the targets go on with K=0 (--on_draft_loss=ar)")
    assert job.links[0].recv(64) == b"lost 2"


RANK = """
import os, sys, time
from mpissd.common import guard
from mpissd.common.stage import Stage
rank = int(sys.argv[1])
guard.join(rank, 2, deadline_s=1.0)
guard.stage(Stage.ROUNDS)
print("joined", flush=True)
sys.stdin.readline()  # until all have
{then}
time.sleep(30)
"""


def two_ranks(then: str, inside: Sequence[str] = ()) -> list[subprocess.Popen[str]]:
    """Two ranks of one job that have joined, and then do `then`; inside: what starts each."""
    env = {**os.environ, "PMI_JOBID": uuid4().hex, "MPI_LOCALNRANKS": "2", "PYTHONPATH": str(ROOT)}
    env.pop("OMPI_COMM_WORLD_LOCAL_SIZE", None)
    options = {"env": env, "stdin": subprocess.PIPE, "start_new_session": False}
    command = (*inside, sys.executable, "-c", RANK.format(then=then))
    ranks = [spawn(*command, rank, **options) for rank in range(2)]
    for one in ranks:
        assert one.stdout is not None and one.stdout.readline() == "joined\n"
    for one in ranks:
        one.stdin.write("\n")
        one.stdin.flush()
    return ranks


def ended(ranks: list[subprocess.Popen[str]], within_s: float = 10.0) -> str:
    """Returns the stderr of both ranks after both have ended."""
    try:
        return "".join(one.communicate(timeout=within_s)[1] for one in ranks)
    finally:
        for one in ranks:
            one.kill()


@pytest.mark.parametrize("text", ["'x' * 5000", "'\\U0001f600' * 5000", "'a\\udcff' * 9"])
def test_what_a_rank_says_of_its_end_may_be_long_and_odd(text: str) -> None:
    said = ended(two_ranks(f"if rank: raise ValueError({text})"))
    lines = [line for line in said.splitlines() if line.startswith("mpissd")]
    assert len(lines) == 1 and lines[0].startswith("mpissd: rank 1 (")
    assert " failed in rounds: ValueError: " in lines[0] and "warden.py" not in said


ALONE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@needs("PID namespaces", not missing("unshare") and not subprocess.run([*ALONE, "true"]).returncode)
def test_a_rank_in_a_container_of_its_own_is_not_taken_for_dead() -> None:
    """The other's warden cannot see its process."""
    then = "time.sleep(1.5); guard.leave(0); guard.stage(Stage.DONE); os._exit(0)"
    assert ended(two_ranks(then, ALONE)) == ""
