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
    found = _there(config.folder)
    with ThreadPoolExecutor(32) as pool:
        states = list(pool.map(ask, found))
    print(_table(config.folder, found, states))
    if config.haproxy is not None and _install(config, found):
        _tell(config)
    told = [{**asdict(each), "state": state} for each, state in zip(found, states, strict=True)]
    print(json.dumps({"folder": config.folder, "replicas": told}))
    return 0


def _there(folder: str) -> list[Entry]:
    try:
        return entries.read(Path(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigError(f"folder={folder}: {error.strerror}") from error


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


def _install(config: ReplicasConfig, found: Sequence[Entry]) -> bool:
    """Writes the configuration; returns whether it is another one than before."""
    assert config.haproxy is not None, "checked"
    if not install(text_of(config.folder, found, config.bind), Path(config.haproxy)):
        return False
    names = ", ".join(f"{each.id} {each.address}" for each in found) or "none"
    print(f"{config.haproxy}: {len(found)} replicas: {names}", flush=True)
    return True


def _tell(config: ReplicasConfig) -> None:
    if config.pid_file is not None:
        reload(Path(config.pid_file))


class _Watch:
    """Keeps the file true. A fault is said once, and what was before it stays."""

    def __init__(self, config: ReplicasConfig) -> None:
        self._config = config
        self._living = Living(Path(config.folder), config.expire_s)
        self._is_told = True  # HAProxy, of the last change
        self._has_begun = False
        self._fault = ""

    def look(self) -> None:
        """Looks at the folder once; before there is one, there is no replica."""
        fault = ""
        try:
            self._follow([] if self._is_too_early else self._living.look())
        except ConfigError as error:
            fault = str(error)
        except OSError as error:
            fault = f"{self._config.folder}: {error.strerror}: the file stays as it is"
        if fault and fault != self._fault:
            print(f"mpissd: replicas: {fault}", file=sys.stderr, flush=True)
        self._fault = fault

    @property
    def _is_too_early(self) -> bool:
        self._has_begun = self._has_begun or Path(self._config.folder).exists()
        return not self._has_begun

    def _follow(self, found: Sequence[Entry]) -> None:
        self._is_told = not _install(self._config, found) and self._is_told
        if not self._is_told:
            _tell(self._config)
            self._is_told = True


def _watch(config: ReplicasConfig) -> int:
    watch = _Watch(config)
    with _signalled() as over:
        while not over.is_set():
            watch.look()
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
