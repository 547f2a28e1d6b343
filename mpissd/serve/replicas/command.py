"""The command `replicas`: who is in a folder, and HAProxy's configuration of them."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.serve.replicas import entry as entries
from mpissd.serve.replicas.config import ReplicasConfig
from mpissd.serve.replicas.entry import Entry
from mpissd.serve.replicas.haproxy import install, reload, text_of
from mpissd.serve.replicas.living import Living

_ASK_S = 2.0  # for a replica to say whether it is ready
_EVERY_S = 1.0  # between two looks at the folder
_READY = "ready"
_ABOUT = ("job", "model", "mode")


def replicas(config: ReplicasConfig) -> int:
    """Runs the command; without --watch the last line of stdout is JSON. Returns the exit code.

    Raises ConfigError where HAProxy refuses the configuration, or it cannot be written.
    """
    if config.watch:
        return _watch(config)
    found = entries.read(Path(config.folder))
    with ThreadPoolExecutor(32) as pool:
        states = list(pool.map(ask, found))
    print(_table(config.folder, found, states))
    if config.haproxy is not None:
        _update(config, found)
    told = [{**asdict(each), "state": state} for each, state in zip(found, states, strict=True)]
    print(json.dumps({"folder": config.folder, "replicas": told}))
    return 0


def ask(entry: Entry) -> str:
    """Asks a replica whether it is ready; returns "ready", its reason, or "no answer"."""
    connection = http.client.HTTPConnection(entry.host, entry.port, timeout=_ASK_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/ready", headers={"X-Replica": entry.id})
            response = connection.getresponse()
            told = json.loads(response.read(1 << 16))
            if response.headers.get("x-replica") != entry.id:
                return "another server"
            return _READY if told["ready"] is True else str(told["reason"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return "no answer"


def _table(folder: str, found: Sequence[Entry], states: Sequence[str]) -> str:
    heads = ("replica", "address", *_ABOUT, "state")
    rows = [
        (each.id, each.address, *(str(each.about.get(name) or "–") for name in _ABOUT), state)
        for each, state in zip(found, states, strict=True)
    ]
    if not rows:
        return f"no replica in {folder}"
    columns = zip(heads, *rows, strict=True)
    padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _update(config: ReplicasConfig, found: Sequence[Entry]) -> None:
    """Writes the configuration if it is another one, and tells HAProxy."""
    assert config.haproxy is not None, "checked"
    if not install(text_of(config.folder, found, config.bind), Path(config.haproxy)):
        return
    why = reload(Path(config.pid_file)) if config.pid_file else None
    names = ", ".join(f"{each.id} {each.address}" for each in found) or "none"
    print(f"{config.haproxy}: {len(found)} replicas: {names}", flush=True)
    if why is not None:
        print(f"mpissd: replicas: {why}", file=sys.stderr, flush=True)


def _watch(config: ReplicasConfig) -> int:
    """Keeps the file true until a signal; a fault is said when it is another than the last."""
    living, fault = Living(Path(config.folder), config.expire_s), ""
    with _signalled() as over:
        while not over.is_set():
            try:
                _update(config, living.look())
                fault = ""
            except ConfigError as error:
                if str(error) != fault:
                    fault = str(error)
                    print(f"mpissd: replicas: {fault}", file=sys.stderr, flush=True)
            over.wait(_EVERY_S)
    return 0


@contextmanager
def _signalled() -> Iterator[threading.Event]:
    """Gives an event that SIGINT and SIGTERM set."""
    over = threading.Event()
    both = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: over.set()) for each in both]
    try:
        yield over
    finally:
        for each, handler in zip(both, before, strict=True):
            signal.signal(each, handler)
