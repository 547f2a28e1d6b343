"""Bad requests, too many requests, and clients that send or read nothing."""

import contextlib
import gc
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Sampling
from mpissd.engine.text.tokenizer import Tokenizer
from mpissd.serve.protocol import Cancel, Line, Ready, Stats, Submit, pack, unpack
from tests.needs import module, needs_linux
from tests.scripts import resident_bytes, until
from tests.serve.fake_lead import Script
from tests.text import tiny

module("uvicorn", "the extra serve")
from mpissd.serve import app, front  # noqa: E402
from mpissd.serve.fields import Problem  # noqa: E402
from mpissd.serve.lead import Lead  # noqa: E402
from tests.serve.rig import Rig, answered, sent, serving  # noqa: E402

STOP = 1
LETTER = tiny.of_byte(65)
CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "x"}


@pytest.fixture
def rig(words: Tokenizer) -> Iterator[Rig]:
    with serving(words, Script([LETTER, STOP])) as found:
        yield found


def packed(**fields: Any) -> bytes:
    return json.dumps({"prompt": "x", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [USER], **fields}).encode()


def is_well(rig: Rig) -> bool:
    status, answer = rig.post(packed(max_tokens=1))
    return status == 200 and answer["choices"][0]["text"] == "A"


def get(rig: Rig, path: str, method: str = "GET", host: str = "localhost") -> tuple[int, Any]:
    with rig.connect() as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
        return answered(connection)[:2]


def is_cut(connection: socket.socket) -> bool:
    """Whether the server ends a connection, whatever it has sent before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(4096):
            pass
    return True


def test_a_bad_field_or_body_is_refused_with_its_name(rig: Rig) -> None:
    for body, says, param in (
        (packed(max_tokens=400), "the server's --context", "max_tokens"),
        (packed(speculation={"lookahead": 99}), "lookahead=99: allowed: 0 to ", "speculation"),
        (packed(prompt=[10**6]), "token 1000000", "prompt"),
        (b"{", "no JSON", None),
    ):
        status, answer = rig.post(body)
        assert status == 400 and says in answer["error"]["message"], answer
        error = answer["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not rig.script.submitted and is_well(rig)


def test_a_greedy_server_refuses_a_temperature(words: Tokenizer) -> None:
    with serving(words, Script([LETTER]), sampling=False) as rig:
        status, answer = rig.post(packed(temperature=0.5))
        assert status == 400 and answer["error"]["message"].startswith("temperature=0.5")
        assert is_well(rig)


def test_what_other_clients_send_and_means_nothing_is_taken(rig: Rig) -> None:
    neutral = {"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    neutral |= {"user": "me", "stop": None, "seed": None, "max_tokens": None, "stream": False}
    assert rig.post(packed(**neutral, echo=False, best_of=1, suffix=None))[0] == 200
    said = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}]
    said += [{"role": "assistant", "content": "y", "tool_calls": None, "refusal": None}, USER]
    more = {"tools": None, "response_format": {"type": "text"}, "top_logprobs": 0}
    assert rig.post(chat(**neutral, **more, messages=said), path=CHAT)[0] == 200


def test_ten_megabytes_are_refused_however_they_come(rig: Rig) -> None:
    status, answer = rig.post(packed(prompt="x" * 10_000_000))
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
    assert get(rig, "/health", host="evil.example:80")[0] == 403
    for method, path, status in (
        ("OPTIONS", "/v1/completions", 405),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/nothing", 404),
    ):
        found, answer = get(rig, path, method)
        assert found == status and path in answer["error"]["message"]
    counted = get(rig, "/metrics")[1]
    for path, status in (("/health", 403), ("/v1/completions", 405), ("other", 404)):
        assert f'_total{{endpoint="{path}",status="{status}"}}' in counted


def test_100_connections_on_a_queue_of_16(words: Tokenizer) -> None:
    """As many as fit are answered, the others get Retry-After; no request is left."""
    gate = threading.Event()
    with serving(
        words, Script([LETTER] * 20, max_running=4, gate=gate.is_set), max_queue=16
    ) as rig:
        connections = [rig.send(packed()) for _ in range(100)]
        until(lambda: len(select.select(connections, [], [], 0)[0]) == 80)
        gate.set()
        found = [answered(connection) for connection in connections]
        for connection in connections:
            connection.close()
        answers = [answer for status, answer, _ in found if status == 200]
        assert [answer["choices"][0]["text"] for answer in answers] == ["A" * 20] * 20
        refused = [headers for status, _, headers in found if status == 429]
        assert [headers["retry-after"] for headers in refused] == ["5"] * 80
        assert len(rig.script.submitted) == 20
        until(lambda: rig.lead.outstanding == 0)
        assert is_well(rig)


def test_a_cancelled_request_counts_until_the_lead_has_ended_it(words: Tokenizer) -> None:
    script = Script([LETTER] * 300, pace_s=0.02, max_running=1)
    with serving(words, script, max_queue=2) as rig:
        left = [rig.send(packed()) for _ in range(3)]
        until(lambda: len(script.submitted) == 3)
        assert rig.post(packed())[0] == 429
        for connection in left:
            connection.close()
        until(lambda: len(script.ended) == 3)
        assert is_well(rig)


class SlowWords:
    """A tokenizer that counts its prompts, and waits with the first one."""

    def __init__(self, words: Tokenizer) -> None:
        self._words, self.encoded, self.gate = words, 0, threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._words, name)

    def encode(self, text: str, **told: bool) -> list[int]:
        self.encoded += 1
        assert self.gate.wait(60)
        return self._words.encode(text, **told)


def test_prompts_of_clients_that_have_left_hold_nobody_up(words: Tokenizer) -> None:
    slow = SlowWords(words)
    with serving(slow, Script([LETTER]), max_queue=100) as rig:  # type: ignore[arg-type]
        left = [rig.send(packed()) for _ in range(20)]
        until(lambda: slow.encoded)
        for connection in left:
            connection.close()
        until(lambda: 'status="499"} 20.0' in get(rig, "/metrics")[1])
        slow.gate.set()
        assert is_well(rig) and slow.encoded == 2


@pytest.mark.parametrize(
    "noise",
    [b"", b"POST /v1/completions HTT", b"\x16\x03\x01\x02\x00\x01", b"\0" * 70000],
    ids=["silence", "a slow head", "TLS", "zeros"],
)
def test_silence_is_cut(words: Tokenizer, monkeypatch: pytest.MonkeyPatch, noise: bytes) -> None:
    with serving(words, Script([LETTER, STOP])) as rig:
        with monkeypatch.context() as patch, rig.connect() as connection:
            patch.setattr(front, "HEAD_S", 0.3)
            connection.sendall(noise)
            assert is_cut(connection)
        assert is_well(rig)


def test_a_body_that_never_comes_is_408(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(words, Script([LETTER, STOP])) as rig:
        with monkeypatch.context() as patch, rig.connect() as connection:
            patch.setattr(app, "BODY_S", 0.3)
            head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n"
            connection.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + b'{"pro')
            status, answer, _ = answered(connection)
            assert status == 408 and "did not arrive" in answer["error"]["message"]
            assert is_cut(connection)
        assert is_well(rig)


def slow_reader(rig: Rig, body: bytes, path: str) -> socket.socket:
    """A client that has sent a request, and has room for little of its answer."""
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    reader.settimeout(20)
    reader.connect(("127.0.0.1", rig.port))
    return sent(reader, f"POST {path}", body)


def test_a_deaf_reader_is_cut(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server holds at most two buffers for it, and the others go on."""
    monkeypatch.setattr(front, "WRITE_S", 0.5)
    answer = [LETTER] * 200_000  # 25 s long at least, and the client is cut after .5 s
    script = Script(answer, burst=40, pace_s=0.005, context=300_000, max_running=2)
    with serving(words, script) as rig:
        body = packed(stream=True, max_tokens=200_000)
        with slow_reader(rig, body, "/v1/completions") as deaf:
            until(lambda: script.submitted)
            assert is_well(rig)
            until(lambda: "cancelled" in script.ended.values())
            received = b""
            with contextlib.suppress(ConnectionResetError):
                received = b"".join(iter(lambda: deaf.recv(1 << 20), b""))
            assert b"[DONE]" not in received
        assert is_well(rig)


def test_a_buffered_end_is_not_cut(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "HEAD_S", 0.7)
    script = Script([LETTER] * 12_000, burst=40, context=20_000)
    body = chat(max_tokens=12_000, logprobs=True)  # some 700 KB of JSON
    with serving(words, script) as rig, slow_reader(rig, body, CHAT) as slow:
        until(lambda: script.ended)
        time.sleep(2)
        assert len(answered(slow)[1]["choices"][0]["logprobs"]["content"]) == 12_000


def test_idle_clients_keep_nobody_out(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "REQUESTS", 4)
    monkeypatch.setattr(front, "HEAD_S", 1000.0)
    with serving(words, Script([LETTER, STOP])) as rig:
        idle = [rig.connect() for _ in range(8)]
        assert is_well(rig)
        assert is_cut(idle[0])  # the one that came first
        for one in idle:
            one.close()


def test_busy_connections_are_said(words: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "REQUESTS", 2)
    gate = threading.Event()
    with serving(words, Script([LETTER], gate=gate.is_set)) as rig:
        busy = [rig.send(packed()) for _ in range(2)]
        until(lambda: len(rig.script.submitted) == 2)
        with rig.send(b"") as late:
            status, refused, headers = answered(late)
        assert status == 503 and refused["error"]["code"] == "connections"
        assert headers["retry-after"] == "5"
        gate.set()
        assert [answered(one)[0] for one in busy] == [200, 200]


def test_the_state_is_shown(rig: Rig) -> None:
    until(lambda: rig.lead.stats.pages)
    assert get(rig, "/health") == (200, {"healthy": True, "reason": None})
    ready = {"ready": True, "reason": None, "mode": "ssd", "lookahead": 4, "draft": "present"}
    assert get(rig, "/ready") == (200, ready)
    assert rig.post(packed())[0] == 200
    text = get(rig, "/metrics")[1]
    for line in (
        'mpissd_responses_total{endpoint="/v1/completions",status="200"} 1.0',
        'mpissd_tokens_total{kind="completion"} 2.0',
        'mpissd_tokens_total{kind="accepted"} 5.0',
        'mpissd_tokens_total{kind="cached"} 2.0',
        "mpissd_cache_hits_total 3.0",
        'vllm:spec_decode_num_drafts_total{model_name="tiny"} 4.0',
        'vllm:spec_decode_num_draft_tokens_total{model_name="tiny"} 8.0',
        'vllm:spec_decode_num_accepted_tokens_total{model_name="tiny"} 5.0',
        'num_accepted_tokens_per_pos_total{model_name="tiny",position="1"} 2.0',
        "mpissd_time_to_first_token_seconds_count 1.0",
        "mpissd_free_pages 7.0",
        "mpissd_draft_present 1.0",
        "mpissd_up 1.0",
    ):
        assert line in text
    rig.fake.script.dies_after = rig.script.rounds + 1
    assert rig.post(packed())[0] == 503
    assert get(rig, "/health")[0] == 503 and get(rig, "/ready")[0] == 503


def test_a_lead_that_sends_nothing_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_message_is_one_line_and_comes_back() -> None:
    asked = Submit(3, [1, 2], 5, Sampling(0.1, seed=7, logit_bias=((7, 1.5),)), deadline_s=2.5)
    for message in (asked, Ready("é\n", 2048, [0, 2], 16, "ssd", 97), Stats(draft="lost")):
        line = pack(message)
        assert line.count(b"\n") == 1 and line.endswith(b"\n") and unpack(line) == message
    for line in (b"", b"[]", b'{"op": "fly"}', b'{"op": "cancel"}', b"\xff", b'{"op": ["end"]}'):
        with pytest.raises(ProtocolError, match="no message"):
            unpack(line)


def test_a_cancel_is_read_at_once() -> None:
    """As far as the socket holds what comes before it."""
    ours, theirs = socket.socketpair()
    with ours:
        line = Line(theirs)
        sent = b"".join(pack(Submit(n, [40000] * 2040, 8)) for n in range(8)) + pack(Cancel(0))
        ours.sendall(sent)
        assert isinstance(line.take()[-1], Cancel)


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
            left = [rig.send(packed(stream=True)) for _ in range(3)]
            more = {"prompt": ["x", "y"], "echo": True, "logprobs": 20, "top_k": 5}
            left += [rig.send(packed(**more, stream=stream)) for stream in (True, False)]
            asked = json.dumps({"input": "x", "stream": True}).encode()
            left.append(rig.send(asked, path="/v1/responses"))
            assert rig.post(packed(prompt="x " * 20_000), path="/tokenize")[0] == 200
            assert left[0].recv(100)
            for connection in left:
                connection.close()
            until(lambda: rig.lead.outstanding == 0)

        for _ in range(5):
            abuse()
        gc.collect()
        before = resident_bytes()
        for _ in range(15):
            abuse()
        gc.collect()
        assert resident_bytes() - before < 8 << 20
        assert is_well(rig)
