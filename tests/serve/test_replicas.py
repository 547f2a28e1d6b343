"""The folder of servers' addresses, and HAProxy's configuration of it. HAProxy over two
replicas without ranks, under a load: one is killed, both are replaced."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.serve import replicas
from mpissd.serve.replicas import Entry, Member
from tests.needs import missing, module, needs, needs_linux
from tests.scripts import ROOT, until
from tests.serve.rig import answered
from tests.tiny_pair import TinyPair

module("uvicorn", "the extra serve")
httpx = module("httpx", "the extra serve")
from tests.serve.test_front import Serving, started  # noqa: E402

ONE = Entry("r-one", "node1", 8001)
TWO = Entry("r-two", "::1", 8002)


def test_an_entry_is_written_whole_and_read_back(tmp_path: Path) -> None:
    for each in (TWO, ONE, replace(ONE, port=8003)):
        replicas.write(tmp_path, each)
    assert replicas.read(tmp_path) == [replace(ONE, port=8003), TWO]
    assert sorted(os.listdir(tmp_path)) == ["r-one.json", "r-two.json"]
    with pytest.raises(FileNotFoundError):
        replicas.read(tmp_path / "none")
    assert (ONE.address, TWO.address) == ("node1:8001", "[::1]:8002")


@pytest.mark.parametrize(
    "change",
    [
        *({"host": host} for host in ("node1\n    server evil 10.0.0.1:80", "node1 check", "", 5)),
        *({"port": port} for port in (0, "80 weight 256", True)),
        *({"max_wait_s": longest} for longest in ("1s\n", -1)),
        {"id": "../r-one"},
        {"schema": 2},
        {"about": ["mode"]},
    ],
)
def test_a_file_that_is_no_entry_is_passed_over(tmp_path: Path, change: dict[str, object]) -> None:
    """Among them all that would be more than a word of HAProxy's configuration."""
    replicas.write(tmp_path, ONE)
    replicas.write(tmp_path, TWO)
    path = tmp_path / "r-one.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    for name, text in enumerate(("", "{", "[]", "5", '["id"]', "[" * 100_000, "\xff")):
        (tmp_path / f"{name}.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "folder.json").mkdir()
    assert replicas.read(tmp_path) == [TWO]


def test_a_member_keeps_its_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_KEEP_S", 0.05)
    folder = tmp_path / "not" / "yet"
    with Member(str(folder), "node1", 8001, 600.0, {}) as found:
        assert folder.stat().st_mode & 0o077 == 0 and replicas.read(folder) == []
        found.join()
        until(lambda: [each.id for each in replicas.read(folder)] == [found.id])
        (folder / f"{found.id}.json").unlink()
        until(lambda: replicas.read(folder))  # a live one comes back
        found.leave()
        until(lambda: not replicas.read(folder))
        found.join()  # too late
    assert os.listdir(folder) == []


def test_it_registers_and_leaves(pair: TinyPair, tmp_path: Path) -> None:
    """When it takes requests, and before it ends."""
    folder, gate = tmp_path / "replicas", tmp_path / "gate"
    flags, env = f"--register={folder}", {"FAKE_GATE": str(gate), "FAKE_RUNNING": "4"}
    with started(pair, tmp_path, flags, **env) as serving:
        until(lambda: replicas.read(folder))
        (found,) = replicas.read(folder)
        assert (found.host, found.port) == ("127.0.0.1", serving.port)
        assert found.about["mode"] == "ssd" and found.about["model"] == "target"
        assert replicas.ask(found) == "ready"
        assert replicas.ask(replace(found, id="r-other")) == "another server"
        with serving.unfinished() as unfinished:
            serving.process.send_signal(signal.SIGTERM)
            until(lambda: serving.ask("/ready")[0] == 503)
            with serving.asked() as late:  # a balancer may not have seen it yet
                until(lambda: not replicas.read(folder))
                assert replicas.ask(found) == "the server finishes what it has, and ends"
                gate.touch()
                assert answered(unfinished)[0] == answered(late)[0] == 200
        assert serving.process.wait(60) == 0
    assert replicas.ask(found) == "no answer"
    assert f"--register={folder}" not in serving.log  # the ranks do not


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--watch"], "watch without haproxy"),
        (["--pid_file=x"], "pid_file without haproxy"),
        (["--bind=8000"], "bind=8000: allowed: HOST:PORT"),
        (["--bind=:80 ssl"], "bind=:80 ssl: allowed"),
        (["--haproxy=none/such/file"], "haproxy=none/such/file: No such file"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, words: list[str], says: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replicas", str(tmp_path), *words]) == 2
    err = capfd.readouterr().err
    assert says in err and err.count("\n") == 1


@needs_linux
@pytest.mark.parametrize("text", ["", "x", "999999999", "OTHER"])
def test_a_pid_that_is_no_haproxys_is_left_alone(tmp_path: Path, text: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        (tmp_path / "pid").write_text(text.replace("OTHER", str(other.pid)))
        with pytest.raises(ConfigError, match=r"pid_file=.*: no HAProxy there: "):
            replicas.reload(tmp_path / "pid")
        assert other.poll() is None
        other.kill()


def test_a_watch_keeps_the_file_where_the_folder_is_gone(tmp_path: Path) -> None:
    """As where a file system is not mounted; each fault is printed once."""
    folder, file = tmp_path / "replicas", tmp_path / "haproxy.cfg"
    folder.mkdir()
    replicas.write(folder, ONE)
    words = ["replicas", str(folder), f"--haproxy={file}", "--watch"]
    with subprocess.Popen(
        [sys.executable, "-m", "mpissd", *words], stderr=subprocess.PIPE, text=True
    ) as watch:
        try:
            until(file.exists)
            folder.rename(tmp_path / "away")
            assert "the file stays as it is" in watch.stderr.readline()
            assert "server r-one node1:8001" in file.read_text()
            watch.send_signal(signal.SIGTERM)
            assert watch.communicate(timeout=60)[1] == "" and watch.returncode == 0
        finally:
            watch.kill()


balanced = needs("haproxy", not missing("haproxy")), pytest.mark.slow
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

    def get(self, path: str, headers: dict[str, str]) -> Any:
        return httpx.get(f"http://{self._url}{path}", headers=headers)

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


@balanced[0]
@balanced[1]
def test_one_is_killed_under_load(cluster: Cluster) -> None:
    """Its requests fail within seconds; the other one answers later ones."""
    one, other = cluster.start(), cluster.start()
    cluster.balance()
    for asked in ({"x-replica": entry.id} for entry in replicas.read(cluster.registry)):
        until(lambda asked=asked: asked.items() <= cluster.get("/health", asked).headers.items())
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


@balanced[0]
@balanced[1]
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
