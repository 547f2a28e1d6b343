"""Bad requests, too many requests, and clients that send or read nothing."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpissd.engine.workload.text.tokenizer import Tokenizer
from tests.needs import module, needs_linux
from tests.serve.fake_lead import Script
from tests.text import tiny

module("uvicorn", "the extra serve")
from mpissd.serve import app, front  # noqa: E402
from tests.serve.rig import Rig, answered, serving, tokenizer, until  # noqa: E402

STOP = 1
LETTER = tiny.of_byte(65)
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}


@pytest.fixture
def words(tmp_path: Path) -> Tokenizer:
    return tokenizer(tmp_path)


@pytest.fixture
def rig(words: Tokenizer) -> Iterator[Rig]:
    with serving(words, Script([LETTER, STOP])) as found:
        yield found


def packed(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def is_well(rig: Rig) -> bool:
    status, answer = rig.post(packed())
    return status == 200 and answer["choices"][0]["text"] == "A"


def test_a_bad_field_or_body_is_refused_with_its_name(rig: Rig) -> None:
    for body, says, param in (
        (packed(max_token=5), "did you mean 'max_tokens'", "max_token"),
        (packed(max_tokens=400), "the model's context", "max_tokens"),
        (packed(prompt=[10**6]), "token 1000000", "prompt"),
        (packed(**{"é\n": 1}), "unknown field", json.dumps("é\n")[1:-1]),
        (b"{", "no JSON", None),
    ):
        status, answer = rig.post(body)
        assert status == 400 and says in answer["error"]["message"], answer
        error = answer["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not rig.script.submitted and is_well(rig)


def test_what_other_clients_send_and_means_nothing_is_taken(rig: Rig) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    neutral |= {"user": "me", "stop": None, "seed": None, "max_tokens": None, "stream": False}
    assert rig.post(packed(**neutral, echo=False, best_of=1, suffix=None))[0] == 200
    said = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
    said += [{"role": "assistant", "content": "y", "tool_calls": None, "refusal": None}, USER]
    more = {"tools": None, "response_format": {"type": "text"}, "top_logprobs": 0}
    assert rig.post(chat(**neutral, **more, messages=said), path=CHAT)[0] == 200


def test_ten_megabytes_are_refused_however_they_come(rig: Rig) -> None:
    large = packed(prompt="x" * 10_000_000)
    status, answer = rig.post(large)
    assert status == 413 and answer["error"]["type"] == "invalid_request_error"
    with rig.connect() as connection:  # a body without a length
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        head += "content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode())
        for _ in range(10):
            connection.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        connection.sendall(b"0\r\n\r\n")
        assert answered(connection)[0] == 413
    assert is_well(rig)


def test_a_web_page_cannot_use_a_server_of_this_machine(rig: Rig) -> None:
    assert rig.post(packed(), "content-type: text/plain")[0] == 415
    assert rig.post(packed(), "x-nothing: 1")[0] == 415
    with rig.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: evil.example:80\r\n\r\n")
        assert answered(connection)[0] == 403
    for method, path, status in (
        ("OPTIONS", "/v1/completions", 405),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/health", 405),
    ):
        with rig.connect() as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            found, answer, _ = answered(connection)
            assert found == status and path in answer["error"]["message"]


@pytest.mark.parametrize(
    "noise", [b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 70000]
)
def test_what_is_no_http_is_sent_away(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch, noise: bytes
) -> None:
    monkeypatch.setattr(front, "HEAD_S", 0.5)
    with serving(words, Script([LETTER, STOP])) as rig, rig.connect() as connection:
        connection.sendall(noise)
        with contextlib.suppress(ConnectionResetError):
            while connection.recv(4096):
                pass
        assert is_well(rig)


def test_100_connections_on_a_queue_of_16(words: Tokenizer) -> None:
    """As many as fit are answered, the others get Retry-After; no request is left."""
    script = Script([LETTER] * 20, pace_s=0.02, max_running=4)
    with serving(words, script, max_queue=16) as rig:
        connections = [rig.send(packed()) for _ in range(100)]
        found = []
        for connection in connections:
            with connection:
                found.append(answered(connection))
        statuses = Counter(status for status, _, _ in found)
        assert set(statuses) == {200, 429} and 20 <= statuses[200] < 60
        assert all(a["choices"][0]["text"] == "A" * 20 for s, a, _ in found if s == 200)
        refused = [headers for status, _, headers in found if status == 429]
        assert all(1 <= int(headers["retry-after"]) <= 60 for headers in refused)
        assert len(script.submitted) == statuses[200] and rig.lead.outstanding == 0
        until(lambda: not rig.server.server_state.tasks)
        assert is_well_after(rig)


def is_well_after(rig: Rig) -> bool:
    return rig.post(packed(max_tokens=1))[0] == 200


def test_a_cancelled_request_counts_until_the_lead_has_ended_it(words: Tokenizer) -> None:
    script = Script([LETTER] * 300, pace_s=0.02, max_running=1)
    with serving(words, script, max_queue=2) as rig:
        left = [rig.send(packed()) for _ in range(3)]
        until(lambda: len(script.submitted) == 3)
        assert rig.post(packed())[0] == 429
        for connection in left:
            connection.close()
        until(lambda: len(script.ended) == 3)
        assert is_well_after(rig)


class SlowWords:
    """A tokenizer that takes its time, and counts its prompts."""

    def __init__(self, words: Tokenizer) -> None:
        self._words, self.encoded = words, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def encode(self, text: str) -> list[int]:
        self.encoded += 1
        time.sleep(0.3)
        return self._words.encode(text)


def test_prompts_of_clients_that_have_left_hold_nobody_up(words: Tokenizer) -> None:
    slow = SlowWords(words)
    with serving(slow, Script([LETTER]), max_queue=100) as rig:  # type: ignore[arg-type]
        left = [rig.send(packed()) for _ in range(20)]
        until(lambda: slow.encoded)
        for connection in left:
            connection.close()
        assert is_well_after(rig)
        assert slow.encoded < 10


def test_a_client_that_says_nothing_is_cut(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "HEAD_S", 0.3)
    with serving(words, Script([LETTER, STOP])) as rig:
        silent, slow = rig.connect(), rig.connect()
        with silent, slow:
            slow.sendall(b"POST /v1/completions HTT")
            assert is_well(rig)
            for connection in (silent, slow):
                connection.settimeout(10)
                with contextlib.suppress(ConnectionResetError):
                    assert connection.recv(1) == b""
        until(lambda: not rig.server.server_state.connections)


def test_a_body_that_does_not_arrive_is_408(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "BODY_S", 0.3)
    with serving(words, Script([LETTER, STOP])) as rig, rig.connect() as connection:
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
        connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + b'{"pro')
        assert is_well(rig)
        status, answer, _ = answered(connection)
        assert status == 408 and "did not arrive" in answer["error"]["message"]
        assert connection.recv(1) == b""


def test_a_reader_that_does_not_read_is_cut_and_its_request_cancelled(
    words: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server holds at most two buffers for it, and the others go on."""
    monkeypatch.setattr(front, "WRITE_S", 0.5)
    script = Script([LETTER] * 200_000, burst=40, context=300_000, max_running=2)
    with serving(words, script) as rig, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", rig.port))
        body = packed(stream=True, max_tokens=200_000)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}"
        deaf.sendall(f"{head}\r\ncontent-type: application/json\r\n\r\n".encode() + body)
        until(lambda: script.submitted)
        assert rig.post(packed(max_tokens=3))[1]["choices"][0]["text"] == "AAA"
        until(lambda: not rig.server.server_state.tasks)
        until(lambda: rig.lead.outstanding == 0)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            received = b"".join(iter(lambda: deaf.recv(1 << 20), b""))
        assert b"[DONE]" not in received
        assert is_well_after(rig)


def test_the_state_is_told(rig: Rig, words: Tokenizer) -> None:
    def get(path: str) -> tuple[int, Any]:
        with rig.connect() as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
            return answered(connection)[:2]

    until(lambda: rig.lead.stats.pages)
    assert get("/health") == (200, {"healthy": True, "reason": None})
    ready = {"ready": True, "reason": None, "mode": "ssd", "lookahead": 4, "draft": "present"}
    assert get("/ready") == (200, ready)
    is_well(rig)
    with rig.connect() as connection:
        connection.sendall(b"GET /metrics HTTP/1.0\r\nhost: localhost\r\n\r\n")
        page = b"".join(iter(lambda: connection.recv(65536), b"")).decode()
    for line in (
        'mpissd_responses_total{endpoint="/v1/completions",status="200"} 1.0',
        'mpissd_tokens_total{kind="completion"} 2.0',
        'mpissd_tokens_total{kind="accepted"} 5.0',
        'mpissd_tokens_total{kind="cached"} 2.0',
        "mpissd_cache_hits_total 3.0",
        "mpissd_time_to_first_token_seconds_count 1.0",
        "mpissd_free_pages 7.0",
        "mpissd_draft_present 1.0",
        "mpissd_up 1.0",
    ):
        assert line in page
    rig.fake.script.dies_after = rig.script.rounds + 1
    assert rig.post(packed())[0] == 503
    assert get("/health")[0] == 503 and get("/ready")[0] == 503


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@needs_linux
def test_memory_does_not_grow_with_abuse(words: Tokenizer) -> None:
    """Bodies of 3 MB, broken ones, abandoned streams and half-open connections, 20 times over."""
    script = Script([LETTER] * 300, pace_s=0.001, max_running=4)
    large = packed(prompt="x" * 3_000_000)
    with serving(words, script) as rig:

        def abuse() -> None:
            assert rig.post(large)[0] == 413
            assert rig.post(b"[" * 10000)[0] == 400
            with rig.connect() as half:
                half.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: loc")
            left = [rig.send(packed(stream=True)) for _ in range(6)]
            assert left[0].recv(100)
            for connection in left:
                connection.close()
            until(lambda: rig.lead.outstanding == 0)

        for _ in range(5):
            abuse()
        before = resident_bytes()
        for _ in range(15):
            abuse()
        assert resident_bytes() - before < 8 << 20
        assert is_well_after(rig)
