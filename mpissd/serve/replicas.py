"""Several servers: the folder in which they write their addresses, and the command `replicas`.

The folder is all that replicas share: no locks, no clock, no agreed port. There is one file each. A
killed replica leaves its file: HAProxy asks each replica every second whether it is
ready. `replicas` lists them, and makes HAProxy's configuration of them.
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
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mpissd.common.errors import ConfigError
from mpissd.common.output import check_folder, whole_file
from mpissd.serve.config import ReplicasConfig

SCHEMA = 1
_KEEP_S = 5.0  # time between two checks of this server's entry
_LEAVE_S = 5.0  # longest wait for the folder's file system when the server ends
_ASK_S = 2.0  # for a replica to answer /ready
_EVERY_S = 1.0  # time between two reads of the folder
_SLACK_S = 30  # added to a replica's longest request for the balancer's wait
_ANY = ("0.0.0.0", "::", "")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}|::[A-Za-z0-9.:]{0,40}")
_DAMAGED = (ValueError, TypeError, LookupError, RecursionError)  # JSON of another form
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
    """A replica.

    id: also its server's name in HAProxy. max_wait_s: its longest request, in seconds. about: its
    description, for people.
    """

    id: str
    host: str
    port: int
    max_wait_s: float = 600.0
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def write(folder: Path, entry: Entry) -> None:
    """Writes an entry, or replaces it; raises OSError."""
    with whole_file(folder / f"{entry.id}.json") as file:
        file.write(f"{json.dumps({'schema': SCHEMA, **asdict(entry)})}\n".encode())
        file.flush()
        os.fsync(file.fileno())


def read(folder: Path) -> list[Entry]:
    """Returns the entries of a folder, sorted by id; skips files that are no entry.

    An entry's words go into HAProxy's configuration, so none may hold a space or a newline. Raises
    OSError if the folder, or a file in it, cannot be read.
    """
    entries, known = [], {f.name for f in fields(Entry)}
    for name in sorted(os.listdir(folder)):
        stem, end = os.path.splitext(name)
        if end != ".json" or not _ID.fullmatch(stem):
            continue
        try:
            values = dict(json.loads((folder / name).read_bytes()))
            entry = Entry(**{key: value for key, value in values.items() if key in known})
            is_entry = (
                values["schema"] == SCHEMA
                and entry.id == stem
                and _HOST.fullmatch(entry.host)
                and isinstance(entry.about, dict)
                and type(entry.port) is int
                and type(entry.max_wait_s) in (int, float)
                and 0 < entry.port < 65536
                and 0 < entry.max_wait_s < 1e6
            )
        except (FileNotFoundError, IsADirectoryError, *_DAMAGED):
            continue
        if is_entry:
            entries.append(entry)
    return entries


class Member:
    """The entry of one server, in the folder from when it takes requests until it ends.

    A file system that hangs must stop no request: a thread writes and removes the file.
    """

    def __init__(
        self, folder: str, host: str, port: int, max_wait_s: float, about: Mapping[str, Any]
    ) -> None:
        """Chooses an id: Slurm's job and task, if any, and a random part.

        If the server is bound to all addresses, the entry's host is its node's name, which the
        balancer resolves. Raises ConfigError if the folder cannot be made or written.
        """
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
        """Leaves, and waits at most _LEAVE_S until the entry is gone."""
        self.leave()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)

    def join(self) -> None:
        """Adds the entry, from now on until `leave`."""
        if not self._is_over.is_set():
            self._thread.start()

    def leave(self) -> None:
        """Begins to remove the entry, and returns at once."""
        self._is_over.set()

    def _keep(self) -> None:
        """Writes the entry again where the folder has lost it."""
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
    """Lists the servers of a folder, or keeps HAProxy's file true; returns the exit code.

    Raises ConfigError if the configuration cannot be written.
    """
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
    """Asks a replica whether it is ready; returns "ready", its reason, or "no answer"."""
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
    """Keeps the file true until SIGINT or SIGTERM; prints each fault once and goes on."""
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
    """Writes HAProxy's configuration, if it differs from the file; returns whether it has changed.

    It depends only on the set of addresses and longest requests. A HAProxy that refuses it goes on
    with what it read before. Raises ConfigError if it cannot be written.
    """
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
    """Makes HAProxy's master read the file again; raises ConfigError if there is no master.

    The master (`haproxy -W -p PID_FILE`) hands its listening sockets to new workers, and the old
    ones finish their requests. The signal would end another process that has the number by now.
    """
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
