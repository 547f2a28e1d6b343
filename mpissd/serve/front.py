"""The front of `serve`: the process that HTTP clients connect to, which starts and ends the ranks.

The ranks are a job of their own (`mpirun … mpissd serve`). Their lead, the target's rank 0,
connects to the front's local socket in a private folder. Ctrl-C in the terminal reaches only the
front.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.flags import without
from mpissd.common.ranks import end_with_parent, launcher, ranks_command
from mpissd.engine.job import Job, resolve_unopened
from mpissd.engine.text.tokenizer import load_tokenizer
from mpissd.serve.app import REQUESTS, Endpoints
from mpissd.serve.config import AUTO, FRONT_FLAGS, KEY_VARIABLE, ServeConfig
from mpissd.serve.lead import Lead
from mpissd.serve.protocol import SOCKET_VARIABLE
from mpissd.serve.replicas import Member

HEAD_S = 15.0  # seconds in which the headers of a request have to arrive
WRITE_S = 30.0  # seconds after which a client that reads nothing of its answer is cut off
SEND_BYTES = 1 << 16
_LONGEST_FOLDER = 70  # most bytes of a folder's path, as the path of a socket in it has at most 103
_TELL_S = 2.0  # time between two progress lines while the models load
NOTICE_S = 5.0  # seconds until load balancers notice that the server will end; HAProxy needs 1.5
# The next four constants, in seconds, bound the end of the server to 5 s if the launcher hangs.
_GRACE_S = 1  # longest wait, in s, for connections to close
_LEAVE_S = 2.0  # longest wait, in s, until the ranks end by themselves
_DIE_S = 0.5  # longest wait after each signal to the launcher
_LAST_WORDS_S = 1.0  # seconds for clients to get status 503 when the ranks are gone


def serve(config: ServeConfig, arguments: Sequence[str]) -> int:
    """Runs the command `serve`; returns its exit code. arguments: the command line's words, which
    the ranks get, too. Raises ConfigError if models cannot be loaded, or the port is taken."""
    job = resolve_unopened(config.of_mode(config.run.mode), config.tp)
    load_tokenizer(job.target_where)
    # All users can read a command line, so the API key is not in that of the ranks.
    words = list(arguments)
    for name in FRONT_FLAGS:
        words = without(words, name)
    options = []
    is_given = without(arguments, "on_draft_loss") != list(arguments)
    is_wanted = config.run.on_draft_loss == "ar" or not is_given
    # set by launch/env.sh
    if config.num_drafts and is_wanted and os.environ.get("MPISSD_ONE_HOST"):
        version = subprocess.run([*launcher(), "--version"], capture_output=True, text=True)
        if "(Open MPI) 5." in version.stdout:  # Open MPI 5 can go on without the draft rank
            words += ["--on_draft_loss=ar"] * (not is_given)
            options = ["--enable-recovery"]
    command = ranks_command(words, config.num_ranks, options)
    with bound(config.host, config.port) as listener:
        return asyncio.run(_serve(config, job, listener, command))


async def _serve(
    config: ServeConfig, job: Job, listener: socket.socket, command: Sequence[str]
) -> int:
    """Serves until a signal (returns 0), or until the ranks end (returns their exit code)."""
    run, lead, loop = config.run, Lead(config.max_queue), asyncio.get_running_loop()
    host, port = listener.getsockname()[:2]
    about = {
        "mode": AUTO if config.auto else run.mode,
        "draft": job.draft.name if job.draft else None,
        "tp": config.tp,
        "replicas": 1,
        "num_drafts": config.num_drafts,
        "world_size": config.num_ranks,
        "lookahead": 0 if run.mode == "ar" else run.lookahead,
    }
    member = None  # an object that keeps this server's address in the shared folder
    if config.register is not None:
        described = {"model": job.target.name, **about}
        member = Member(config.register, host, port, config.max_wait_s, described)
    names = list(dict.fromkeys(name for name in (job.target.name, run.pair) if name))
    tokenizer = load_tokenizer(job.target_where)
    endpoints = Endpoints(lead, tokenizer, config, names, about, member.id if member else None)
    server = Server(endpoints, lead)
    with_draft = "" if job.draft is None else f" with {job.draft.name}"
    draining: asyncio.Task[None] | None = None

    async def drain() -> None:
        """Ends the server gently: tells load balancers by /ready, later refuses new requests, and
        waits until requests have ended or drain_s is over. New requests are still taken for
        NOTICE_S, since a load balancer asks /ready only now and then."""
        started = loop.time()
        lead.is_leaving = True
        if member is not None:
            member.leave()
        _note(f"SIGTERM: {lead.outstanding} requests have {config.drain_s:g} s to end")
        tasks = server.server_state.tasks
        try:
            if member is not None and lead.is_serving:
                await asyncio.sleep(min(NOTICE_S, config.drain_s))
            lead.is_refusing = True
            while tasks and loop.time() < started + config.drain_s:
                await asyncio.sleep(0.05)
        finally:  # also if a second signal cancels this task
            took = f"drained in {loop.time() - started:.1f} s"
            _note(f"{took}; requests cut off: {len(tasks) or 'none'}")
            server.should_exit = True

    def on_signal(number: int) -> None:
        nonlocal draining
        if draining is not None:
            draining.cancel()
        elif number == signal.SIGTERM and config.drain_s:
            draining = loop.create_task(drain())
        else:
            server.should_exit = True

    async def watch(ranks: asyncio.subprocess.Process) -> None:
        """Prints the address when the ranks are ready; ends the server when they are gone."""
        over = [asyncio.create_task(wait) for wait in (ranks.wait(), lead.ended.wait())]
        ready = asyncio.create_task(lead.connected.wait())
        waits, begun, first = [*over, ready], loop.time(), asyncio.FIRST_COMPLETED
        while not (await asyncio.wait(waits, timeout=_TELL_S, return_when=first))[0]:
            if sys.stderr.isatty():  # the next line replaces this one
                sys.stderr.write(f"\x1b[2Kmpissd: serve: loading, {loop.time() - begun:.0f} s\r")
                sys.stderr.flush()
        if lead.is_serving:
            shutil.rmtree(folder, ignore_errors=True)  # From here on a kill leaves no folder.
            if member is not None and draining is None:
                member.join()
            url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
            how = f", K={about['lookahead']}{' in one forward' * run.parallel_drafting}"
            how = f"{about['mode']}{how if about['lookahead'] else ''}"
            model = f"{lead.check().model}{with_draft}"
            sys.stdout.write(f"{url} serves {model} ({how}); Ctrl-C ends it\n")
            sys.stdout.flush()
            _note(f"open {url.removesuffix('v1')} in a browser to watch and try it")
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        lead.lose("the job is gone")
        lead.ended.set()
        if member is not None:
            member.leave()
        await asyncio.sleep(_LAST_WORDS_S)
        server.should_exit = True

    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, on_signal, each)
    with _private_folder() as folder, member or contextlib.nullcontext():
        path = str(Path(folder, "lead"))
        async with await lead.accept(path):
            _note(f"loads {job.target.name}{with_draft} on {config.num_ranks} ranks")
            environment = {name: text for name, text in os.environ.items() if name != KEY_VARIABLE}
            ranks = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                env={**environment, SOCKET_VARIABLE: path},
                start_new_session=True,  # keeps the terminal's Ctrl-C from the ranks
                preexec_fn=end_with_parent,
            )
            watching = asyncio.create_task(watch(ranks))
            await server.serve(sockets=[listener])
            watching.cancel()
            is_asked = not lead.ended.is_set()
            lead.stop()
            try:  # ranks that are loading read no message, so they are ended at once
                wait_s = 0 if is_asked and lead.ready is None else _LEAVE_S
                code = await asyncio.wait_for(ranks.wait(), wait_s)
            except asyncio.TimeoutError:
                code = await ended(ranks)
    if is_asked:
        return 0
    code = code if code > 0 else FaultError.exit_code  # a launcher with recovery may return 0
    _note(f"the ranks have ended (exit code {code})")
    return code


def _private_folder() -> tempfile.TemporaryDirectory[str]:
    """Makes a temporary folder for a socket; in /tmp if TMPDIR's path is too long for that."""
    place = tempfile.gettempdir()
    place = "/tmp" if len(os.fsencode(place)) > _LONGEST_FOLDER else place
    try:
        return tempfile.TemporaryDirectory(prefix="mpissd-serve-", dir=place)
    except OSError as error:
        raise ConfigError(f"TMPDIR: {place}: {error.strerror}: allowed: a short path") from error


async def ended(ranks: asyncio.subprocess.Process) -> int:
    """Ends the launcher, which ends its ranks; returns the launcher's exit code. A launcher that
    ignores SIGTERM is killed; the ranks then end when this process closes the socket to them."""
    for end in (ranks.terminate, ranks.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(ranks.wait(), _DIE_S)
    return await ranks.wait()


def _note(line: str) -> None:
    sys.stderr.write(f"mpissd: serve: {line}\n")


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket bound to this address; raises ConfigError if that fails. Connections inherit
    the socket's options: a small send buffer keeps the kernel from holding megabytes for a slow
    client, and the kernel closes a connection whose client reads nothing for WRITE_S."""
    try:
        info = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(info[0], socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
            unread_ms = int(1000 * WRITE_S)
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread_ms)
        listener.bind(info[4])
    except OSError as error:
        why = f"{error.strerror}: allowed: a free one"
        raise ConfigError(f"host={host} port={port}: {why}") from error
    with listener:
        yield listener


class BoundedProtocol(H11Protocol):
    """An HTTP connection that is closed if it is idle for HEAD_S to 2 · HEAD_S, where uvicorn
    itself would wait for a request without limit. If REQUESTS connections are open, a new one
    closes the oldest idle one, so idle clients keep nobody out."""

    def connection_made(self, transport: Any) -> None:
        """Closes the longest idle connection if too many are open; has the new one checked."""
        if len(self.connections) >= REQUESTS:
            every: Any = self.connections
            idle = [one for one in every if not (one.is_busy or one.transport.is_closing())]
            if idle:
                min(idle, key=lambda one: one.made_s).transport.abort()
        self.made_s = self.loop.time()
        super().connection_made(transport)
        self.loop.call_later(HEAD_S, self._look, None)

    @property
    def is_busy(self) -> bool:
        """Whether a request of this connection is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self, last: object) -> None:
        """Closes the connection if it has been idle since the last check. last: the last request
        before that check; None if there was none, or it was not answered yet."""
        if self.transport.is_closing():
            return
        is_used = self.is_busy or self.transport.get_write_buffer_size()
        if is_used or self.cycle is not last:
            self.loop.call_later(HEAD_S, self._look, None if is_used else self.cycle)
        else:
            self.transport.abort()


class Server(uvicorn.Server):
    """A uvicorn server that fails unanswered requests at its end, and handles no signals itself."""

    def __init__(self, app: Any, lead: Lead) -> None:
        self._lead = lead
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="error",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=int(HEAD_S),  # seconds; clients keep an idle connection shorter
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

    def capture_signals(self) -> Any:
        """Leaves the process's signal handlers as they are."""
        return contextlib.nullcontext()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fails unanswered requests, and closes all connections."""
        self._lead.lose("the server ends")
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await asyncio.sleep(0)  # lets the responses be written first
        await super().shutdown(sockets)
