"""The folder of servers' addresses, and HAProxy's configuration of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mpissd.common.errors import ConfigError
from mpissd.serve import replicas
from mpissd.serve.config import ReplicasConfig
from mpissd.serve.replicas import Entry, Member
from tests.needs import missing, needs, needs_linux
from tests.serve.rig import answered, until
from tests.serve.test_front import pair, started
from tests.tiny_pair import TinyPair

__all__ = ["pair"]  # a fixture
needs_haproxy = needs("haproxy", not missing("haproxy"))
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
        {"host": "node1\n    server evil 10.0.0.1:80"},
        {"host": "node1 check"},
        {"host": ""},
        {"id": "r-other"},
        {"id": "../r-one"},
        {"port": 0},
        {"port": "80 weight 256"},
        {"port": True},
        {"max_wait_s": "1s\n"},
        {"max_wait_s": -1},
        {"schema": 2},
        {"host": 5},
        {"about": ["mode"]},
        {"about": None},
    ],
)
def test_a_file_that_is_no_entry_is_passed_over(tmp_path: Path, change: dict[str, object]) -> None:
    """Among them all that would be more than a word of HAProxy's configuration."""
    replicas.write(tmp_path, ONE)
    replicas.write(tmp_path, TWO)
    path = tmp_path / "r-one.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    (tmp_path / "notes.json").write_text("{")
    assert replicas.read(tmp_path) == [TWO]


OTHERS = "", "[]", "5", "null", '"r-one"', '["id"]', "[" * 100_000, "\xff"


@pytest.mark.parametrize("text", OTHERS)
def test_a_file_of_anything_else_is_passed_over(tmp_path: Path, text: str) -> None:
    replicas.write(tmp_path, TWO)
    (tmp_path / "r-one.json").write_bytes(text.encode("latin-1"))
    (tmp_path / "folder.json").mkdir()
    assert replicas.read(tmp_path) == [TWO]


def test_a_member_keeps_its_entry_until_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_it_registers_when_it_takes_requests_and_leaves_before_it_ends(
    pair: TinyPair, tmp_path: Path
) -> None:
    folder = tmp_path / "replicas"
    with started(pair, tmp_path, f"--register={folder}", FAKE_PACE_S="0.3") as serving:
        until(lambda: replicas.read(folder))
        (found,) = replicas.read(folder)
        assert (found.host, found.port) == ("127.0.0.1", serving.port)
        assert found.about["mode"] == "ssd" and found.about["model"] == "target"
        assert replicas.ask(found) == "ready"
        assert replicas.ask(replace(found, id="r-other")) == "another server"
        with serving.asked() as unfinished:
            serving.process.send_signal(signal.SIGTERM)
            until(lambda: not replicas.read(folder))
            assert serving.ask("/ready")[0] == 503
            assert replicas.ask(found) == "the server finishes what it has, and ends"
            assert answered(unfinished)[0] == 200
            assert serving.ask()[0] == 200  # a balancer may not have seen it yet
        assert serving.process.wait(30) == 0
    assert replicas.ask(found) == "no answer"
    assert f"--register={folder}" not in (tmp_path / "log").read_text()  # the ranks do not


@needs_haproxy
def test_what_haproxy_refuses_does_not_take_the_files_place(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text("before")
    with pytest.raises(ConfigError, match="haproxy -c refuses"):
        replicas.install(ReplicasConfig("out", str(file), "300.1.1.1.:70000"), [ONE])
    assert file.read_text() == "before" and os.listdir(tmp_path) == ["haproxy.cfg"]


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
def test_what_cannot_be_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpissd", "replicas", str(tmp_path), *words],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1


@needs_linux
@pytest.mark.parametrize("text", ["", "x", "999999999", "OTHER"])
def test_a_pid_that_is_no_haproxys_is_left_alone(tmp_path: Path, text: str) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / "pid").write_text(text.replace("OTHER", str(other.pid)))
        with pytest.raises(ConfigError, match=r"pid_file=.*: no HAProxy there: "):
            replicas.reload(tmp_path / "pid")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_watch_follows_the_folder_and_tells_haproxy(tmp_path: Path) -> None:
    """A process that counts its signals replaces HAProxy's master."""
    folder, file, told = tmp_path / "replicas", tmp_path / "haproxy.cfg", tmp_path / "told"
    counts = "#!/bin/bash\ntrap 'echo reload' USR2\necho up\nwhile :; do sleep .05; done\n"
    program = tmp_path / "haproxy"
    program.write_text(counts)
    program.chmod(0o755)
    with told.open("w") as out:
        master = subprocess.Popen([program], stdout=out)
    words = f"{folder} --haproxy={file} --pid_file={tmp_path / 'pid'} --watch"
    watch = subprocess.Popen(
        [sys.executable, "-m", "mpissd", "replicas", *words.split()],
        stdout=subprocess.PIPE,
        text=True,
    )

    def holds(*names: str) -> Callable[[], bool]:
        return lambda: (
            file.exists()
            and [line.split()[1] for line in file.read_text().splitlines() if "    server " in line]
            == [*names]
        )

    try:
        until(lambda: "up" in told.read_text())
        until(holds())
        folder.mkdir()
        replicas.write(folder, ONE)
        until(holds("r-one"))
        (folder / "r-one.json").unlink()
        until(holds())
        replicas.write(folder, TWO)
        until(holds("r-two"))
        assert "reload" not in told.read_text()
        (tmp_path / "pid").write_text(f"{master.pid}\n")  # HAProxy starts now
        until(lambda: "reload" in told.read_text())
        folder.rename(tmp_path / "away")  # as where a file system is not mounted
        time.sleep(1.2)
        assert holds("r-two")()
        watch.send_signal(signal.SIGTERM)
        said, _ = watch.communicate(timeout=20)
        assert watch.returncode == 0
        assert [line.split(": ", 1)[1] for line in said.splitlines()] == [
            "0 replicas: none",
            "1 replicas: r-one node1:8001",
            "0 replicas: none",
            "1 replicas: r-two [::1]:8002",
        ]
        assert told.read_text().count("reload") == 1
    finally:
        for process in (watch, master):
            process.kill()
            process.wait()
