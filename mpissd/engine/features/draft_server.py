"""`mpissd draft`: the draft's rounds for an engine of another project, over a Unix socket.

One client at a time; the next one waits in the socket's queue. A client that leaves, or breaks the
protocol, ends its rounds and nothing else: the model stays, and the pages of what it has read.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from mpissd.common.errors import ConfigError, MpissdError, ProtocolError
from mpissd.common.ranks import DraftConfig
from mpissd.common.rounds import Event, Outcome, Request
from mpissd.common.wait import Waiter, sharpen_sleep
from mpissd.engine.backend.registry import choose
from mpissd.engine.comm.link import (
    MOST_PROMPTS,
    DraftEnd,
    SocketWaiter,
    packets,
    send_hello,
    socket_boxes,
)
from mpissd.engine.in_process import open_stepper
from mpissd.engine.job import Job, Serving, resolve
from mpissd.engine.model.transformer.sources import fetch_missing
from mpissd.engine.parts import link_shape, make_drafter
from mpissd.engine.round.draft import Drafter, serve
from mpissd.engine.round.rows import DraftWorker

_KNOWN = {int(Event.COMMIT), int(Event.ADMIT), int(Event.RELEASE)}


class CheckedEnd(DraftEnd):
    """A draft's end whose peer is not trusted: nothing that it sends leaves the vocabulary, the
    cache or the last speculation."""

    drafter: Drafter
    vocab: int
    longest: int
    idle: SocketWaiter

    def outcome(self, round_: int | None = None) -> tuple[Outcome, bool]:
        """Waits for OUTCOME, as DraftEnd, but asleep and without a deadline; raises ProtocolError
        for what cannot be applied."""
        self.idle.until(self.outcome_arrived, "outcome")
        try:
            outcome, stop = super().outcome(round_)
        except (struct.error, IndexError) as error:
            raise ProtocolError(f"outcome: {error}") from error
        live, rows = self.drafter.batch.sequences, outcome.rows.tolist()
        prompts = [one.prompt for one in outcome.prompts.values()]
        room = [min(len(one.served), self.longest - 1 - len(one.tokens)) for one in live]
        tokens = [*outcome.bonus.tolist(), *(token for prompt in prompts for token in prompt)]
        commits = zip(rows, room, strict=False)  # the rows after them are new
        fits = (
            {*outcome.events.tolist()} <= _KNOWN
            and all(event or 0 <= k <= most for (_, _, event, k, _), most in commits)
            and len(outcome.fresh) == len(prompts)
            and all(0 < len(prompt) < self.longest for prompt in prompts)
            and all(0 <= token < self.vocab for token in tokens)
        )
        if not fits:
            raise ProtocolError(f"outcome {rows}: does not fit the sequences or the vocabulary")
        return outcome, stop


def draft(config: DraftConfig) -> int:
    """Serves drafting until the process is ended; with --socket=fd:N, until that client leaves."""
    sharpen_sleep()
    run, backend, serving = config.run, choose(config.run.backend), Serving(samples=False)
    fetch_missing(run.pair, run.target, run.draft)
    job = resolve(run, 1, backend=backend, memory_bytes=None, serving=serving)
    if job.longest > MOST_PROMPTS:
        raise ConfigError(f"context={job.longest} with draft: allowed: at most {MOST_PROMPTS}")
    with ExitStack() as resources:
        clients = _clients(config.socket, resources)
        worker = job.workload.draft_worker(open_stepper(job, backend, resources, drafts=True))
        _warm(job, worker)
        _tell(f"ready: {run.batch_size} sequences of {job.longest} tokens, K={job.lookahead}")
        for client in clients:
            with client:
                _serve(job, worker, client)
    return 0


def _clients(where: str, resources: ExitStack) -> Iterator[socket.socket]:
    """Returns the clients, one after another.

    Raises ConfigError for a path at which another process listens, or that cannot be a socket.
    """
    kind, _, number = where.partition(":")
    if kind == "fd":
        return iter([socket.socket(fileno=int(number))])
    listener = resources.enter_context(packets())
    try:
        if Path(where).is_socket():
            if _has_listener(where):
                raise ConfigError(f"socket={where}: another process listens: allowed: another path")
            os.unlink(where)  # of a process that has ended
        listener.bind(where)
        os.chmod(where, 0o600)
        listener.listen()
    except OSError as error:
        raise ConfigError(f"socket={where}: {error.strerror or error}") from error
    resources.callback(os.unlink, where)
    return iter(lambda: listener.accept()[0], None)


def _has_listener(path: str) -> bool:
    """Returns whether a process listens at a socket's path."""
    with packets() as probe:
        probe.setblocking(False)  # its queue of clients may be full
        return probe.connect_ex(path) != errno.ECONNREFUSED


def _warm(job: Job, worker: DraftWorker) -> None:
    """Runs a round, so that no client waits for compilers."""
    drafter = make_drafter(job, worker, Waiter(job.config.deadline_s, spin=False))
    speculation = drafter.answer(Outcome.admission(-1, [Request(0, 1, 0, (0, 1))]))
    drafter.start_round(speculation)
    if drafter.begin_growth(speculation):
        drafter.grow_step()
    drafter.leave()


def _serve(job: Job, worker: DraftWorker, client: socket.socket) -> None:
    """Serves one client until it leaves."""
    waiter = Waiter(job.config.deadline_s, spin=False)
    shape = link_shape(job)
    drafter = make_drafter(job, worker, waiter)
    link = CheckedEnd(shape, waiter, *socket_boxes(client))
    link.idle = SocketWaiter(client)
    link.drafter = drafter
    link.vocab = job.workload.vocab
    link.longest = job.longest
    try:
        send_hello(client, shape, link.vocab)
        serve(link, drafter)
    except (OSError, MpissdError) as error:
        _tell(str(error))
        worker.leave(drafter.batch)


def _tell(line: str) -> None:
    sys.stderr.write(f"mpissd: draft: {line}\n")
    sys.stderr.flush()
