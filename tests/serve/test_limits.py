"""Limits on a client's cost, and guarantees for honest clients."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from mpissd.engine.workload.text.tokenizer import Tokenizer
from mpissd.serve import app, front
from mpissd.serve.lead import Lead
from mpissd.serve.protocol import Cancel, Line, Ready, Stats, Submit, pack
from mpissd.serve.request import Problem
from tests.serve.fake_lead import Script
from tests.serve.rig import answered, serving, tokenizer, until
from tests.serve.test_abuse import CHAT, LETTER, STOP, chat


@pytest.fixture
def words(tmp_path: Path) -> Tokenizer:
    return tokenizer(tmp_path)


def test_the_buffered_end_of_an_answer_is_not_cut(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "HEAD_S", 0.5)  # 15 s in the server; WRITE_S stays 30 s
    script = Script([LETTER] * 12_000, burst=40, context=20_000)
    with serving(words, script) as rig, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", rig.port))
        slow.settimeout(20)
        body = chat(max_tokens=12_000, logprobs=True)  # some 700 KB of JSON
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        slow.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
        until(lambda: script.ended)
        time.sleep(1.2)
        with slow.makefile("rb") as file:
            size = 0
            while line := file.readline().strip():
                if line.lower().startswith(b"content-length:"):
                    size = int(line.split(b":")[1])
            assert len(file.read(size)) == size


def test_idle_connections_keep_nobody_out(words: Tokenizer) -> None:
    with serving(words, Script([LETTER, STOP])) as rig:
        idle = [rig.connect() for _ in range(app.REQUESTS + 8)]
        time.sleep(0.5)
        with rig.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        for one in idle:
            one.close()


def test_a_cancel_behind_prompts_is_read_within_two_rounds() -> None:
    ours, theirs = socket.socketpair()
    with ours:
        line = Line(theirs)
        told = b"".join(pack(Submit(n, [40000] * 2040, 8)) for n in range(11)) + pack(Cancel(0))
        ours.setblocking(False)
        assert ours.send(told) == len(told), "more than the socket takes: send less"
        heard = [*line.take(), *line.take()]
        assert any(isinstance(one, Cancel) for one in heard)


def test_where_every_connection_is_busy_a_new_one_is_told(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "REQUESTS", 2)
    script = Script([LETTER] * 300, pace_s=0.02, burst=1)
    with serving(words, script) as rig:
        busy = [rig.connect() for _ in range(2)]
        for one in busy:
            body = chat(max_tokens=300, stream=True)
            head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
            one.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            assert one.recv(4096).startswith(b"HTTP/1.1 200")
        with rig.connect() as late:
            late.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            status, told, headers = answered(late)
        assert status == 503 and told["error"]["code"] == "connections"
        assert headers["retry-after"] == "5"
        for one in busy:
            one.close()


def test_a_lead_that_says_nothing_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    now, lead = [0.0], Lead(0)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lead.receive(Ready("tiny", 400, (1,), 1, "ssd", 9))
    now[0] = 100.0
    lead.check_ready()  # nothing to be late with yet
    lead.receive(Stats())
    now[0] += 29.0
    lead.check_ready()
    now[0] += 2.0
    with pytest.raises(Problem, match="said nothing for 31 s"):
        lead.check_ready()
    lead.check()  # requests are still taken: it may come back
    lead.receive(Stats())
    lead.check_ready()
