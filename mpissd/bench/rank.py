"""One rank in a job: its workers and message ends, and *passes* of the decoding loops over them.

A pass is what all ranks do together from the first outcome to the stop: the lead drives, the
drafts serve, the followers follow. A job is a few short passes that calibrate and one that counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from mpissd.bench.session import Session
from mpissd.comm.link import DraftEnd, LeadEnd
from mpissd.comm.mpi_link import PlanReceiver, PlanSender, draft_end, lead_end
from mpissd.decode.draft import Drafter, DraftPolicy, serve
from mpissd.decode.speculator import (
    InlineSpeculator,
    NoSpeculator,
    RemoteSpeculator,
    Speculator,
)
from mpissd.decode.target import TargetLoop, follow
from mpissd.rounds import Request, Source
from mpissd.trace import FollowPhase, Ledger
from mpissd.workload.gemm import GemmDraftWorker, GemmTargetWorker

Result = TypeVar("Result")


class Rank:
    """What this rank holds; exactly the parts that its role needs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        topology, job = session.topology, session.job
        self.target: GemmTargetWorker | None = None
        self.draft: GemmDraftWorker | None = None
        self.lead_link: LeadEnd | None = None
        self.draft_link: DraftEnd | None = None
        self.sender: PlanSender | None = None
        self.receiver: PlanReceiver | None = None
        # Of the last pass: this rank's phases, and the outcomes it heard (Batch.digest).
        self.ledger: Ledger | None = None
        self.digest = 0
        if not topology.is_draft:
            self.target = session.target_worker()
            session.resources.callback(self.target.close)
        if topology.is_draft or (topology.is_lead and job.inline):
            self.draft = session.draft_worker()
            session.resources.callback(self.draft.close)
        self._open_messages()

    def _open_messages(self) -> None:
        """Communicators of their own for the plans and for the link; collective over the world."""
        session = self.session
        topology, shape, waiter = session.topology, session.link_shape, session.waiter
        group, world = topology.group.Dup(), topology.world.Dup()
        if topology.is_draft:
            self.draft_link = draft_end(world, 0, shape, waiter)
        elif topology.is_lead:
            self.sender = PlanSender(group, shape, waiter)
            if topology.num_drafts:
                self.lead_link = lead_end(world, topology.tp, shape, waiter)
        else:
            self.receiver = PlanReceiver(group, shape, waiter)

    @property
    def messages(self) -> tuple[int, int]:
        """(messages, bytes) that the lead has sent and received so far."""
        ends = [end for end in (self.sender, self.lead_link) if end is not None]
        return sum(e.num_messages for e in ends), sum(e.num_bytes for e in ends)

    def drafter(self, worker: GemmDraftWorker, *, ahead: bool = True) -> Drafter:
        """A drafter over `worker`; ahead=False: nothing is grown (SD's half of an SSD job)."""
        job = self.session.job
        policy = DraftPolicy(
            lookahead=job.lookahead,
            fan_out=job.fan_out if ahead else (),
            backup=Source[job.config.backup.upper()],
            backup_lookahead=job.backup_lookahead,
            on_late=job.config.on_late,
        )
        return Drafter(worker, policy, job.config.batch_size, self.session.waiter)

    def run_pass(
        self,
        target: GemmTargetWorker | None,
        drafter: Drafter | None,
        drive: Callable[[TargetLoop], Result],
    ) -> Result | None:
        """One pass with these workers; `drive` runs on the lead, which gets its result."""
        batch, waiter = self.session.job.config.batch_size, self.session.waiter
        with undisturbed():
            if self.draft_link is not None:
                assert drafter is not None, "a draft rank without a drafter"
                serve(self.draft_link, drafter)
                self.ledger, self.digest = drafter.ledger, drafter.digest
                return None
            assert target is not None, "a target rank without a worker"
            if self.receiver is not None:
                self.ledger = Ledger(FollowPhase)
                self.digest = follow(target, self.receiver, batch, waiter, self.ledger)
                return None
            assert self.sender is not None, "a lead without a plan channel"
            speculator = self._speculator(drafter)
            loop = TargetLoop(target, speculator, self.sender, batch, waiter)
            result = drive(loop)
            loop.stop()
            self.ledger, self.digest = loop.ledger, loop.batch.digest
            return result

    def _speculator(self, drafter: Drafter | None) -> Speculator:
        if self.lead_link is not None:
            return RemoteSpeculator(self.lead_link)
        return NoSpeculator() if drafter is None else InlineSpeculator(drafter)

    def prepare(self, requests: Sequence[Request]) -> None:
        """Draws what these sequences will need first: not in the round that admits them."""
        for worker in (self.target, self.draft):
            if worker is not None:
                worker.prepare(requests)

    def close(self) -> None:
        """Finishes the messages; graphs, groups and the backend are the session's to close."""
        for end in (self.lead_link, self.draft_link, self.sender, self.receiver):
            if end is not None:
                end.close()


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection: a full one costs a round some milliseconds."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
