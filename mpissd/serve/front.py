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
from mpissd.common.flags import MODES, without
from mpissd.common.ranks import end_with_parent, launcher, ranks_command
from mpissd.engine.job import Job, resolve_unopened
from mpissd.engine.workload.text.tokenizer import load_tokenizer
from mpissd.serve.config import AUTO, FRONT_FLAGS, KEY_VARIABLE, ServeConfig
from mpissd.serve.lead import Lead
from mpissd.serve.protocol import SOCKET_VARIABLE
from mpissd.serve.replicas import Member

NOTICE_S = 5.0  # of a drain, in which balancers turn away; HAProxy's checks take 1.5 s
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
        return asyncio.run(_serve(config, job, listener, command))


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


async def _serve(
    config: ServeConfig, job: Job, listener: socket.socket, command: Sequence[str]
) -> int:
    """Serves until a signal or the end of the job; returns the exit code.

    That is 0 if a signal asked for the end, or the job's.
    """
    from mpissd.serve.app import Defaults, Endpoints
    from mpissd.serve.server import Server, settings

    run, lead = config.run, Lead(config.max_queue)
    host, port = listener.getsockname()[:2]
    about = {
        "mode": AUTO if config.auto else run.mode,
        "draft": job.draft.name if job.draft else None,
        "tp": config.tp,
        "replicas": 1,
        "num_drafts": config.drafts,
        "world_size": config.num_ranks,
        "lookahead": 0 if run.mode == "ar" else run.lookahead,
    }
    member = None  # keeps this server's address in the folder
    if config.register is not None:
        told = {"model": job.target.name, **about}
        member = Member(config.register, host, port, config.max_wait_s, told)
    defaults = Defaults(
        names=tuple(dict.fromkeys(name for name in (job.target.name, run.pair) if name)),
        num_tokens=run.num_tokens or 512,
        temperature=run.temperature,
        max_wait_s=config.max_wait_s,
        key=config.key,
        about=about,
        replica=member.id if member else None,
        modes=(MODES if config.drafts else MODES[:2]) if config.auto else (run.mode,),
    )
    app = Endpoints(lead, load_tokenizer(job.target_where), defaults).app()
    server = Server(settings(app), lead, config.drain_s, NOTICE_S if member else 0.0)
    with_draft = "" if job.draft is None else f" with {job.draft.name}"

    def drain() -> None:
        if member is not None:
            member.leave()
        _note(f"SIGTERM: {lead.outstanding} requests have {config.drain_s:g} s to end")

    def announce() -> None:
        """Prints the address. The lead is connected and needs the socket's path no longer."""
        shutil.rmtree(folder, ignore_errors=True)  # a killed server leaves no files
        if member is not None:
            member.join()
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        line = f"{url} serves {lead.check().model}{with_draft} ({about['mode']}); Ctrl-C ends it"
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async def watch() -> None:
        """Ends the server when the job is gone, after the last responses."""
        over = [asyncio.create_task(wait) for wait in (ranks.wait(), lead.ended.wait())]
        await asyncio.wait(over, return_when=asyncio.FIRST_COMPLETED)
        lead.lose("the job is gone")
        lead.ended.set()
        if member is not None:
            member.leave()
        await asyncio.sleep(_LAST_WORDS_S)
        server.end()

    server.on_drain, lead.on_ready = drain, announce
    with (
        _signals(server.end),
        tempfile.TemporaryDirectory(prefix="mpissd-serve-") as folder,
        member or contextlib.nullcontext(),
    ):
        path = str(Path(folder, "lead"))
        async with await lead.accept(path):
            first = "a first start compiles, too"
            _note(f"loads {job.target.name}{with_draft} on {config.num_ranks} ranks; {first}")
            ranks = await _started(command, path)
            watching = asyncio.create_task(watch())
            await server.serve(sockets=[listener])
            watching.cancel()
            if summary := server.summary():
                _note(summary)
            is_asked = not lead.ended.is_set()
            lead.stop()
            try:  # ranks that are loading read no message, so they are ended at once
                wait_s = 0 if is_asked and lead.ready is None else _LEAVE_S
                code = await asyncio.wait_for(ranks.wait(), wait_s)
            except asyncio.TimeoutError:
                code = await ended(ranks)
    if is_asked:
        return 0
    code = code if code > 0 else FaultError.exit_code  # a launcher that recovers may say 0
    _note(f"the ranks have ended (exit code {code})")
    return code


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
