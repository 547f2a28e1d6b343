"""HAProxy's configuration of a set of replicas, and how it is checked and taken over.

Why each option is there: docs/serving.md, "The balancer".
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from mpissd.common.errors import ConfigError
from mpissd.serve.replicas.entry import Entry

_SLACK_S = 30  # that the balancer waits longer than a replica's longest request
_CHECK_S = 20.0  # of `haproxy -c`
_ERRORS = {  # of HAProxy's own: a status, and what to say
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


def text_of(folder: str, replicas: Sequence[Entry], bind: str) -> str:
    """Returns the configuration, in which nothing changes while the set of addresses does not."""
    longest = max([600.0, *(entry.max_wait_s for entry in replicas)])
    return _FORM.format(
        count=f"{len(replicas)} replica{'' if len(replicas) == 1 else 's'}",
        folder=" ".join(folder.split()),
        longest=int(longest) + _SLACK_S,
        errors="\n".join(_error(*each) for each in _ERRORS.items()),
        bind=bind,
        servers="\n".join(f"    server {entry.id} {entry.address}" for entry in replicas),
    )


def _error(status: int, message: str) -> str:
    """Returns the line of an error that HAProxy answers itself, as OpenAI's clients expect it."""
    told = {"message": message, "type": "server_error", "param": None, "code": "replicas"}
    body = json.dumps({"error": told}).replace('"', '\\"')
    retry = " hdr Retry-After 5" if status == 503 else ""
    return f'    http-error status {status} content-type application/json string "{body}"{retry}'


def install(text: str, file: Path) -> bool:
    """Puts a configuration in a file's place, if it is another one and HAProxy accepts it.

    Returns whether the file has changed. Raises ConfigError where HAProxy refuses it, or it cannot
    be written. Where there is no HAProxy, as on another machine than its own, nothing is checked.
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
        said = " ".join((done.stderr or done.stdout).split())
        raise ConfigError(f"haproxy -c refuses the configuration: {said[:500]}")


def reload(pid_file: Path) -> None:
    """Has HAProxy's master take the file over; raises ConfigError where there is none.

    The master (`haproxy -W -p PID_FILE`) hands its listening sockets to new workers, and the old
    ones finish what they have. Another process may have the number by now, and would be ended by
    the signal.
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
    """Whether a process is one of HAProxy, or of a script of that name; raises OSError where it is
    gone. True where there is no /proc to ask."""
    if not Path("/proc/self/cmdline").exists():
        return True
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:2]
    return any(os.path.basename(word) == b"haproxy" for word in words)
