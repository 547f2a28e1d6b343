"""The process of `serve` that clients connect to: it starts the ranks, and ends with them.

It starts the ranks as a job of its own (`mpirun … mpissd serve`), whose lead connects to a local
socket in a private folder. Ctrl-C reaches only this process.
"""

from __future__ import annotations

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.flags import without
from mpissd.common.ranks import end_with_parent, launcher, ranks_command
from mpissd.engine.job import Job, resolve_unopened
from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.serve.config import FRONT_FLAGS, KEY_VARIABLE, ServeConfig
from mpissd.serve.folder import Member, entry_of, new_id
from mpissd.serve.lead import Lead
from mpissd.serve.protocol import SOCKET_VARIABLE

LIBRARIES = ("starlette", "uvicorn", "prometheus_client")
_LEAVE_S = 10.0  # longest wait for the job to end by itself
_DIE_S = 3.0  # longest wait after each signal
_LAST_WORDS_S = 1.0  # in which clients get their 503 when the job is gone


def serve(config: ServeConfig, arguments: Sequence[str]) -> int:
    """Runs the command `serve`, whose arguments its ranks get as well; returns the exit code.

    Raises ConfigError if the models cannot be loaded, a library is missing, or the port is taken.
    """
    for name in LIBRARIES:
        if find_spec(name) is None:
            raise ConfigError(f"serve needs {name}: pip install 'mpissd[serve]'")
    job = resolve_unopened(config.of_mode(config.run.mode), config.tp)
    load_tokenizer(job.target_where)
    command = _command(config, arguments)
    from mpissd.serve.server import bound

    with bound(config.host, config.port) as listener:
        return asyncio.run(Front(config, job, listener).run(command))


def _command(config: ServeConfig, arguments: Sequence[str]) -> list[str]:
    """Returns the command that starts the ranks.

    Flags that only the front reads are left out: every user can read a command line, and so a key.
    If the launcher can keep the target alive when its draft dies, the ranks do so.
    """
    words = list(arguments)
    for name in FRONT_FLAGS:
        words = without(words, name)
    is_given = any(word.lstrip("-").startswith("on_draft_loss") for word in arguments)
    options = []
    if config.drafts and not is_given and _can_recover():
        words, options = [*words, "--on_draft_loss=ar"], ["--enable-recovery"]
    return ranks_command(words, config.num_ranks, options)


def _can_recover() -> bool:
    """Returns whether the launcher is Open MPI 5 and all ranks are on this host."""
    if not os.environ.get("MPISSD_ONE_HOST"):  # set by launch/env.sh
        return False
    asked = [*launcher(), "--version"]
    return (
        "(Open MPI) 5." in subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    )


class Front:
    """The server of one command."""

    def __init__(self, config: ServeConfig, job: Job, listener: socket.socket) -> None:
        from mpissd.serve.server import about, make_server

        self._config, self._job, self._listener = config, job, listener
        self._lead = Lead(config.max_queue)
        self._host, self._port = listener.getsockname()[:2]
        self._member: Member | None = None  # keeps this server's address in the folder
        if config.register is not None:
            told = {"model": job.target.name, **about(config, job)}
            entry = entry_of(new_id(), self._host, self._port, config.max_wait_s, told)
            self._member = Member(config.register, entry)
        replica = self._member.id if self._member else None
        self._server = make_server(config, job, self._lead, replica)
        self._server.drain.on_begin = self._begin_to_leave
        draft = "" if job.draft is None else f" with {job.draft.name}"
        self._models = f"{job.target.name}{draft}"

    async def run(self, command: Sequence[str]) -> int:
        """Serves until a signal or the end of the job; returns the exit code."""
        server = self._server
        with (
            _signals(server.end),
            tempfile.TemporaryDirectory(prefix="mpissd-serve-") as folder,
            self._member or contextlib.nullcontext(),
        ):
            self._lead.on_ready = lambda: self._announce(folder)
            path = str(Path(folder, "lead"))
            async with await self._lead.accept(path):
                ranks_told = f"on {self._config.num_ranks} ranks; a first start compiles, too"
                _note(f"loads {self._models} {ranks_told}")
                ranks = await _started(command, path)
                watch = asyncio.create_task(self._watch(ranks))
                await server.serve(sockets=[self._listener])
                watch.cancel()
                if summary := server.drain.summary():
                    _note(summary)
                return await self._leave(ranks, is_asked=not self._lead.ended.is_set())

    async def _watch(self, ranks: asyncio.subprocess.Process) -> None:
        """Ends the server when the job is gone, after the last responses."""
        over = [asyncio.create_task(wait) for wait in (ranks.wait(), self._lead.ended.wait())]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        self._lead.lose("the job is gone")
        self._lead.ended.set()
        if self._member is not None:
            self._member.leave()
        await asyncio.sleep(_LAST_WORDS_S)
        self._server.end()

    async def _leave(self, ranks: asyncio.subprocess.Process, *, is_asked: bool) -> int:
        """Ends the job; returns 0 if a signal asked for it, or the exit code of the job.

        Ranks that are loading read no message, so they are ended at once.
        """
        self._lead.stop()
        try:
            is_loading = is_asked and self._lead.ready is None
            code = await asyncio.wait_for(ranks.wait(), 0 if is_loading else _LEAVE_S)
        except asyncio.TimeoutError:
            code = await ended(ranks)
        if is_asked:
            return 0
        _note(f"the ranks have ended (exit code {code})")
        return code if code > 0 else FaultError.exit_code

    def _begin_to_leave(self) -> None:
        """Removes the address from the folder, and prints the requests that the drain waits for."""
        if self._member is not None:
            self._member.leave()
        longest_s = self._config.drain_s
        _note(f"SIGTERM: {self._lead.outstanding} requests have {longest_s:g} s to end")

    def _announce(self, folder: str) -> None:
        """Prints the address, and removes the socket's folder.

        The lead is connected and needs no path, so a killed server leaves no files.
        """
        shutil.rmtree(folder, ignore_errors=True)
        if self._member is not None:
            self._member.join()
        ready = self._lead.check()
        draft = "" if self._job.draft is None else f" with {self._job.draft.name}"
        mode = "auto" if self._config.auto else ready.mode
        host = f"[{self._host}]" if ":" in self._host else self._host
        url = f"http://{host}:{self._port}/v1"
        sys.stdout.write(f"{url} serves {ready.model}{draft} ({mode}); Ctrl-C ends it\n")
        sys.stdout.flush()


async def ended(ranks: asyncio.subprocess.Process) -> int:
    """Ends the launcher, which ends its ranks; returns its exit code.

    A launcher that ignores SIGTERM is killed; its ranks end when the front's socket is closed.
    """
    for end in (ranks.terminate, ranks.kill):
        with contextlib.suppress(ProcessLookupError):
            end()
        with contextlib.suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(ranks.wait(), _DIE_S)
    return await ranks.wait()


async def _started(command: Sequence[str], path: str) -> asyncio.subprocess.Process:
    """Starts the ranks; their stdout joins this process's stderr."""
    environment = {name: text for name, text in os.environ.items() if name != KEY_VARIABLE}
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        env={**environment, SOCKET_VARIABLE: path},
        start_new_session=True,  # keeps the terminal's Ctrl-C from the ranks
        preexec_fn=end_with_parent,
    )


@contextmanager
def _signals(end: Callable[[], None]) -> Iterator[None]:
    """Makes SIGINT and SIGTERM end only the server, also before uvicorn handles them.

    uvicorn raises them again when it is done.
    """
    both = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(each, lambda number, frame: end()) for each in both]
    try:
        yield
    finally:
        for each, handler in zip(both, before, strict=True):
            signal.signal(each, handler)
        logging.getLogger("uvicorn.error").setLevel(logging.NOTSET)


def _note(line: str) -> None:
    sys.stderr.write(f"mpissd: serve: {line}\n")
    sys.stderr.flush()
