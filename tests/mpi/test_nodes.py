"""Two nodes: nothing assumes that all ranks share a host.

Two hosts on one machine are network namespaces, joined by a virtual cable. Each has a name, a
network and a /dev/shm of its own, so that ranks on it reach the others only by TCP. mpirun starts
its daemon there by an agent that does what ssh would. Needs root.
"""

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.mpi.harness import DIRECT, Started, ended, launch, needs_mpi
from tests.needs import missing, needs
from tests.scripts import until

AGENT = """#!/bin/sh
# [options] HOST COMMAND…
while :; do case $1 in -*) shift ;; *) break ;; esac; done
case $1 in
{cases}
    *) echo "there is no host $1" >&2; exit 255 ;;
esac
shift
exec ip netns exec "$name" unshare --uts --mount --ipc sh -c '
    hostname "$0" && mount -t tmpfs none /dev/shm && exec "$@"' "$name" sh -c "$*"
"""


def why_not() -> str | None:
    """Name the needs of such hosts that this machine lacks; None if it has all."""
    if os.geteuid() != 0:
        return "root, for network namespaces"
    if programs := missing("ip", "unshare"):
        return programs
    name = f"mpissd{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces ({made.stderr.strip()})"
    run = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "--ipc", "true"]
    tried = subprocess.run(run, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return f"namespaces ({tried.stderr.strip()})" if tried.returncode else None


PAIRS = itertools.count()


class Hosts:
    """Their names and addresses, and the program that starts a command on one."""

    def __init__(self, folder: Path) -> None:
        pair = f"{os.getpid() % 100000}{next(PAIRS)}"
        self.names = [f"mpissd{pair}n{n}" for n in range(2)]
        self.addresses = [f"10.77.{os.getpid() % 250}.{n + 1}" for n in range(2)]
        self.agent = folder / "agent"
        self.cables = [f"mps{pair}v{n}" for n in range(2)]

    @property
    def env(self) -> dict[str, str]:
        """For mpirun: two slots on each, ranks dealt in turn (0 and 2 here, 1 and 3 there)."""
        hosts = ",".join(f"{address}:2" for address in self.addresses)
        return {
            "PRTE_MCA_plm_ssh_agent": str(self.agent),
            "OMPI_MCA_plm_rsh_agent": str(self.agent),
            "MPIRUN": f"mpirun --host {hosts} --map-by node",
        }

    def command(self, *command: str) -> list[str]:
        """This command on the first host; the caller quotes it."""
        return [str(self.agent), self.addresses[0], *command]

    def make(self) -> None:
        """Namespaces, cable and agent."""
        here, there = self.cables
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", here, "type", "veth", "peer", "name", there)
        for name, address, cable in zip(self.names, self.addresses, self.cables, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        cases = "\n".join(
            f"    {address} | {name}) name={name} ;;"
            for name, address in zip(self.names, self.addresses, strict=True)
        )
        self.agent.write_text(AGENT.replace("{cases}", cases))
        self.agent.chmod(0o755)

    def cut(self) -> None:
        """The second host is out of reach from now on, and does not say so."""
        _ip("-n", self.names[1], "link", "set", self.cables[1], "down")

    def alive(self) -> list[int]:
        """Processes on either host."""
        found = []
        for name in self.names:
            told = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
            found += [int(pid) for pid in told.stdout.split()]
        return found

    def end(self) -> None:
        """Ends the processes there, and removes the hosts."""
        end = time.monotonic() + 10
        while (left := self.alive()) and time.monotonic() < end:
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.05)
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Made, and taken away whatever happens."""
    hosts = Hosts(folder)
    try:
        hosts.make()
        yield hosts
    finally:
        hosts.end()


LACK = why_not()
pytestmark = [*needs_mpi, needs(LACK or "", not LACK)]

SHAPES = [
    "--target=gen:layers=2,hidden=128,ffn=256,heads=4,vocab=512",
    "--draft=gen:layers=1,hidden=64,ffn=128,heads=2,vocab=512",
]
JOB = [*SHAPES, "--backend=numpy", "--mode=ssd", "--rounds=25", "--seed=5", "--batch_size=2"]
SAME = "outcome_digest token_digest num_tokens accept_histogram hit_rate rank_digests tp".split()


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with two_hosts(tmp_path_factory.mktemp("hosts")) as found:
        yield found


def started(hosts: Hosts, np_: int, *arguments: str) -> Started:
    """mpirun on the first host, ranks on both."""
    words = " ".join(f"'{word}'" for word in ("bash", "-c", DIRECT, "mpirun", str(np_), *arguments))
    return Started(hosts.command(words), hosts.env)


def test_a_job_on_two_hosts_decides_what_it_does_on_one(hosts: Hosts, tmp_path: Path) -> None:
    alone = launch(3, *JOB, folder=tmp_path / "one").row
    row = ended(started(hosts, 3, "mpissd", "run", *JOB, f"--out={tmp_path / 'two'}")).row
    assert {key: row[key] for key in SAME} == {key: alone[key] for key in SAME}
    assert row["provenance"]["hosts"] == hosts.names and len(alone["provenance"]["hosts"]) == 1
    by_rank = [device["host"] for device in row["provenance"]["ranks"]]
    assert by_rank == [hosts.names[rank % 2] for rank in range(3)]


@pytest.mark.parametrize("cache", ["lead", "draft"])
def test_a_wire_that_is_cut_in_mid_answer_ends_the_ranks_in_time(
    cache: str, tmp_path: Path
) -> None:
    """Open MPI's mpirun goes on to wait for its daemon there; so only the ranks are looked at."""
    flags = [*SHAPES, "--backend=numpy", "--mode=ssd", f"--cache={cache}", "--deadline_s=3"]
    flags += ["--rounds=100000000", "--progress=on", f"--out={tmp_path}"]
    with two_hosts(tmp_path) as hosts, started(hosts, 2, "mpissd", "run", *flags) as job:
        job.read_until(" rounds, ")
        ranks = [job.rank(number) for number in range(2)]
        hosts.cut()
        job.read_until("mpissd: rank 0 ")
        line = job.process.stderr.readline()
        until(lambda: not set(ranks) & {*hosts.alive()}, 15, "the end of both ranks")
    assert "draft: speculation" in line and "3.0 s" in line
    assert not (tmp_path / "runs.jsonl").exists()


def test_a_hit_needs_no_answer_from_the_other_host(hosts: Hosts, tmp_path: Path) -> None:
    """The draft's branches are here long before a slow target's verification ends."""
    slow = "--target=gen:layers=12,hidden=512,ffn=1536,heads=8,vocab=512"
    flags = [slow, SHAPES[1], "--backend=numpy", "--mode=ssd", "--rounds=60", "--lookahead=2"]
    flags += ["--fan_out=uniform:2", f"--out={tmp_path}"]
    row = ended(started(hosts, 2, "mpissd", "run", *flags)).row
    served_here = 3 - row["messages_per_round"]  # of an outcome, its branches, and an answer
    assert served_here > row["hit_rate"] / 2 > 0
