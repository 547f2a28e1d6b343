"""HAProxy in front of replicas on this machine, kept true by `replicas --watch`, under a load."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from mpissd.serve import replicas as entries
from tests.mpi.harness import Started
from tests.needs import missing, needs
from tests.serve.rig import until
from tests.tiny_pair import TinyPair

ROOT = Path(__file__).resolve().parents[2]
needs_haproxy = needs("haproxy and curl", not missing("haproxy", "curl"))
START_S = 120.0  # of a replica, on a busy machine
KEY = "sesame"
BEARER = f"Authorization: Bearer {KEY}"
ENV = {"MPISSD_API_KEY": KEY, "FAKE_RUNNING": "64", "FAKE_PACE_S": "0.1"}


@dataclass
class Replica:
    """A server's job, and its id in the folder."""

    job: Started
    id: str

    def drain(self) -> int:
        """Sends SIGTERM only to the front; returns its exit code."""
        self.job.process.send_signal(signal.SIGTERM)
        return self.job.process.wait(START_S)

    def kill(self) -> None:
        """Kills every process of the job at once."""
        for pid in self.job.alive():
            os.kill(pid, signal.SIGKILL)


class Cluster:
    """Replicas that share a folder, and the balancer in front of them."""

    def __init__(self, pair: TinyPair, folder: Path, stack: ExitStack, mpirun: str | None) -> None:
        self._pair, self.folder, self._stack = pair, folder, stack
        self._env = ENV | ({} if mpirun is None else {"MPIRUN": mpirun})
        self.registry = folder / "replicas"
        self.registry.mkdir()
        self.port = 0

    @property
    def ids(self) -> set[str]:
        """The replicas in the folder."""
        return {entry.id for entry in entries.read(self.registry)}

    def start(self, *flags: str) -> Replica:
        """Starts a replica, and waits until it is in the folder."""
        before = self.ids
        pair = f"--target={self._pair.target} --draft={self._pair.draft}"
        words = [*pair.split(), "--port=0", "--context=1024", f"--register={self.registry}", *flags]
        env = self._env | {"FAKE_PID": str(self.folder / "pid")}
        job = self._stack.enter_context(Started(["launch/serve.sh", *words], env, 600))
        until(lambda: self.ids - before or job.process.poll() is not None, START_S)
        (name,) = self.ids - before
        return Replica(job, name)

    def balance(self) -> None:
        """Starts HAProxy and its watch."""
        held = self._stack.enter_context(socket.socket())  # reserves the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        self.port = held.getsockname()[1]
        file, pid_file = self.folder / "haproxy.cfg", self.folder / "haproxy.pid"
        words = [str(self.registry), f"--haproxy={file}", f"--bind=127.0.0.1:{self.port}"]
        self._begin(
            [
                sys.executable,
                "-m",
                "mpissd",
                "replicas",
                *words,
                f"--pid_file={pid_file}",
                "--watch",
            ]
        )
        until(file.exists, START_S)
        self._begin(["haproxy", "-W", "-f", str(file), "-p", str(pid_file)])
        until(lambda: self.ask("/ready")[0] == 200)

    def _begin(self, command: Sequence[str]) -> None:
        self._stack.enter_context(_process(command, self.folder / Path(command[0]).name))

    def ask(self, path: str, began: Event | None = None, **body: Any) -> tuple[int, str]:
        """Asks the balancer as curl does; returns the status (0: cut off), and the answer.

        began: is set when the answer's first line is here.
        """
        words = ["curl", "-sN", "-w", "\n%{http_code}", "--max-time", "60"]
        words += ["-H", BEARER, "-H", "Content-Type: application/json"]
        words += ["-d", json.dumps(body)] if body else []
        url = f"http://127.0.0.1:{self.port}{path}"
        with subprocess.Popen([*words, url], stdout=subprocess.PIPE, text=True) as curl:
            assert curl.stdout is not None
            told = curl.stdout.readline()
            if began is not None:
                began.set()
            told += curl.stdout.read()
        answer, _, status = told.rpartition("\n")
        return 0 if curl.returncode else int(status), answer

    def outstanding(self, replica: Replica) -> float:
        """How many requests a replica has."""
        (entry,) = (each for each in entries.read(self.registry) if each.id == replica.id)
        told = subprocess.run(
            ["curl", "-s", "-m", "10", "-H", BEARER, f"http://{entry.address}/metrics"],
            capture_output=True,
            text=True,
        )
        return float(re.findall(r"^mpissd_outstanding (\S+)", told.stdout, re.M)[0])

    def load(self, rate: float, duration: float, tokens: int) -> dict[str, Any]:
        """Runs the command `load` against the balancer; returns its row."""
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(50)))
        words = f"--prompts={prompts} --rate={rate} --duration={duration} --num_tokens={tokens}"
        words += f" --url=http://127.0.0.1:{self.port}/v1 --out={self.folder}/out --deadline_s=90"
        done = subprocess.run(
            [sys.executable, "-m", "mpissd", "load", *words.split()],
            cwd=ROOT,
            env={**os.environ, **ENV},
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        row = json.loads(done.stdout.splitlines()[-1])
        assert isinstance(row, dict)
        return row

    def under_load(self, act: Callable[[], None], **load: Any) -> dict[str, Any]:
        """Does something while the load runs; returns the load's row."""
        with ThreadPoolExecutor(1) as pool:
            row = pool.submit(self.load, **load)
            act()
            return row.result()


@contextmanager
def _process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.with_suffix(".log").open("wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=file
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def cluster(pair: TinyPair, folder: Path, mpirun: str | None = None) -> Iterator[Cluster]:
    """Gives a folder without replicas; ends all that was started there."""
    with ExitStack() as stack:
        yield Cluster(pair, folder, stack, mpirun)
