"""One rank of a job: its workers and message ends, and *passes* of the decoding loops.

A pass is one run of the decoding loops on all ranks, from the first outcome to the stop. The first
rank of each target group, its lead, decides the rounds, draft ranks draft, and the other target
ranks run the same forwards as their lead.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import sleep
from typing import TypeVar

from mpi4py import MPI

from mpissd.common import guard
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.trace import FollowPhase, LeadPhase, Ledger, NullLedger
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from mpissd.engine.comm.mpi_link import PlanReceiver, PlanSender, mpi_boxes
from mpissd.engine.features.device_rounds import DeviceSpeculator, DeviceTarget, chained_forwards
from mpissd.engine.features.draft_loss import ARFallback, LossWaiter
from mpissd.engine.features.learning import Updates
from mpissd.engine.features.pool import GroupForwards, serve_groups
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.parts import draft_workers, group_waiters, link_shape, make_drafter
from mpissd.engine.round.draft import Drafter, serve
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.speculator import InlineSpeculator, RemoteSpeculator, Speculator
from mpissd.engine.round.target import TargetLoop, follow
from mpissd.engine.session.session import REST_S, Session

Result = TypeVar("Result")


class Rank:
    """The workers and message ends of this rank; parts that its role does not use are None."""

    def __init__(self, session: Session) -> None:
        """Opens models, and communicators for the messages to drafts and to the other ranks of a
        target group. Collective."""
        self.session = session
        topology = session.topology
        waiter = session.waiter
        job = session.job
        target, draft = session.models.open(job, topology)
        self.target = None if target is None else session.target_worker(target)
        # One draft worker and one link for each target group; inline: one worker.
        self.drafts = [] if draft is None else draft_workers(job, draft)
        self.device_rounds = chained_forwards(job, self.target, self.draft, topology.group.bcast)
        self._draft_waiters = group_waiters(job, waiter) if self.drafts else []
        self.ledger: Ledger | None = None  # this rank's phases in the last pass
        self.digest = 0  # of the outcomes of the last pass
        self.draft_lost = False  # whether a pass has lost the draft; later ones have K = 0
        self.updates: Updates | None = None  # of the last pass, on a draft with a learner

        group, world = self._comms = [topology.group.Dup(), topology.world.Dup()]
        self._leads: MPI.Comm | None = None  # of the target groups, if there are several
        if topology.groups > 1:
            color = 0 if topology.leads_group else MPI.UNDEFINED
            leads = topology.world.Split(color, topology.world.rank)
            if topology.leads_group:
                self._leads = leads
                self._comms.append(leads)
        self.lead_link: LeadEnd | None = None
        self.draft_links: list[DraftEnd] = []
        self.sender: PlanSender | None = None
        self.receiver: PlanReceiver | None = None
        if topology.is_draft:
            for n, group_waiter in enumerate(self._draft_waiters):
                boxes = mpi_boxes(world, n * topology.tp, waiter)
                self.draft_links.append(DraftEnd(link_shape(job, n), group_waiter, *boxes))
            return
        shape = link_shape(job, topology.group_index)
        if not topology.leads_group:
            self.receiver = PlanReceiver(group, shape, waiter)
            return
        self.sender = PlanSender(group, shape, waiter)
        if topology.num_drafts:
            if job.config.on_draft_loss == "ar":
                report = partial(guard.hangs, topology.first_draft)
                waiter = LossWaiter(waiter, _is_draft_lost, report)
            boxes = mpi_boxes(world, topology.first_draft, waiter)
            self.lead_link = LeadEnd(shape, waiter, *boxes)

    @property
    def draft(self) -> DraftWorker | None:
        """The worker that drafts here for the first target group, or None."""
        return self.drafts[0] if self.drafts else None

    @property
    def messages(self) -> tuple[int, int]:
        """The (messages, bytes) that this lead has sent and received so far."""
        ends = [end for end in (self.sender, self.lead_link) if end is not None]
        return sum(e.num_messages for e in ends), sum(e.num_bytes for e in ends)

    @property
    def proposals(self) -> tuple[int, float]:
        """The bytes of distributions that the draft has sent here, and the seconds of waiting."""
        link = self.lead_link
        return (0, 0.0) if link is None else (link.proposal_bytes, link.proposal_wait_s)

    @property
    def kernel(self) -> str | None:
        """The names of the kernels that read the target's weights on this rank, or None."""
        stepper = None if self.target is None else self.target.stepper
        return stepper.kernel if isinstance(stepper, Stepper) else None

    @property
    def draws(self) -> str:
        """Where the target's sampled tokens are drawn: "device" or "host"."""
        stepper = None if self.target is None else self.target.stepper
        on_device = isinstance(stepper, Stepper) and stepper.draws is not None
        return "device" if on_device and not self.session.job.tree_lanes else "host"

    def make_drafters(self) -> list[Drafter]:
        """Returns new drafters, one for each target group that this rank drafts for."""
        pairs = zip(self.drafts, self._draft_waiters, strict=True)
        return [make_drafter(self.session.job, worker, waiter) for worker, waiter in pairs]

    def run_pass(
        self,
        target: TargetWorker | None,
        drafters: Sequence[Drafter],
        drive: Callable[[TargetLoop], Result],
    ) -> Result | None:
        """Runs the loops once with these workers. Collective over the job's ranks. drive: decodes,
        on the lead of each target group, and returns the result; other ranks return None."""
        # A pass of a server may last for days, so it has to collect its garbage.
        with undisturbed() if self._keeps else nullcontext():
            if self.draft_links:
                self._serve(drafters)
                return None
            assert target is not None, "a target rank without a worker"
            OWN.bytes[DOING] = int(Doing.VERIFY)  # from here on, except while it waits for others
            speculator = self._speculator(drafters[0] if drafters else None)
            target = self._deciding(target, speculator)
            if self.receiver is not None:
                self._follow(target, self.receiver)
                return None
            return self._lead(target, speculator, drive)

    def _serve(self, drafters: Sequence[Drafter]) -> None:
        first = drafters[0]
        forwards = first.worker.stepper
        if isinstance(forwards, GroupForwards):
            ends = list(zip(self.draft_links, drafters, strict=True))
            serve_groups(ends, forwards.shared, self.session.waiter)
        else:
            inbox = self.session.learning and self.session.learning.inbox
            is_own = first.worker is self.draft
            self.updates = Updates(inbox, first) if inbox and is_own else None
            refresh = None if self.updates is None else self.updates.work
            serve(self.draft_links[0], first, refresh)
        self.ledger = first.log.ledger
        self.digest = first.batch.digest

    def _follow(self, target: TargetWorker, receiver: PlanReceiver) -> None:
        session = self.session
        self.ledger = (Ledger if self._keeps else NullLedger)(FollowPhase)
        batch = session.job.config.batch_size
        self.digest = follow(target, receiver.plan, batch, session.waiter, self.ledger)

    def _lead(
        self, target: TargetWorker, speculator: Speculator, drive: Callable[[TargetLoop], Result]
    ) -> Result:
        assert self.sender is not None, "a lead without a plan channel"
        session = self.session
        publish = self.sender.publish if self.sender.num_followers else None
        ledger = (Ledger if self._keeps else NullLedger)(LeadPhase)
        batch = session.job.config.batch_size
        loop = TargetLoop(target, speculator, publish, batch, session.waiter, ledger)
        result = drive(loop)
        loop.stop()
        if loop.draft_lost_round is not None:
            self.draft_lost = True
            self.lead_link = None  # the draft is gone, and closing a link needs both ends
        self.ledger = loop.ledger
        self.digest = loop.batch.digest
        return result

    @property
    def _keeps(self) -> bool:
        """Whether the times of all rounds are kept, as they are except by a server."""
        return self.session.job.serving is None

    def _deciding(self, target: TargetWorker, speculator: Speculator) -> TargetWorker:
        """Returns a worker whose device decides rounds by itself; `target` if the host does so."""
        end = self.receiver or self.sender
        if self.device_rounds is None or end is None:
            return target
        draft = speculator if isinstance(speculator, DeviceSpeculator) else None
        limit = self.session.workload.longest_answer
        waiter = self.session.waiter
        return DeviceTarget(target, draft, self.device_rounds, limit, waiter, end.start)

    def _speculator(self, drafter: Drafter | None) -> Speculator:
        if self.lead_link is not None:
            if self.session.job.config.on_draft_loss == "ar":
                return ARFallback(self.lead_link, _is_draft_lost)
            return RemoteSpeculator(self.lead_link)
        if self.draft_lost:
            shape = link_shape(self.session.job)
            return Speculator(shape.lookahead, sampled=shape.sampled)
        if drafter is None:
            return Speculator()
        if self.device_rounds is not None:
            return DeviceSpeculator(drafter, self.device_rounds)
        return InlineSpeculator(drafter)

    def meet(self) -> None:
        """Waits until the leads of all target groups are here, so that they begin together."""
        if self._leads is not None:
            self.session.waiter.until(self._leads.Ibarrier().Test, "the other groups' leads")

    def idle(self) -> None:
        """Waits until the lead begins another pass, without a deadline, and with rare polls, which
        take no core from ranks that work. If a rank is lost, the host's watchdog ends this one."""
        end = self.draft_links[0] if self.draft_links else self.receiver
        assert end is not None, "a lead waits for its own work"
        while not end.outcome_arrived():
            sleep(REST_S)

    def prepare(self) -> None:
        """Draws the first tokens of the first sequences before the rounds that admit them."""
        workload = self.session.workload
        if self.target is not None:
            self.target.oracle.prepare(workload.tabulated(self.session.topology.group_index))
        for group, worker in enumerate(self.drafts):
            worker.oracle.prepare(workload.tabulated(group))

    def close(self) -> None:
        """Closes the message ends and their communicators."""
        if self.device_rounds is not None:
            self.device_rounds.close()
        for end in (self.lead_link, *self.draft_links, self.sender, self.receiver):
            if end is not None:
                end.close()
        for comm in self._comms:
            comm.Free()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collects garbage, which takes 30 ms, and disables collections inside the block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_draft_lost() -> bool:
    """Returns whether the draft rank is known to be gone while the job goes on."""
    return bool(guard.lost())
