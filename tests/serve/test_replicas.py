"""The folder of servers' addresses, and HAProxy's configuration of it."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mpissd.__main__ import main
from mpissd.common.errors import ConfigError
from mpissd.serve import replicas
from mpissd.serve.replicas import Entry, Member
from tests.needs import module, needs_linux
from tests.scripts import until
from tests.serve.rig import answered
from tests.tiny_pair import TinyPair

module("uvicorn", "the extra serve")
from tests.serve.test_front import started  # noqa: E402

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
        {"host": 5},
        {"id": "../r-one"},
        {"port": 0},
        {"port": "80 weight 256"},
        {"port": True},
        {"max_wait_s": "1s\n"},
        {"max_wait_s": -1},
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
