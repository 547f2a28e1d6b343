"""The command `serve` without ranks: the job that it starts, its output, its drain and its end."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mpissd.cli.arguments import parse
from tests.needs import module
from tests.scripts import refused, spawn, until
from tests.tiny_pair import TinyPair

module("uvicorn", "the extra serve")
from mpissd.serve import front  # noqa: E402
from tests.serve.rig import answered, sent  # noqa: E402

FAKE = f"{sys.executable} -m tests.serve.fake_lead"
SHUT = {"FAKE_GATE": "/no/such/file"}  # no request ends


class Serving:
    """The process of `mpissd serve`, and the port that it prints."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process, self._folder = process, folder

    def read(self) -> str:
        """Reads the line that is printed when requests are taken."""
        line = self.process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:(\d+)/v1 serves ", line)
        self.port = int(found[1]) if found else 0
        return line

    @property
    def ranks(self) -> int:
        return int((self._folder / "pid").read_text())

    @property
    def log(self) -> str:
        return (self._folder / "log").read_text()

    def ask(self, path: str = "/v1/completions", key: str = "") -> tuple[int, Any]:
        with self.asked(path, key) as connection:
            return answered(connection)[:2]

    def asked(self, path: str = "/v1/completions", key: str = "") -> socket.socket:
        """Sends a request; returns the connection, on which nothing has been read."""
        what = f"{'POST' if 'completions' in path else 'GET'} {path}"
        headers = "content-type: application/json", f"authorization: Bearer {key}"
        connection = socket.create_connection(("127.0.0.1", self.port), 20)
        return sent(connection, what, b'{"prompt": "x"}', *headers)

    @contextmanager
    def unfinished(self, key: str = "") -> Iterator[socket.socket]:
        """Sends a request, and waits until the ranks have it."""
        with self.asked(key=key) as connection:
            until(lambda: "mpissd_outstanding 1.0" in self.ask("/metrics", key)[1])
            yield connection


@contextmanager
def started(
    pair: TinyPair, folder: Path, *flags: str, reads: bool = True, **env: str
) -> Iterator[Serving]:
    """Starts the command; kills its process at the end. Its own TMPDIR, which has a long name, must
    be empty then."""
    own = folder / ("x" * 100)  # a Unix socket's path has at most 107 bytes
    own.mkdir()
    with (folder / "log").open("w") as log:
        variables = {"MPIRUN": FAKE, "FAKE_PID": str(folder / "pid"), "TMPDIR": str(own)}
        env = {**os.environ, **variables, **env}
        with spawn(*command(pair, *flags), env=env, stderr=log) as process:
            try:
                serving = Serving(process, folder)
                if reads:
                    serving.read()
                yield serving
            finally:
                process.kill()
        assert not os.listdir(own)


def command(pair: TinyPair, *flags: str) -> list[str]:
    models = [f"--target={pair.target}", f"--draft={pair.draft}"]
    return [sys.executable, "-m", "mpissd", "serve", *models, "--port=0", *flags]


def test_it_serves_until_it_is_told_to_end(pair: TinyPair, tmp_path: Path) -> None:
    """A key stays out of the ranks' command line and environment; they can lose the draft."""
    flags = ("--temperature=.7", "--api_key=sesame")  # each request has its own temperature
    env = {"FAKE_PACE_S": "0.1", "MPISSD_API_KEY": "unseen", "MPISSD_ONE_HOST": "1"}
    with started(pair, tmp_path, *flags, reads=False, **env) as serving:
        line = serving.read()
        assert line.endswith("serves tiny with draft (ssd, K=4); Ctrl-C ends it\n")
        assert serving.ask(key="unseen")[0] == 401
        assert serving.ask(key="sesame")[1]["choices"][0]["text"] == "hello there"
        assert serving.ask("/ready")[1]["ready"]
        ranks = serving.ranks
        assert b"unseen" not in Path(f"/proc/{ranks}/environ").read_bytes()
        words = Path(f"/proc/{ranks}/cmdline").read_bytes().decode().strip("\0").split("\0")
        assert "--enable-recovery" in words and "--on_draft_loss=ar" in words
        assert not any("temperature" in word or "sesame" in word for word in words)
        assert parse(words[words.index("serve") :]).config.decoding.on_draft_loss == "ar"
        serving.process.send_signal(signal.SIGINT)
        assert serving.process.wait(60) == 0
        until(lambda: not Path(f"/proc/{ranks}").exists())
    log = serving.log
    assert "-n 2" in log and "Traceback" not in log and "ERROR" not in log
    assert log.startswith("mpissd: serve: loads target with draft on 2 ranks")


@pytest.mark.parametrize("choice", ["abort", "ar"])
def test_what_the_user_says_of_a_lost_draft_holds(
    pair: TinyPair, tmp_path: Path, choice: str
) -> None:
    with started(pair, tmp_path, f"--on-draft-loss={choice}", MPISSD_ONE_HOST="1") as serving:
        words = Path(f"/proc/{serving.ranks}/cmdline").read_bytes().decode().split("\0")
        assert f"--on-draft-loss={choice}" in words and "--on_draft_loss=ar" not in words
        assert ("--enable-recovery" in words) == (choice == "ar")


def test_it_ends_at_once_while_the_models_are_loaded(pair: TinyPair, tmp_path: Path) -> None:
    with started(pair, tmp_path, reads=False, FAKE_LOAD_S="999") as serving:
        until((tmp_path / "pid").exists)
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(60) == 0  # before the model is loaded
    assert "Traceback" not in serving.log


def test_it_drains(pair: TinyPair, tmp_path: Path) -> None:
    """It finishes what it has, and refuses new requests."""
    gate = tmp_path / "gate"
    with started(pair, tmp_path, "--drain_s=60", FAKE_GATE=str(gate)) as serving:
        with serving.unfinished() as unfinished:
            serving.process.send_signal(signal.SIGTERM)
            until(lambda: serving.ask("/ready")[0] == 503)
            with serving.asked() as late:
                status, refused, headers = answered(late)
            assert (status, refused["error"]["code"]) == (503, "draining")
            assert headers["retry-after"] == "5"
            assert serving.ask("/health")[0] == 200
            gate.touch()
            status, answer, _ = answered(unfinished)
        assert (status, answer["choices"][0]["text"]) == (200, "hello there")
        assert serving.process.wait(60) == 0
    began, ended = serving.log.splitlines()[-2:]
    assert began == "mpissd: serve: SIGTERM: 1 requests have 60 s to end"
    assert re.fullmatch(r"mpissd: serve: drained in \d+\.\d s; requests cut off: none", ended)


@pytest.mark.parametrize(("longest", "second"), [("0.3", None), ("60", signal.SIGINT)])
def test_a_drain_is_no_longer_than_asked(
    pair: TinyPair, tmp_path: Path, longest: str, second: signal.Signals | None
) -> None:
    """After the deadline, or at a second signal, requests are failed as without a drain."""
    with started(pair, tmp_path, f"--drain_s={longest}", **SHUT) as serving:
        with serving.unfinished() as unfinished:
            serving.process.send_signal(signal.SIGTERM)
            if second is not None:
                until(lambda: serving.ask("/ready")[0] == 503)
                serving.process.send_signal(second)
            assert answered(unfinished)[0] == 503
        assert serving.process.wait(60) == 0
    assert serving.log.endswith(" s; requests cut off: 1\n")


def test_the_ranks_are_killed(pair: TinyPair, tmp_path: Path) -> None:
    """Waiting requests get 503, the replica leaves its folder, and the server ends by itself."""
    folder = tmp_path / "replicas"
    with started(pair, tmp_path, f"--register={folder}", **SHUT) as serving:
        with serving.unfinished() as waiting:
            until(lambda: os.listdir(folder))
            os.kill(serving.ranks, signal.SIGKILL)
            assert answered(waiting)[0] == 503
        assert serving.process.wait(60) == 5
    assert os.listdir(folder) == []
    assert "the ranks have ended (exit code 5)" in serving.log


def test_ranks_that_never_begin_end_it_with_their_code(pair: TinyPair, tmp_path: Path) -> None:
    folder = tmp_path / "replicas"
    with started(pair, tmp_path, f"--register={folder}", reads=False, FAKE_WAY="die") as serving:
        assert serving.read() == "" and serving.process.wait(60) == 4
    assert "the weights are damaged" in serving.log and os.listdir(folder) == []


def test_the_front_is_killed_and_the_ranks_end(pair: TinyPair, tmp_path: Path) -> None:
    with started(pair, tmp_path) as serving:
        ranks = serving.ranks
        serving.process.kill()
        until(lambda: not Path(f"/proc/{ranks}").exists())


def test_a_launcher_that_ignores_signals_is_killed() -> None:
    longest_s = front._LAST_WORDS_S + front._GRACE_S + front._LEAVE_S + 2 * front._DIE_S
    assert longest_s <= 5
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True)"

    async def code() -> int:
        words = (sys.executable, "-c", f"{deaf}; time.sleep(99)")
        made = await asyncio.create_subprocess_exec(*words, stdout=-1)
        await made.stdout.readline()
        return await front.ended(made)

    assert asyncio.run(code()) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--host=0.0.0.0"], "host=0.0.0.0 without api_key"),
        (["--host=no.such.host.invalid", "--api_key=k"], "host=no.such.host.invalid"),
        (["--port=TAKEN"], "in use"),
        (["--prompt=x"], "--prompt"),
        (["--sampling=false", "--temperature=.7"], "temperature=0.7 with sampling=false"),
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
        assert says in refused(capfd, *command(pair, *flags)[3:])
