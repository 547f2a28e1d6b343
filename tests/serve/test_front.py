"""The command `serve` without ranks: the job that it starts, its output, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpissd.__main__ import main
from mpissd.common.flags import parse_into
from mpissd.serve.config import ServeConfig
from tests.needs import module
from tests.serve.rig import answered, until
from tests.text import tiny
from tests.tiny_pair import TinyPair, tiny_pair

module("uvicorn", "the extra serve")
from mpissd.serve import front  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FAKE = f"{sys.executable} -m tests.serve.fake_mpirun"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    found = tiny_pair(tmp_path_factory.mktemp("pair"), vocab=len(tiny.tokens()))
    tiny.write(found.target)
    return found


class Serving:
    """The process of `mpissd serve`, and the port that it printed."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder
        assert process.stdout is not None
        self.line = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/v1 serves ", self.line)
        self.port = int(found[1]) if found else 0

    @property
    def ranks(self) -> int:
        return int((self.folder / "pid").read_text())

    def ask(self, path: str = "/v1/completions", key: str = "") -> tuple[int, Any]:
        with self.asked(path, key) as connection:
            return answered(connection)[:2]

    def asked(self, path: str = "/v1/completions", key: str = "") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), 10)
        body = json.dumps({"prompt": "x"})
        method = "POST" if "completions" in path else "GET"
        head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        head += f"content-type: application/json\r\nauthorization: Bearer {key}\r\n\r\n"
        connection.sendall(f"{head}{body}".encode())
        return connection


@contextmanager
def started(pair: TinyPair, folder: Path, *flags: str, **env: str) -> Iterator[Serving]:
    """Starts the command, and waits until it serves; kills its process at the end."""
    with launched(pair, folder, *flags, **env) as process:
        yield Serving(process, folder)


@contextmanager
def launched(
    pair: TinyPair, folder: Path, *flags: str, **env: str
) -> Iterator[subprocess.Popen[str]]:
    """Starts the command; kills its process at the end. Its own TMPDIR must be empty then."""
    with tempfile.TemporaryDirectory() as own:  # a socket's path has to be short
        told = {"MPIRUN": FAKE, "FAKE_PID": str(folder / "pid"), "TMPDIR": own}
        with _ended(pair, folder, flags, {**os.environ, **told, **env}) as process:
            yield process
        assert not os.listdir(own)


@contextmanager
def _ended(
    pair: TinyPair, folder: Path, flags: Sequence[str], env: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(pair, *flags),
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("w"),
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def command(pair: TinyPair, *flags: str) -> list[str]:
    models = [f"--target={pair.target}", f"--draft={pair.draft}"]
    return [sys.executable, "-m", "mpissd", "serve", *models, "--port=0", *flags]


def test_it_serves_until_it_is_told_to_end(pair: TinyPair, tmp_path: Path) -> None:
    with started(pair, tmp_path, FAKE_PACE_S="0.3", MPISSD_API_KEY="unseen") as serving:
        assert serving.line.endswith("serves tiny with draft (ssd); Ctrl-C ends it\n")
        assert serving.ask()[0] == 401
        assert serving.ask(key="unseen")[1]["choices"][0]["text"] == "hello there"
        assert serving.ask("/ready")[1]["ready"]
        ranks = serving.ranks
        assert b"unseen" not in Path(f"/proc/{ranks}/environ").read_bytes()
        with serving.asked(key="unseen") as unfinished:
            time.sleep(0.1)
            serving.process.send_signal(signal.SIGINT)
            assert serving.process.wait(15) == 0
            assert answered(unfinished)[0] == 503
        until(lambda: not Path(f"/proc/{ranks}").exists())
    log = (tmp_path / "log").read_text()
    assert "-np 2" in log and "Traceback" not in log and "ERROR" not in log
    assert log.startswith("mpissd: serve: loads target with draft on 2 ranks")


def test_it_ends_at_once_while_the_models_are_loaded(pair: TinyPair, tmp_path: Path) -> None:
    with launched(pair, tmp_path, FAKE_LOAD_S="30") as process:
        until((tmp_path / "pid").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0  # before the model is loaded
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_a_key_stays_out_of_the_command_line_of_ranks_that_can_lose_the_draft(
    pair: TinyPair, tmp_path: Path
) -> None:
    """The ranks decode greedily unless a request asks for more, and so accept the flag."""
    flags = ("--temperature=.7", "--api_key=sesame")
    with started(pair, tmp_path, *flags, MPISSD_ONE_HOST="1") as serving:
        assert serving.ask()[0] == 401 and serving.ask(key="sesame")[0] == 200
        line = Path(f"/proc/{serving.ranks}/cmdline").read_bytes().decode().split("\0")
    assert "--enable-recovery" in line and "--on_draft_loss=ar" in line
    assert not any("temperature" in word or "sesame" in word for word in line)
    flags = dict(word[2:].split("=", 1) for word in line if word.startswith("--") and "=" in word)
    assert parse_into(ServeConfig, ServeConfig.completed(flags)).decoding.on_draft_loss == "ar"


def test_the_ranks_are_killed(pair: TinyPair, tmp_path: Path) -> None:
    """Waiting requests get 503, the replica leaves its folder, and the server ends by itself."""
    folder = tmp_path / "replicas"
    with (
        started(pair, tmp_path, f"--register={folder}") as serving,
        serving.asked() as waiting,
        serving.asked() as other,
    ):
        until(lambda: os.listdir(folder))
        os.kill(serving.ranks, signal.SIGKILL)
        assert answered(waiting)[0] == answered(other)[0] == 503
        assert serving.ask("/health")[0] == 503
        assert serving.process.wait(30) == 5
    assert os.listdir(folder) == []
    assert "the ranks have ended (exit code 5)" in (tmp_path / "log").read_text()


def test_ranks_that_never_begin_end_it_with_their_code(pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "replicas"
    with started(pair, tmp_path, f"--register={folder}", FAKE_WAY="die") as serving:
        assert serving.line == "" and serving.process.wait(15) == 4
    assert "the weights are damaged" in (tmp_path / "log").read_text()
    assert os.listdir(folder) == []


def test_the_front_is_killed_and_the_ranks_end(pair: TinyPair, tmp_path: Path) -> None:
    with started(pair, tmp_path) as serving:
        ranks = serving.ranks
        serving.process.kill()
        until(lambda: not Path(f"/proc/{ranks}").exists())


def test_a_launcher_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "_DIE_S", 0.3)
    deaf = (
        "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(9)"
    )

    async def code() -> int:
        made = await asyncio.create_subprocess_exec(sys.executable, "-c", deaf, stdout=-1)
        assert made.stdout is not None
        await made.stdout.readline()
        return await asyncio.wait_for(front.ended(made), 5)

    assert asyncio.run(code()) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host=0.0.0.0"], "host=0.0.0.0 without api_key"),
        (["--host=no.such.host.invalid", "--api_key=k"], "host=no.such.host.invalid"),
        (["--port=TAKEN"], "in use"),
        (["--prompt=x"], "--prompt"),
        (["--on_draft_loss=ar", "--temperature=.7"], "on_draft_loss=ar with temperature=0.7"),
    ],
)
def test_what_cannot_be_is_one_line(
    pair: TinyPair,
    flags: list[str],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MPIRUN", FAKE)
    monkeypatch.delenv("MPISSD_API_KEY", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        flags = [flag.replace("TAKEN", str(taken.getsockname()[1])) for flag in flags]
        assert main(command(pair, *flags)[3:]) == 2
    out, err = capfd.readouterr()
    assert says in err and err.count("\n") == 1 and out == ""
