"""The command `replicas`: lists the servers of a folder, and makes HAProxy's configuration of them.

docs/serving.md, "The balancer", gives the reason of each option.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.serve.config import ReplicasConfig
from mpissd.serve.folder import Entry, Living, read

_ASK_S = 2.0  # for a replica to answer /ready
_EVERY_S = 1.0  # between two looks at the folder
_SLACK_S = 30  # that the balancer waits longer than a replica's longest request
_CHECK_S = 20.0  # of `haproxy -c`
_ABOUT = ("job", "model", "mode")
_ERRORS = {  # messages of HAProxy's own responses, by status
    502: "the replica that had the request is gone",
    503: "no replica takes requests now",
    504: "the replica said nothing for too long",
}
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
{errors}

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
{servers}
"""


def replicas(config: ReplicasConfig) -> int:
    """Runs the command; without --watch the last line of stdout is JSON. Returns the exit code.

    Raises ConfigError if HAProxy refuses the configuration, or it cannot be written.
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
        states = list(pool.map(ask, entries))
    print(_table(config.folder, entries, states))
    if config.haproxy is not None and _install(config, entries) and config.pid_file is not None:
        reload(Path(config.pid_file))
    rows = [{**asdict(each), "state": state} for each, state in zip(entries, states, strict=True)]
    print(json.dumps({"folder": config.folder, "replicas": rows}))
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
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
            return "no answer"


def _table(folder: str, entries: Sequence[Entry], states: Sequence[str]) -> str:
    rows = [
        (each.id, each.address, *(str(each.about.get(name) or "–") for name in _ABOUT), state)
        for each, state in zip(entries, states, strict=True)
    ]
    if not rows:
        return f"no replica in {folder}"
    columns = zip(("replica", "address", *_ABOUT, "state"), *rows, strict=True)
    padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns]
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))


def _watch(config: ReplicasConfig) -> int:
    """Keeps the file true until SIGINT or SIGTERM; prints each fault once and goes on."""
    over, living = threading.Event(), Living(Path(config.folder), config.expire_s)
    both = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: over.set()) for each in both]
    is_reloaded, has_begun, last_fault = True, False, ""
    while not over.is_set():
        fault = ""
        try:
            has_begun = has_begun or Path(config.folder).exists()
            if _install(config, living.look() if has_begun else []):
                is_reloaded = False
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
    for each, handler in zip(both, before, strict=True):
        signal.signal(each, handler)
    return 0


def _install(config: ReplicasConfig, entries: Sequence[Entry]) -> bool:
    """Writes the configuration; returns whether it has changed."""
    assert config.haproxy is not None, "checked"
    if not install(text_of(config.folder, entries, config.bind), Path(config.haproxy)):
        return False
    names = ", ".join(f"{each.id} {each.address}" for each in entries) or "none"
    print(f"{config.haproxy}: {len(entries)} replicas: {names}", flush=True)
    return True


def text_of(folder: str, entries: Sequence[Entry], bind: str) -> str:
    """Returns the configuration; it depends only on the set of addresses and longest requests."""
    longest = max([600.0, *(entry.max_wait_s for entry in entries)])
    return _FORM.format(
        count=f"{len(entries)} replica{'' if len(entries) == 1 else 's'}",
        folder=" ".join(folder.split()),
        longest=int(longest) + _SLACK_S,
        errors="\n".join(_error(*each) for each in _ERRORS.items()),
        bind=bind,
        servers="\n".join(f"    server {entry.id} {entry.address}" for entry in entries),
    )


def _error(status: int, message: str) -> str:
    """Returns the line of one of HAProxy's own responses, in the form of OpenAI's errors."""
    error = {"message": message, "type": "server_error", "param": None, "code": "replicas"}
    body = json.dumps({"error": error}).replace('"', '\\"')
    retry = " hdr Retry-After 5" if status == 503 else ""
    return f'    http-error status {status} content-type application/json string "{body}"{retry}'


def install(text: str, file: Path) -> bool:
    """Replaces a file by a configuration, if it differs and HAProxy accepts it.

    Returns whether the file has changed. Raises ConfigError if HAProxy refuses it, or it cannot be
    written. Without a HAProxy on this machine nothing is checked.
    """
    made = file.with_name(f".{file.name}.new")
    try:
        if file.exists() and file.read_bytes() == text.encode():
            return False
        made.write_bytes(text.encode())
        _check(made)
        made.replace(file)
    except OSError as error:
        raise ConfigError(f"haproxy={file}: {error.strerror}: allowed: a file") from error
    finally:
        made.unlink(missing_ok=True)
    return True


def _check(file: Path) -> None:
    program = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        return
    command = [program, "-c", "-q", "-f", str(file)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_CHECK_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"haproxy -c: no answer in {_CHECK_S:g} s") from error
    if done.returncode:
        output = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"haproxy -c refuses the configuration: {output[:500]}")


def reload(pid_file: Path) -> None:
    """Makes HAProxy's master read the file again; raises ConfigError if there is no master.

    The master (`haproxy -W -p PID_FILE`) hands its listening sockets to new workers, and the old
    ones finish their requests. The signal would end another process that has the number by now.
    """
    try:
        master = int(pid_file.read_text().split()[0])
        if not _is_haproxy(master):
            raise ProcessLookupError(0, f"process {master} is another program")
        os.kill(master, signal.SIGUSR2)
    except (OSError, ValueError, IndexError) as error:
        why = getattr(error, "strerror", None) or "no number"
        raise ConfigError(f"pid_file={pid_file}: no HAProxy there: {why}") from error


def _is_haproxy(pid: int) -> bool:
    """Returns whether a process is HAProxy, or a script of that name; True without /proc.

    Raises OSError if there is no such process.
    """
    if not Path("/proc/self/cmdline").exists():
        return True
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2]
    return any(os.path.basename(word) == b"haproxy" for word in words)
