"""`mpissd draft`: drafts for another project's inference engine, over a Unix socket or TCP.

The process serves one client at a time; the next client waits in the socket's queue. When a client
leaves, or breaks the protocol, the model and the KV cache are kept for the next client.
"""

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from math import inf
from pathlib import Path
from time import perf_counter

from mpissd.common.errors import ConfigError, MpissdError, ProtocolError
from mpissd.common.ranks import DraftConfig
from mpissd.common.rounds import Event, Outcome, Request
from mpissd.common.wait import Waiter, sharpen_sleep
from mpissd.engine.backend.registry import choose
from mpissd.engine.comm.link import DraftEnd
from mpissd.engine.comm.peer import MOST_PROMPTS, Address, Connection
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.in_process import open_stepper
from mpissd.engine.job import Job, Serving, resolve
from mpissd.engine.model.transformer.sources import fetch_missing
from mpissd.engine.parts import link_shape, make_drafter
from mpissd.engine.round.draft import Drafter, serve
from mpissd.engine.round.rows import DraftWorker

_PROOF_S = 5.0  # how long a client may take to prove the key
_ALLOWED = {int(Event.COMMIT), int(Event.ADMIT), int(Event.RELEASE)}


class CheckedEnd(DraftEnd):
    """A draft's end of the channel to an untrusted client. It refuses outcomes whose tokens are not
    in the vocabulary, or that do not fit the KV cache or the last drafted tokens."""

    def __init__(self, job: Job, drafter: Drafter, client: Connection) -> None:
        super().__init__(_shape(job), drafter.waiter, client.outbox, client.inbox)
        self._job = job
        self._drafter = drafter
        self._client = client

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for the client's next outcome, without a deadline and without using the CPU.
        Returns (outcome, whether to stop). Raises ProtocolError for an outcome that cannot be."""
        self._client.until(self.outcome_arrived, "outcome")
        try:
            outcome, stop = super().outcome(round_)
        except (struct.error, IndexError) as error:
            raise ProtocolError(f"outcome: {error}") from error
        live = self._drafter.batch.sequences
        longest = self._job.longest
        rows = outcome.rows.tolist()
        prompts = [request.prompt for request in outcome.prompts.values()]
        room = [min(len(s.served), longest - 1 - len(s.tokens)) for s in live]
        tokens = [*outcome.bonus.tolist(), *(token for prompt in prompts for token in prompt)]
        commits = zip(rows, room, strict=False)  # Later rows are new sequences.
        fits = (
            {*outcome.events.tolist()} <= _ALLOWED
            and all(event or 0 <= k <= limit for (_, _, event, k, _), limit in commits)
            and len(outcome.fresh) == len(prompts)
            and all(0 < len(prompt) < longest for prompt in prompts)
            and all(0 <= token < self._job.workload.vocab for token in tokens)
        )
        if not fits:
            raise ProtocolError(f"outcome {rows}: does not fit the sequences or the vocabulary")
        return outcome, stop


def draft(config: DraftConfig) -> int:
    """Drafts for one client after the other until the process is ended; with --socket=fd:N, for one
    client until it leaves. Returns the exit code 0."""
    sharpen_sleep()
    run = config.run
    address = None if config.socket.startswith("fd:") else Address.of(config.socket)
    backend = choose(run.backend)
    fetch_missing(run.pair, run.target, run.draft)
    job = resolve(run, 1, backend=backend, memory_bytes=None, serving=Serving(samples=False))
    if job.longest > MOST_PROMPTS:
        raise ConfigError(f"context={job.longest} with draft: allowed: at most {MOST_PROMPTS}")
    with ExitStack() as resources:
        clients = _clients(address, config.socket, resources)
        worker = job.workload.draft_worker(open_stepper(job, backend, resources, drafts=True))
        _warm(job, worker)
        _tell(f"ready: {run.batch_size} sequences of {job.longest} tokens, K={job.lookahead}")
        for client in clients:
            with client.socket:
                _serve(job, worker, client, address.key if address else None)
    return 0


def _shape(job: Job) -> LinkShape:
    return replace(link_shape(job), branches=0)  # another engine has no cache of branches


def _clients(address: Address | None, name: str, resources: ExitStack) -> Iterator[Connection]:
    """Yields the clients that connect to an address, or that of the open socket N of name="fd:N".
    Raises ConfigError if a process listens there, or no socket can be made."""
    if address is None:
        return iter([Connection(socket.socket(fileno=int(name[3:])))])
    listener = resources.enter_context(address.socket())
    is_file = address.family == socket.AF_UNIX
    try:
        if is_file and Path(name).is_socket():
            with address.socket() as probe:
                probe.setblocking(False)  # do not wait if the queue of clients is full
                is_free = probe.connect_ex(name) == errno.ECONNREFUSED
            if not is_free:
                raise ConfigError(f"socket={name}: another process listens: allowed: another path")
            os.unlink(name)  # left by a process that has ended
        listener.bind(address.name)
        if is_file:
            os.chmod(name, 0o600)
            resources.callback(os.unlink, name)
        listener.listen()
    except OSError as error:
        raise ConfigError(f"socket={name}: {error.strerror or error}") from error
    return iter(lambda: Connection(listener.accept()[0]), None)


def _warm(job: Job, worker: DraftWorker) -> None:
    """Drafts one round, which compiles all kernels, so that no client has to wait for compilers."""
    drafter = make_drafter(job, worker, Waiter(job.config.deadline_s, spin=False))
    speculation = drafter.answer(Outcome.admission(-1, [Request(0, 1, 0, (0, 1))]))
    drafter.start_round(speculation)
    if drafter.begin_growth(speculation):
        drafter.grow_step()
    drafter.leave()


def _serve(job: Job, worker: DraftWorker, client: Connection, key: bytes | None) -> None:
    drafter = make_drafter(job, worker, Waiter(job.config.deadline_s, spin=False))
    link = CheckedEnd(job, drafter, client)
    try:
        steps = client.greet(key, _shape(job), job.workload.vocab)
        client.end = perf_counter() + _PROOF_S
        client.until(lambda: bool(next(steps, True)), "the client's proof of MPISSD_KEY")
        client.end = inf
        serve(link, drafter)
    except (OSError, MpissdError) as error:
        _tell(str(error))
        worker.leave(drafter.batch)


def _tell(line: str) -> None:
    sys.stderr.write(f"mpissd: draft: {line}\n")
