"""Several servers that share a folder, in which each writes its address, and the command
`replicas`.

Servers ("replicas") share only the folder: no locks, no clock, no agreed port. Each writes one
file. A killed replica leaves its file, so HAProxy asks each replica every second whether it is
ready. `replicas` lists them, and writes HAProxy's configuration for them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import platform
import re
import secrets
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from mpissd.common.errors import ConfigError
from mpissd.common.output import check_folder, whole_file
from mpissd.serve.config import ReplicasConfig

_KEEP_S = 5.0  # seconds between two checks that this server's file exists
_LEAVE_S = 5.0  # longest wait, in s, for the folder's file system when the server ends
_ASK_S = 2.0  # longest wait, in s, for a replica to answer /ready
_EVERY_S = 1.0  # seconds between two reads of the shared folder
_SLACK_S = 30  # seconds that HAProxy's timeout is longer than the longest request
_ANY = ("0.0.0.0", "::", "")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = r"\A(?:[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}|::[A-Za-z0-9.:]{0,40})\Z"
_DAMAGED = (ValueError, TypeError, LookupError, RecursionError)  # raised for JSON of another form
_FORM = """\
# {count}, of {folder}. `python -m mpissd replicas` writes this file: changes to it are lost.
global
    maxconn 4096
    hard-stop-after {longest}s

defaults
    mode http
    timeout connect 2s
    timeout check 2s
    timeout http-request 30s
    timeout client {longest}s
    timeout server {longest}s
    option httpclose
    option http-no-delay
    option srvtcpka
    srvtcpka-idle 10s
    srvtcpka-intvl 5s
    srvtcpka-cnt 3
    retries 3
    retry-on conn-failure
    option redispatch 1

frontend mpissd
    bind {bind}
    default_backend replicas

backend replicas
    balance leastconn
    option httpchk
    http-check send meth GET uri /ready hdr X-Replica %[srv_name]
    http-check expect status 200
    http-check expect hdr name "x-replica"
    default-server check inter 1s fastinter 250ms rise 1 fall 3 init-addr last,libc,none
    # Shows the page of `/` a busy server's numbers: balance chooses an idle one.
    use-server %[req.hdr(x-replica)] if {{ req.hdr(x-replica) -m found }}
{servers}
"""


@dataclass(frozen=True)
class Entry:
    """What a replica's file in the shared folder says. id: also its server name in HAProxy.
    max_wait_s: the longest time of a request, in seconds. about: a description for users."""

    id: str
    host: Annotated[str, Meta(pattern=_HOST)]
    port: Annotated[int, Meta(ge=1, le=65535)]
    max_wait_s: Annotated[float, Meta(gt=0, lt=1e6)] = 600.0
    about: Mapping[str, Any] = field(default_factory=dict)
    schema: Literal[1] = 1

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def write(folder: Path, entry: Entry) -> None:
    """Writes or replaces a server's file in the shared folder; raises OSError if that fails."""
    with whole_file(folder / f"{entry.id}.json") as file:
        file.write(msgspec.json.encode(entry) + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Entry]:
    """Returns the replicas of a folder, sorted by id; skips other files, and files whose host or id
    has a space or a newline, since both are put into HAProxy's configuration. Raises OSError if the
    folder, or a file in it, cannot be read."""
    entries = list[Entry]()
    for name in sorted(os.listdir(folder)):
        stem, end = os.path.splitext(name)
        if end != ".json" or not _ID.fullmatch(stem):
            continue
        try:
            entry = msgspec.json.decode((folder / name).read_bytes(), type=Entry)
        except (FileNotFoundError, IsADirectoryError, *_DAMAGED):
            continue
        if entry.id == stem:
            entries.append(entry)
    return entries


class Member:
    """Keeps a server's file in the shared folder while the server takes requests. A thread writes
    and removes the file, so that a file system that hangs delays no request."""

    def __init__(
        self, folder: str, host: str, port: int, max_wait_s: float, about: Mapping[str, Any]
    ) -> None:
        """Chooses the server's id: Slurm's job and task, if any, and a random part. If the server
        listens on all addresses, its host is the node's name. Raises ConfigError if the folder is
        read-only."""
        get, node = os.environ.get, platform.node()
        job = get("SLURM_ARRAY_JOB_ID") or get("SLURM_JOB_ID", "")
        parts = [part for part in (job, get("SLURM_ARRAY_TASK_ID", "")) if part.isdecimal()]
        self.id = "-".join(["r", *parts, secrets.token_hex(4)])
        about = {"node": node, "pid": os.getpid(), "job": get("SLURM_JOB_ID"), **about}
        self._entry = Entry(self.id, node if host in _ANY else host, port, max_wait_s, about)
        self._folder = Path(folder)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="replica", daemon=True)
        check_folder(f"register={folder}", self._folder.absolute())
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *failure: object) -> None:
        """Has the server's file removed; waits at most _LEAVE_S for that."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def join(self) -> None:
        """Starts the thread that writes the server's file and keeps it there until `leave`."""
        if not self._is_over.is_set():
            self._thread.start()

    def leave(self) -> None:
        """Has the thread remove the server's file; returns at once."""
        self._is_over.set()

    def _keep(self) -> None:
        """Runs in the thread: writes the server's file if it is missing; removes it at the end."""
        fault = ""
        while not self._is_over.is_set():
            try:
                if not (self._folder / f"{self.id}.json").exists():
                    write(self._folder, self._entry)
                fault = ""
            except OSError as error:
                if not fault:
                    fault = f"register={self._folder}: {error.strerror}: trying on"
                    sys.stderr.write(f"mpissd: serve: {fault}\n")
            self._is_over.wait(_KEEP_S)
        with contextlib.suppress(OSError):
            (self._folder / f"{self.id}.json").unlink()


def replicas(config: ReplicasConfig) -> int:
    """Lists the servers of a folder; with --haproxy writes HAProxy's file, with --watch until a
    signal. Returns 0. Raises ConfigError if HAProxy's file cannot be written."""
    if config.watch:
        return _watch(config)
    try:
        entries = read(Path(config.folder))
    except FileNotFoundError:
        entries = []
    except OSError as error:
        raise ConfigError(f"folder={config.folder}: {error.strerror}") from error
    with ThreadPoolExecutor(32) as pool:
        for entry, state in zip(entries, pool.map(ask, entries), strict=True):
            print(entry.id, entry.address, entry.about.get("model"), f"({state})")
    if not entries:
        print(f"no replica in {config.folder}")
    if install(config, entries) and config.pid_file is not None:
        reload(Path(config.pid_file))
    return 0


def ask(entry: Entry) -> str:
    """Returns a replica's state: "ready", why it is not, "another server" or "no answer"."""
    connection = http.client.HTTPConnection(entry.host, entry.port, timeout=_ASK_S)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/ready", headers={"X-Replica": entry.id})
            response = connection.getresponse()
            state = json.loads(response.read(1 << 16))
            if response.headers.get("x-replica") != entry.id:
                return "another server"
            return "ready" if state["ready"] is True else str(state["reason"])
        except (OSError, http.client.HTTPException, *_DAMAGED):
            return "no answer"


def _watch(config: ReplicasConfig) -> int:
    """Keeps HAProxy's file up to date until SIGINT or SIGTERM; prints each fault only once."""
    over, folder = threading.Event(), Path(config.folder)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, frame: over.set())
    is_reloaded, has_begun, last_fault = True, False, ""
    while not over.is_set():
        fault = ""
        try:
            has_begun = has_begun or folder.exists()
            is_reloaded &= not install(config, read(folder) if has_begun else [])
            if not is_reloaded and config.pid_file is not None:
                reload(Path(config.pid_file))
            is_reloaded = True
        except ConfigError as error:
            fault = str(error)
        except OSError as error:
            fault = f"{config.folder}: {error.strerror}: the file stays as it is"
        if fault and fault != last_fault:
            print(f"mpissd: replicas: {fault}", file=sys.stderr, flush=True)
        last_fault = fault
        over.wait(_EVERY_S)
    return 0


def install(config: ReplicasConfig, entries: Sequence[Entry]) -> bool:
    """Writes HAProxy's configuration if it has changed; returns whether it has. The configuration
    depends only on the replicas' addresses and longest requests; if HAProxy refuses it, the
    previous one stays in use. Raises ConfigError if the file cannot be written."""
    if config.haproxy is None:
        return False
    text = _FORM.format(
        count=f"{len(entries)} replica{'' if len(entries) == 1 else 's'}",
        folder=" ".join(config.folder.split()),
        longest=int(max([600.0, *(entry.max_wait_s for entry in entries)])) + _SLACK_S,
        bind=config.bind,
        servers="\n".join(f"    server {entry.id} {entry.address}" for entry in entries),
    )
    path = Path(config.haproxy)
    try:
        if path.exists() and path.read_bytes() == text.encode():
            return False
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise ConfigError(f"haproxy={path}: {error.strerror}: allowed: a file") from error
    print(f"{config.haproxy}: {' '.join(e.id for e in entries) or 'no replica'}", flush=True)
    return True


def reload(pid_file: Path) -> None:
    """Makes HAProxy read its configuration again; raises ConfigError without a running HAProxy.
    HAProxy's master process (`haproxy -W -p PID_FILE`) passes the listening sockets to new workers,
    and old workers finish their requests. The process's name is checked before it is signalled,
    since the number in PID_FILE may belong to another program by now."""
    try:
        master = int(pid_file.read_text().split()[0])
        name = Path(f"/proc/{master}/comm")
        os.kill(master, 0)
        if Path("/proc/self/comm").exists() and name.read_text().strip() != "haproxy":
            raise ProcessLookupError(0, f"process {master} is another program")
        os.kill(master, signal.SIGUSR2)
    except (OSError, ValueError, IndexError, OverflowError) as error:
        why = getattr(error, "strerror", None) or "no number"
        raise ConfigError(f"pid_file={pid_file}: no HAProxy there: {why}") from error
