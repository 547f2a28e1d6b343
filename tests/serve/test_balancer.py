"""HAProxy over two replicas without ranks, under a load: one is killed, both are replaced."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpissd.serve import replicas
from tests.needs import missing, module, needs
from tests.scripts import until
from tests.tiny_pair import TinyPair

module("uvicorn", "the extra serve")
httpx = module("httpx", "the extra serve")
from tests.serve.test_front import ROOT, Serving, started  # noqa: E402

pytestmark = [needs("haproxy", not missing("haproxy")), pytest.mark.slow]
ENV = {"FAKE_RUNNING": "64", "FAKE_PACE_S": "0.1"}


class Cluster:
    """Replicas that share a folder, and the balancer in front of them."""

    def __init__(self, pair: TinyPair, folder: Path, stack: ExitStack) -> None:
        self._pair, self._folder, self._stack = pair, folder, stack
        self.registry = folder / "replicas"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._url = f"127.0.0.1:{free.getsockname()[1]}"

    @property
    def ports(self) -> set[int]:
        """The ports of the replicas in the folder."""
        return {entry.port for entry in replicas.read(self.registry)}

    def start(self) -> Serving:
        """Starts a replica, and waits until it is in the folder."""
        folder = self._folder / f"{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        flags = ["--context=1024", f"--register={self.registry}"]
        found = self._stack.enter_context(started(self._pair, folder, *flags, **ENV))
        until(lambda: found.port in self.ports)
        return found

    def balance(self) -> None:
        """Starts HAProxy and its watch, and waits until it has a replica."""
        file, pid_file = self._folder / "haproxy.cfg", self._folder / "haproxy.pid"
        words = [f"--haproxy={file}", f"--bind={self._url}", f"--pid_file={pid_file}", "--watch"]
        self._begin(sys.executable, "-m", "mpissd", "replicas", str(self.registry), *words)
        until(file.exists)
        self._begin("haproxy", "-W", "-f", str(file), "-p", str(pid_file))
        until(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return bool(httpx.get(f"http://{self._url}/ready").is_success)
        except httpx.HTTPError:
            return False

    def _begin(self, *command: str) -> None:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL)
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    @contextmanager
    def under_load(self, duration: float) -> Iterator[dict[str, Any]]:
        """Sends ten requests a second during the block and `duration`; fills in the load's row."""
        row: dict[str, Any] = {}
        prompts = self._folder / "prompts.jsonl"
        prompts.write_text("".join(f'{{"prompt": "number {n}"}}\n' for n in range(50)))
        words = f"--prompts={prompts} --rate=10 --duration={duration} --num_tokens=8 "
        words += f"--url=http://{self._url}/v1 --out={self._folder}/out --deadline_s=90"
        command = [sys.executable, "-m", "mpissd", "load", *words.split()]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as load:
            yield row
            printed, _ = load.communicate(timeout=240)
        assert load.returncode == 0
        row |= json.loads(printed.splitlines()[-1])


@pytest.fixture
def cluster(pair: TinyPair, tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(pair, tmp_path, stack)


def test_one_is_killed_under_load(cluster: Cluster) -> None:
    """Its requests fail within seconds; the other one answers later ones."""
    one, other = cluster.start(), cluster.start()
    cluster.balance()
    with cluster.under_load(duration=4) as row:
        until(lambda: "chat/completions" in one.ask("/metrics")[1])
        os.killpg(one.process.pid, signal.SIGKILL)
        os.kill(one.ranks, signal.SIGKILL)
    assert row["num_refused"] == 0 and row["num_requests"] > 15
    assert row["num_failed"] <= 10  # at most those that it had
    with cluster.under_load(duration=1) as after:
        pass
    assert after["num_answered"] == after["num_requests"]
    assert cluster.ports == {one.port, other.port}  # a killed replica leaves its file


def test_a_rolling_restart_loses_none(cluster: Cluster) -> None:
    old = [cluster.start(), cluster.start()]
    cluster.balance()
    with cluster.under_load(duration=8) as row:
        for each in old:
            new = cluster.start()
            each.process.send_signal(signal.SIGTERM)
            assert each.process.wait(120) == 0
            assert each.port not in cluster.ports and new.port in cluster.ports
    assert row["num_answered"] == row["num_requests"] > 50
    assert len(cluster.ports) == 2
