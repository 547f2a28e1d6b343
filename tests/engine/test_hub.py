"""Names of the hub: fetched once from a server that speaks as the hub does, refused without one."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mpissd.engine.model.transformer.sources import open_checkpoint
from tests.text import tiny
from tests.weight_files import CONFIG, values_of, write_folder

ROOT = Path(__file__).resolve().parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
NAME = "owner/tiny-model"


class Hub(ThreadingHTTPServer):
    """Serves one folder as the model NAME; `asked` lists the paths of its requests."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files = {path.name: path.read_bytes() for path in folder.iterdir()}
        self.asked: list[str] = []


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.path.startswith(f"/api/models/{NAME}/tree/"):
            told = [
                {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                for name, data in self.server.files.items()
            ]
            return self.answer(json.dumps(told).encode())
        if self.path.startswith(f"/api/models/{NAME}"):
            files = [{"rfilename": name} for name in self.server.files]
            model = {
                "id": NAME,
                "modelId": NAME,
                "sha": COMMIT,
                "siblings": files,
                "private": False,
            }
            return self.answer(json.dumps(model).encode())
        body = self.server.files.get(self.path.rpartition("/")[2])
        if body is None or not self.path.startswith(f"/{NAME}/resolve/"):
            return self.answer(b"", 404)
        return self.answer(body)

    do_HEAD = do_GET

    def answer(self, body: bytes, code: int = 200) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    config = {**CONFIG, "vocab_size": len(tiny.tokens())}
    (tmp_path / "alone.json").write_text(json.dumps(config), "utf-8")
    values = values_of(open_checkpoint(str(tmp_path / "alone.json")))
    server = Hub(tiny.write(write_folder(tmp_path / "model", config, values)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)


def dry_run(tmp_path: Path, endpoint: str, *flags: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_HOME": str(tmp_path / "home"), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "mpissd", "run", "--dry_run", "--backend=numpy", *flags]
    return subprocess.run(
        [*command, f"--out={tmp_path / 'out'}"],
        cwd=ROOT,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_name_is_fetched_once(hub: Hub, tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    flags = "--prompt=hello", f"--pair={NAME}/{NAME}", "--mode=sd"
    first = dry_run(tmp_path, endpoint, *flags)
    assert first.returncode == 0, first.stderr
    assert any(path.endswith("model.safetensors") for path in hub.asked)
    hub.asked.clear()
    again = dry_run(tmp_path, endpoint, "--prompt=hello", f"--target={NAME}", "--mode=ar")
    assert again.returncode == 0, again.stderr
    assert hub.asked == []


def test_without_a_network_one_line_says_how_to_go_on(tmp_path: Path) -> None:
    done = dry_run(tmp_path, "http://127.0.0.1:9", "--pair=toy-target/owner/absent", "--mode=sd")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("mpissd: owner/absent is not on this machine and cannot be fetch")
    assert "--target=FOLDER" in done.stderr
