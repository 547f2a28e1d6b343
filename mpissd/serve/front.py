"""The process of `serve` that clients talk to: it listens, starts the ranks, and ends with them.

It starts the ranks as a job of its own (`mpirun … mpissd serve`), whose lead connects to a local
socket in a private folder. Ctrl-C reaches this process alone.
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
from mpissd.serve.http.lead import Lead
from mpissd.serve.http.listen import bound
from mpissd.serve.protocol import SOCKET_VARIABLE
from mpissd.serve.replicas.member import Member, entry_of, new_id

LIBRARIES = ("starlette", "uvicorn", "prometheus_client")
_LEAVE_S = 10.0  # longest wait for the job to end by itself
_DIE_S = 3.0  # likewise, behind each signal
_LAST_WORDS_S = 1.0  # in which clients get their 503 when the job is gone


def serve(config: ServeConfig, arguments: Sequence[str]) -> int:
    """Runs the command `serve`, whose arguments its ranks get as well; returns the exit code.

    Raises ConfigError where the models cannot be had, a library is missing, or the port is taken.
    """
    for name in LIBRARIES:
        if find_spec(name) is None:
            raise ConfigError(f"serve needs {name}: pip install 'mpissd[serve]'")
    job = resolve_unopened(config.of_mode(config.run.mode), config.tp)
    load_tokenizer(job.target_where)
    command = ranks_command(*_for_ranks(config, arguments))
    with bound(config.host, config.port) as listener:
        return asyncio.run(Front(config, job, listener).run(command))


def _for_ranks(
    config: ServeConfig, arguments: Sequence[str]
) -> tuple[list[str], int, Sequence[str]]:
    """Returns the ranks' arguments, their number, and options of the launcher.

    What the front alone reads stays here: a command line, and so a key, can be read by every user.
    Where the launcher can let the target live when its draft dies, it does.
    """
    words = list(arguments)
    for name in FRONT_FLAGS:
        words = without(words, name)
    said = any(word.lstrip("-").startswith("on_draft_loss") for word in arguments)
    if config.drafts and not said and _can_recover():
        return [*words, "--on_draft_loss=ar"], config.num_ranks, ["--enable-recovery"]
    return words, config.num_ranks, []


def _can_recover() -> bool:
    """Returns whether the launcher is Open MPI 5 and all ranks are on this host."""
    if not os.environ.get("MPISSD_ONE_HOST"):  # launch/env.sh says it
        return False
    asked = [*launcher(), "--version"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    return "(Open MPI) 5." in told.stdout


class Front:
    """The server of one command."""

    def __init__(self, config: ServeConfig, job: Job, listener: socket.socket) -> None:
        self._config, self._job, self._listener = config, job, listener
        self._lead = Lead(config.max_queue)
        self._member = self._membership()

    def _membership(self) -> Member | None:
        """Returns what says this server's address in the folder, where one is named."""
        if self._config.register is None:
            return None
        from mpissd.serve.http.server import about

        host, port = self._listener.getsockname()[:2]
        told = {"model": self._job.target.name, **about(self._config, self._job)}
        entry = entry_of(new_id(), host, port, self._config.max_wait_s, told)
        return Member(self._config.register, entry)

    async def run(self, command: Sequence[str]) -> int:
        """Serves until a signal or the end of the job; returns the exit code."""
        from mpissd.serve.http.server import make_server

        member = self._member
        server = make_server(self._config, self._job, self._lead, member.id if member else None)
        server.drain.on_begin = self._begin_to_leave
        with (
            _signals(server.end),
            tempfile.TemporaryDirectory(prefix="mpissd-serve-") as folder,
            member or contextlib.nullcontext(),
        ):
            self._lead.on_ready = lambda: self._announce(folder)
            path = str(Path(folder, "lead"))
            async with await self._lead.accept(path):
                self._say_what_loads()
                ranks = await _started(command, path)
                watch = asyncio.create_task(self._watch(ranks, server.end))
                await server.serve(sockets=[self._listener])
                watch.cancel()
                if told := server.drain.ending():
                    sys.stderr.write(f"mpissd: serve: {told}\n")
                return await self._leave(ranks, is_asked=not self._lead.ended.is_set())

    async def _watch(self, ranks: asyncio.subprocess.Process, end: Callable[[], None]) -> None:
        """Ends the server when the job is gone, behind the last answers."""
        over = [asyncio.create_task(wait) for wait in (ranks.wait(), self._lead.ended.wait())]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        self._lead.lose("the job is gone")
        self._lead.ended.set()
        if self._member is not None:
            self._member.leave()
        await asyncio.sleep(_LAST_WORDS_S)
        end()

    async def _leave(self, ranks: asyncio.subprocess.Process, *, is_asked: bool) -> int:
        """Ends the job; returns 0 if a signal asked for it, else what the job ended with.

        Ranks that load read no message: they are not waited for.
        """
        self._lead.stop()
        try:
            is_loading = is_asked and self._lead.ready is None
            code = await asyncio.wait_for(ranks.wait(), 0 if is_loading else _LEAVE_S)
        except asyncio.TimeoutError:
            code = await ended(ranks)
        if is_asked:
            return 0
        sys.stderr.write(f"mpissd: serve: the ranks have ended (exit code {code})\n")
        return code if code > 0 else FaultError.exit_code

    def _begin_to_leave(self) -> None:
        """Takes the address out of the folder, and says what is waited for."""
        if self._member is not None:
            self._member.leave()
        told = f"{self._lead.outstanding} requests have {self._config.drain_s:g} s to end"
        sys.stderr.write(f"mpissd: serve: SIGTERM: {told}\n")

    def _say_what_loads(self) -> None:
        draft = "" if self._job.draft is None else f" with {self._job.draft.name}"
        sys.stderr.write(
            f"mpissd: serve: loads {self._job.target.name}{draft} on {self._config.num_ranks} "
            "ranks; a first start compiles, too\n"
        )
        sys.stderr.flush()

    def _announce(self, folder: str) -> None:
        """Says the address, and removes the socket's folder: who is connected needs no path, and
        a server that is killed leaves nothing behind."""
        shutil.rmtree(folder, ignore_errors=True)
        if self._member is not None:
            self._member.join()
        host, port = self._listener.getsockname()[:2]
        ready = self._lead.check()
        place = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        draft = "" if self._job.draft is None else f" with {self._job.draft.name}"
        mode = "auto" if self._config.auto else ready.mode
        sys.stdout.write(f"{place} serves {ready.model}{draft} ({mode}); Ctrl-C ends it\n")
        sys.stdout.flush()


async def ended(ranks: asyncio.subprocess.Process) -> int:
    """Ends the launcher, which ends its ranks; returns its exit code.

    One that does not listen is killed: its ranks end when the front's socket is closed.
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
    """Makes SIGINT and SIGTERM end the server alone, also before uvicorn listens to them.

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
