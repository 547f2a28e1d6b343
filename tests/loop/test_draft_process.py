"""`mpissd draft` and its clients: vLLM's calls, recorded and random ones, and drafts that fail."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import pytest
from prometheus_client import REGISTRY

from mpissd.common.errors import MpissdError
from mpissd.common.rounds import Event, Outcome, Request, Sampling
from mpissd.engine.comm import wire
from mpissd.engine.comm.peer import Address, Connection
from mpissd.engine.features.draft_client import DraftClient
from mpissd.huggingface import Candidates
from mpissd.vllm import Proposer
from tests.loop.text_rig import logits_behind
from tests.scripts import refused, until
from tests.tiny_pair import TinyPair, tiny_pair

V, K, LONGEST = 61, 3, 96
SHAPE = wire.LinkShape(0, 4, K, prompt_tokens=LONGEST)
START_S, PATIENCE_S = 120.0, 5.0
Ends = tuple[socket.socket, Connection]
# Recorded of vLLM 0.32 with a proposer of its own: [sampled tokens by row, lengths, requests], one
# list a call; 4 rows that move as requests end, and with a KV cache so small that it preempts.
CALLS = json.loads((Path(__file__).parents[1] / "data/vllm/calls.json").read_text())


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> TinyPair:
    folder = tmp_path_factory.mktemp("pair")
    return tiny_pair(folder, vocab=V, noise=0.15, heads=4, kv_heads=2, head_dim=32)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPISSD_ALWAYS", "1")


class Engine:
    """The calls of vLLM: a live buffer of tokens, and rows that hold nothing known after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, draft: str, rank: int = 0) -> None:
        monkeypatch.setenv("MPISSD_DRAFT", draft)
        monkeypatch.setenv("MPISSD_PATIENCE_MS", str(1e3 * PATIENCE_S))
        self.asked = Proposer(
            SimpleNamespace(
                parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=2),
                speculative_config=SimpleNamespace(num_speculative_tokens=K),
                scheduler_config=SimpleNamespace(max_num_seqs=4),
                model_config=SimpleNamespace(max_model_len=LONGEST),
            )
        )
        self.buffer = np.full((6, LONGEST + 8), V + 99, np.int32)

    @property
    def client(self) -> DraftClient:
        return self.asked.client

    def call(self, rows: list[tuple[list[int], list[int]]]) -> list[list[int]]:
        """Rows of (all tokens, those that were sampled)."""
        lengths = np.full(6, 7, np.int32)
        for row, (tokens, _) in enumerate(rows):
            self.buffer[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        start = time.monotonic()
        answers = self.asked.propose([new for _, new in rows], lengths, self.buffer, {})
        assert time.monotonic() - start < 2 * PATIENCE_S  # of which a busy machine has a part
        self.buffer[:] = V + 99
        limits = [K * bool(new) for _, new in rows]
        assert all(len(own) <= most for own, most in zip(answers, limits, strict=True))
        return answers

    def connect(self) -> None:
        until(lambda: any(self.call([([1, 2], [2])])), START_S)


@pytest.fixture
def flags(pair: TinyPair, request: pytest.FixtureRequest) -> str:
    """A draft's own, and those of a test; it runs on the GPU where there is one."""
    more = getattr(request, "param", "")
    return f"--target={pair.target} --draft={pair.draft} --fan_out=uniform:2 {more}"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, flags: str) -> Iterator[Engine]:
    engine = Engine(monkeypatch, flags)
    engine.connect()
    yield engine
    engine.client.close()


@pytest.fixture(params=["path", "tcp", "key"])
def where(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    for name, seconds in {"_RETRY_S": 0.001, "_LONGEST_RETRY_S": 0.01}.items():
        monkeypatch.setattr(f"mpissd.engine.features.draft_client.{name}", seconds)
    monkeypatch.delenv("MPISSD_KEY", raising=False)
    if request.param == "key":
        monkeypatch.setenv("MPISSD_KEY", "a" * 16)
    with socket.socket() as free:  # Bound but not listening, it keeps the port from other tests.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", 0))
        number = free.getsockname()[1]
        yield str(tmp_path / "s") if request.param == "path" else f"tcp://:{number}"


@pytest.mark.parametrize("name", CALLS)
def test_a_recorded_request_is_new_once_and_when_it_returns(engine: Engine, name: str) -> None:
    texts, last = dict[str, list[int]](), dict[str, list[int]]()
    num_new, counts = 1, engine.client.counts
    for sampled, lengths, names in CALLS[name]:
        rows = []
        for own, length, request in zip(sampled, lengths, names, strict=True):
            new, known = [token % V for token in own], texts.setdefault(request, [])
            known[:] = known[: length - len(new)]
            known += [len(request) + n for n in range(length - len(new) - len(known))] + new
            k = len(new) - 1
            num_new += bool(new) and (request not in last or last[request][:k] != new[:k])
            rows.append((known, new))
        answers = engine.call(rows)
        asked = zip(names, answers, rows, strict=True)
        last = {request: answer for request, answer, (_, new) in asked if new} or last
    assert counts["new"] == num_new < counts["rows"] / 3
    assert not counts["lost"] and not counts["late"]


def test_published_counts(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    engine.call([([1, 2, 4], [2, 4])])
    for name, count in (+engine.client.counts).items():
        assert REGISTRY.get_sample_value("vllm:mpissd_total", {"count": name}) == count


def test_counts_that_cannot_be_published_do_not_stop_the_engine(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> NoReturn:
        raise OSError("no space left on device")

    monkeypatch.setattr("mpissd.vllm._metric", full)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "folder")
    for row in [1, 2, 4], [1, 2, 4, 7]:
        engine.call([(row, row[-1:])])
    assert [line.message for line in caplog.records].count(
        "mpissd: counts are not published: no space left on device"
    ) == 1


AT_ONCE = "--parallel_drafting"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [("", "none"), ("", "killed"), ("", "refused"), (AT_ONCE, "none"), (AT_ONCE, "killed")],
    indirect=["flags"],
)
def test_tokens_are_the_targets_always(engine: Engine, pair: TinyPair, fault: str) -> None:
    """Requests join, end, swap rows and are preempted, and some steps do not ask."""

    def greedy(tokens: list[int]) -> int:
        return int(np.argmax(logits_behind(str(pair.target), tuple(tokens))))

    client, counts, rng = engine.client, engine.client.counts, random.Random(3)
    process, is_faulty, before = client._process, False, 0
    waiting, running, texts = [*range(8)], list[int](), [[n + 1, 7, 2 * n, 5] for n in range(8)]
    drafted: dict[int, list[int]] = {}
    while waiting or running:
        while waiting and len(running) < 3:
            running.append(waiting.pop(0))
        if rng.random() < 0.2:
            waiting.insert(0, running.pop(rng.randrange(len(running))))
        rng.shuffle(running)
        rows = []
        for name in running:
            text, new, drafts = texts[name], list[int](), drafted.pop(name, [])
            while not new or (drafts and new[-1] == drafts.pop(0)):
                new.append(greedy(text + new))
            text += new
            rows.append((text, new))
        if rng.random() < 0.9:
            drafted = dict(zip(running, engine.call(rows), strict=True))
        running = [name for name in running if len(texts[name]) < 24]
        if counts["accepted"] > 3 and not is_faulty:
            is_faulty = True
            if fault == "killed":
                process.kill()
                process.wait()
            elif fault == "refused":  # more accepted tokens than were drafted
                engine.call([([1, 2], [2])])
                client._live[0] = client._live[0]._replace(drafted=[5] * (K + 1))
                engine.call([([1, 2, *[5] * (K + 1), 3], [*[5] * (K + 1), 3])])
            if fault != "none":
                engine.connect()  # to another one, which was started for it
                before = counts["accepted"]
    for text in texts:
        alone = text[:4]
        while len(alone) < len(text):
            alone.append(greedy(alone))
        assert text == alone and len(text) >= 24
    assert counts["accepted"] > before + 3 and counts["hits"] > 3
    assert counts["lost"] == (fault != "none") and not counts["late"]
    client.close()
    assert process.poll() is not None


@pytest.mark.parametrize("where", ["path", "tcp"], indirect=True)
def test_faults_cost_drafts_only(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """MPISSD_FAULTS=1000 asks for more of them, some minutes."""
    toy = Path(__file__).with_name("toy_draft.py")
    drafts = subprocess.Popen([sys.executable, toy, where])
    monkeypatch.setattr("mpissd.engine.features.draft_client._SILENT_S", 0.3)
    engine = Engine(monkeypatch, where)
    client, counts, rng, waits = engine.client, engine.client.counts, random.Random(1), [0.0]
    client._patience_s, last, texts = 0.1, [list[int]()] * 4, [[n] for n in range(4)]
    while counts["lost"] < int(os.environ.get("MPISSD_FAULTS", "20")):
        new = [[*own[: rng.randrange(K + 1)], rng.randrange(V)] for own in last]
        texts = [texts[n] * (len(texts[n]) < 80) + new[n] for n in range(4)]
        rng.shuffle(rows := [*range(4)])
        before = counts["waited_us"]
        answers = engine.call([(texts[n], new[n]) for n in rows])
        waits.append((counts["waited_us"] - before) / 1e6)
        last = [answers[rows.index(n)] for n in range(4)]
        time.sleep(0.001)
    print(f"{counts}, longest call {max(waits):.3f} s")
    assert counts["accepted"] > counts["lost"] and counts["late"] and max(waits) < PATIENCE_S
    client.close()
    drafts.kill()
    drafts.wait()


class Ids(list[list[int]]):
    """The two methods of a tensor of tokens that a candidate generator uses."""

    tolist, new_tensor = list.copy, staticmethod(list)


@pytest.mark.parametrize("flags", ["", AT_ONCE], indirect=True)
def test_candidates_of_hugging_face_follow_one_sequence(engine: Engine) -> None:
    candidates, tokens = Candidates(engine.client, longest=12), [4, 2]
    while len(tokens) < 12:
        ((drafted,), _) = candidates.get_candidates(Ids([tokens]))
        assert drafted[: len(tokens)] == tokens and len(drafted) <= min(len(tokens) + K, 11)
        tokens = [*drafted[: len(tokens) + 1], 6]  # the first drafted token is accepted, if any
    assert engine.client.counts["new"] == 2 and engine.client.counts["accepted"] > 2


def test_a_rank_whose_drafts_are_not_read_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Engine(monkeypatch, "--pair=none", rank=1).asked.client is None


ROWS = [(np.array([1, 2], np.int32), 1), (np.array([1, 3], np.int32), 1)]


def served(flags: str, where: str) -> list[str]:
    sizes = f"--lookahead={K} --batch_size=1 --context={LONGEST} --socket={where}"
    return [sys.executable, "-m", "mpissd", "draft", *flags.split(), *sizes.split()]


def test_an_address_serves_one_client_after_another(flags: str, where: str) -> None:
    command = served(flags, where)
    first, second = (DraftClient(where, K, PATIENCE_S, 1, LONGEST) for _ in range(2))
    with subprocess.Popen(command) as process:
        until(lambda: any(first.drafts(ROWS)), START_S)
        assert second.drafts(ROWS) == [[], []]  # waits for its turn, and its engine does not
        (drafted, none) = first.drafts([(np.array([1, 2, 4], np.int32), 1), ROWS[1]])
        assert len(drafted) == K and none == []  # room for one
        first.close()
        until(lambda: any(second.drafts(ROWS)), START_S)
        second.close()
        again = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
        assert (again.returncode, again.stderr.count("\n")) == (2, 1)
        why = "Address already in use" if where[:3] == "tcp" else "another process listens"
        assert f"socket={where}: {why}" in again.stderr
        until(lambda: any(first.drafts(ROWS)), START_S)
        process.kill()
    assert Path(where).is_socket() == (where[:3] != "tcp")
    with subprocess.Popen(command) as process:
        until(lambda: any(first.drafts(ROWS)), START_S)
        first.close()
        process.kill()


@pytest.mark.parametrize("where", ["key"], indirect=True)
def test_only_the_key_gets_drafts(flags: str, where: str, caplog: pytest.LogCaptureFixture) -> None:
    with subprocess.Popen(served(flags, where), stderr=subprocess.PIPE, text=True) as process:
        right, wrong = (DraftClient(where, K, PATIENCE_S, 1, LONGEST) for _ in range(2))
        until(lambda: any(right.drafts(ROWS)), START_S)
        right.close()
        for key, told in (b"b" * 16, "the draft has another"), (None, "only one side has"):
            wrong.address = wrong.address._replace(key=key)
            until(lambda told=told: wrong.drafts(ROWS) and f"{told} MPISSD_KEY" in caplog.text)
            wrong.close()
        with socket.create_connection(right.address.name) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n" * 9)
        with socket.create_connection(right.address.name):  # says nothing, and is left
            until(lambda: any(right.drafts(ROWS)), START_S)
        right.close()
        process.kill()
        lines = process.stderr.read()
    for told in "the client has another MPISSD_KEY", "CHALLENGE message refused", ": late":
        assert told in lines


@pytest.mark.parametrize(
    ("event", "bonus", "token", "seed"),
    [
        *((event, 2, 5, 0) for event in (0, 4, 9)),
        *((1, bonus, 5, 0) for bonus in (V, -1)),
        (1, 2, V, 0),
        (1, 2, 5, -1),
    ],
)
def test_a_protocol_breaker_is_left(
    flags: str, event: int, bonus: int, token: int, seed: int
) -> None:
    client = DraftClient(flags, K, PATIENCE_S, SHAPE.batch, LONGEST)
    until(lambda: client._open() is not None, START_S)
    peer, process = client._connection, client._process
    sent, prompt = (wire.Message(kind, SHAPE) for kind in (wire.Kind.OUTCOME, wire.Kind.PROMPT))
    prompts = {(0, 0): Request(0, bonus, 0, (1, token, bonus), Sampling(seed=seed))}
    outcome = Outcome(-1, np.array([[0, 0, event, 0, bonus]], np.int32), prompts)
    wire.write_outcome(sent, outcome)
    peer.socket.send(sent.array[: wire.HEADER + Outcome.WIDTH].data)
    if event == Event.ADMIT:
        peer.socket.send(prompt.array[: wire.write_prompts(prompt, outcome)].data)
    assert process.wait(START_S) == 0  # its only client was left
    client.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    with Address.of("tcp://:1").socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as ours, listener.accept()[0] as own:
            assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            yield ours, Connection(own)


def packed(*numbers: int, size: int | None = None) -> bytes:
    message = wire.Message(wire.Kind.SPECULATION, SHAPE)
    end = message.write(0, 1, [np.array(numbers, np.int32)])
    if size is not None:
        message.array[wire.Header._fields.index("size")] = size
    return message.array[:end].tobytes()


def test_messages_end_where_their_headers_say(ends: Ends) -> None:
    (sender, own), message = ends, wire.Message(wire.Kind.SPECULATION, SHAPE)
    sent = packed(1, 2, 3)
    for byte in sent[:-1]:
        sender.send(bytes([byte]))
        assert not own.receive(message)
    sender.send(sent[-1:] + packed(4) + packed(5, 6))
    for body in [1, 2, 3], [4], [5, 6]:
        until(lambda: own.receive(message))
        assert message.body(message.header(0, 1)).tolist() == body


CUT = [(packed(1, 2)[:end], f"SPECULATION: {end} bytes: the peer has left") for end in (0, 9, 52)]
LARGE = [(packed(1, size=n), rf"size is {n}, allowed 0\.\.") for n in (-1, 25, 2**31 - 1)]


@pytest.mark.parametrize(("sent", "told"), CUT + LARGE)
def test_cut_and_large_messages(ends: Ends, sent: bytes, told: str) -> None:
    sender, own = ends
    sender.send(sent)
    sender.close()
    with pytest.raises(MpissdError, match=told):
        until(lambda: own.receive(wire.Message(wire.Kind.SPECULATION, SHAPE)))


def test_a_draft_without_the_clients_key(ends: Ends) -> None:
    list(Connection(ends[0]).greet(None, SHAPE, 9))
    with pytest.raises(MpissdError, match="only one side has MPISSD_KEY"):
        list(ends[1].hello(b"a" * 16))


def test_refused_addresses(monkeypatch: pytest.MonkeyPatch, capfd: object) -> None:
    monkeypatch.delenv("MPISSD_KEY", raising=False)
    for where in "tcp://:0", "tcp://::1", "tcp://:65536", "tcp://:80/a", "tcp://u@:80":
        told = refused(capfd, "draft", f"--socket={where}")
        assert f"socket={where}: " in told and "allowed: tcp://HOST:PORT" in told
    for where in "tcp://0.0.0.0:80", "tcp://[::]:80":
        assert f"{where} without MPISSD_KEY" in refused(capfd, "draft", f"--socket={where}")
    monkeypatch.setenv("MPISSD_KEY", "b" * 15)
    assert "MPISSD_KEY has 15 bytes" in refused(capfd, "draft", "--socket=tcp://:80")
