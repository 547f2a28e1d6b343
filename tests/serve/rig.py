"""A server over a fake lead, on a free port, in threads of the test."""

import asyncio
import contextlib
import json
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mpissd.engine.text.tokenizer import Tokenizer, load_tokenizer
from mpissd.serve.app import Endpoints
from mpissd.serve.config import ServeConfig
from mpissd.serve.front import Server, bound
from mpissd.serve.lead import Lead
from tests.scripts import until
from tests.serve.fake_lead import FakeLead, Script
from tests.text import tiny

WAIT_S = 60.0


def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(str(tiny.write(folder / "tiny")))


@dataclass
class Rig:
    """A server that runs: its port, its side of the lead, and the lead's script."""

    port: int
    lead: Lead
    server: Server
    script: Script
    fake: FakeLead

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), WAIT_S)

    def send(self, body: bytes, *headers: str, path: str = "/v1/completions") -> socket.socket:
        """Sends a POST; returns the connection, on which nothing has been read."""
        return sent(self.connect(), f"POST {path}", body, *headers)

    def post(self, body: bytes, *headers: str, path: str = "/v1/completions") -> tuple[int, Any]:
        """Sends a POST; returns the status, and the body as JSON."""
        with self.send(body, *headers, path=path) as connection:
            return answered(connection)[:2]


def sent(found: socket.socket, what: str, body: bytes = b"", *headers: str) -> socket.socket:
    """Sends a request on a connection. what: its method and path."""
    told = [f"{what} HTTP/1.1", "host: localhost", f"content-length: {len(body)}"]
    told += headers or ["content-type: application/json"]
    with contextlib.suppress(ConnectionError):
        found.sendall("\r\n".join([*told, "", ""]).encode() + body)
    return found


def answered(connection: socket.socket) -> tuple[int, Any, dict[str, str]]:
    """Reads a response with a length: its status, its JSON (or text) and its headers."""
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = {}
        while (line := file.readline().strip()) != b"":
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        text = file.read(int(headers["content-length"]))
    is_json = "json" in headers.get("content-type", "")
    return status, json.loads(text) if is_json else text.decode(), headers


@contextmanager
def serving(
    words: Tokenizer, script: Script, about: Mapping[str, Any] = MappingProxyType({}), **flags: Any
) -> Iterator[Rig]:
    """Serves the answers of a script. flags: of ServeConfig."""
    config = ServeConfig(**{"auto": True, "max_queue": 8, **flags})
    with tempfile.TemporaryDirectory() as folder, bound("127.0.0.1", 0) as listener:
        port, path = listener.getsockname()[1], str(Path(folder, "lead"))
        found: list[tuple[Lead, Server]] = []

        async def run() -> None:
            lead = Lead(config.max_queue)
            server = Server(Endpoints(lead, words, config, ("tiny", "nick"), about), lead)
            async with await lead.accept(path):
                found.append((lead, server))
                await server.serve(sockets=[listener])
                lead.stop()
                await asyncio.sleep(0.05)

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        until(lambda: found)
        lead, server = found[0]
        fake = FakeLead(path, script)
        until(lambda: lead.ready is not None and server.started)
        try:
            yield Rig(port, lead, server, script, fake)
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            fake.thread.join(WAIT_S)
            assert not thread.is_alive() and not fake.thread.is_alive()
