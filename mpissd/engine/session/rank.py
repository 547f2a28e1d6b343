"""One rank of a job: its models, its ends of the message channels, and the loops that it runs.

A *pass* is one run of the decoding loops on all ranks, from the first round to the stop message.
The first rank of each target group (the group's *lead*) decides the rounds; draft ranks draft; the
other target ranks of the group (its *followers*) run the same forwards as its first rank.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import sleep
from typing import TypeVar

from mpi4py import MPI

from mpissd.common import guard
from mpissd.common.rounds import Outcome, Speculation
from mpissd.common.stage import DOING, OWN, Doing
from mpissd.common.trace import FollowPhase, LeadPhase, Ledger, NullLedger
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from mpissd.engine.comm.mpi_link import PlanReceiver, PlanSender, mpi_boxes
from mpissd.engine.features.device_rounds import DeviceSpeculator, DeviceTarget, chained_forwards
from mpissd.engine.features.draft_loss import ARFallback, LossWaiter
from mpissd.engine.features.learning import Updates
from mpissd.engine.features.pool import GroupForwards, serve_groups
from mpissd.engine.features.shared_draft import SharedDraft
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.parts import draft_workers, group_waiters, link_shape, make_drafter
from mpissd.engine.round.draft import Drafter, serve
from mpissd.engine.round.rows import DraftWorker, TargetWorker
from mpissd.engine.round.speculator import InlineSpeculator, RemoteSpeculator, Speculator
from mpissd.engine.round.target import TargetLoop, follow
from mpissd.engine.session.session import REST_S, Session

Result = TypeVar("Result")


class Rank:
    """One rank of a job: its workers, which run the models' forwards, and its ends of the message
    channels. What its role (first or other rank of a target group, or draft) lacks is None."""

    def __init__(self, session: Session) -> None:
        """Opens this rank's models, and communicators for the messages of a target group's first
        rank with its draft and with the group's other ranks. All ranks call it together."""
        self.session = session
        topology = session.topology
        waiter = session.waiter
        job = session.job
        target, draft = session.models.open(job, topology)
        self.target = None if target is None else session.target_worker(target)
        # A draft rank has one worker for each target group; a target rank that drafts has one.
        self.drafts = [] if draft is None else draft_workers(job, draft)
        self.device_rounds = chained_forwards(job, self.target, self.draft, topology.group.bcast)
        self._shared: SharedDraft | None = None
        if draft is not None and job.config.shard_draft and job.tp > 1:
            self._shared = SharedDraft(topology.group.Dup(), draft, waiter)
            self.drafts = self.drafts if topology.leads_group else []
        self._draft_waiters = group_waiters(job, waiter) if self.drafts else []
        self.ledger: Ledger | None = None  # the times, by phase, of the last run of the loops
        self.digest = 0  # a checksum of the last run's rounds; ranks compare it
        self.draft_lost = False  # whether the draft rank was lost; later runs have K = 0
        self.updates: Updates | None = None  # on a draft rank: loads newer weights

        group, world = self._comms = [topology.group.Dup(), topology.world.Dup()]
        self._leads: MPI.Comm | None = None  # connects the first ranks of all target groups
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
        """The worker that drafts on this rank for its first target group; None without a draft."""
        return self.drafts[0] if self.drafts else None

    @property
    def messages(self) -> tuple[int, int]:
        """(number of messages, their bytes) that a target group's first rank sent and received."""
        ends = [end for end in (self.sender, self.lead_link) if end is not None]
        return sum(e.num_messages for e in ends), sum(e.num_bytes for e in ends)

    @property
    def kernel(self) -> str | None:
        """The names of the GEMM kernels of the target's forwards on this rank; None if unknown."""
        stepper = None if self.target is None else self.target.stepper
        return stepper.kernel if isinstance(stepper, Stepper) else None

    @property
    def draws(self) -> str:
        """Where tokens are sampled from the target's distributions: "device" or "host"."""
        stepper = None if self.target is None else self.target.stepper
        on_device = isinstance(stepper, Stepper) and stepper.draws is not None
        return "device" if on_device and not self.session.job.tree_lanes else "host"

    def end_drafting(self) -> None:
        """Ends a series of draft forwards that the host issues, on all ranks that share the draft;
        without such ranks, does nothing."""
        if self._shared is not None:
            self._shared.end()

    def make_drafters(self) -> list[Drafter]:
        """Returns a new Drafter, which runs a draft's rounds, for each target group served here."""
        pairs = zip(self.drafts, self._draft_waiters, strict=True)
        return [make_drafter(self.session.job, worker, waiter) for worker, waiter in pairs]

    def run_pass(
        self,
        target: TargetWorker | None,
        drafters: Sequence[Drafter],
        drive: Callable[[TargetLoop], Result],
    ) -> Result | None:
        """Runs the decoding loops once, from the first round to the stop message. All ranks of the
        job call it together. target, drafters: this rank's target worker and drafters, if its role
        needs them. drive: runs the rounds of a TargetLoop, on the first rank of each target group.
        Returns the result of `drive`, and None on other ranks."""
        # Garbage collection is off during a run, but not in a server, which may run for days.
        with undisturbed() if self._keeps else nullcontext():
            if self.draft_links:
                self._serve(drafters)
                return None
            assert target is not None, "a target rank without a worker"
            OWN.bytes[DOING] = int(Doing.VERIFY)  # what the watchdog reports if this rank is lost
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

        def plan(round_: int) -> tuple[Outcome, Speculation, bool]:
            self.end_drafting()
            return receiver.plan(round_)

        self.digest = follow(target, plan, batch, session.waiter, self.ledger)

    def _lead(
        self, target: TargetWorker, speculator: Speculator, drive: Callable[[TargetLoop], Result]
    ) -> Result:
        assert self.sender is not None, "a lead without a plan channel"
        session = self.session
        sender = self.sender

        def publish(outcome: Outcome, speculation: Speculation, stop: bool) -> None:
            self.end_drafting()
            sender.publish(outcome, speculation, stop)

        ledger = (Ledger if self._keeps else NullLedger)(LeadPhase)
        batch = session.job.config.batch_size
        told = publish if sender.num_followers else None
        loop = TargetLoop(target, speculator, told, batch, session.waiter, ledger)
        result = drive(loop)
        loop.stop()
        speculator.end()
        if loop.draft_lost_round is not None:
            self.draft_lost = True
            self.lead_link = None  # not closed: that would need the lost draft rank
        self.ledger = loop.ledger
        self.digest = loop.batch.digest
        return result

    @property
    def _keeps(self) -> bool:
        """Whether the times of all rounds are kept: not in a server, which may run for days."""
        return self.session.job.serving is None

    def _deciding(self, target: TargetWorker, speculator: Speculator) -> TargetWorker:
        """Returns a target worker whose GPU runs whole rounds without waiting for the host, or
        `target` itself if the job or the GPU does not allow that."""
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
        """Waits until the first rank of every target group calls this. So they begin together."""
        if self._leads is not None:
            self.session.waiter.until(self._leads.Ibarrier().Test, "the other groups' leads")

    def idle(self) -> None:
        """Waits, on a rank that decides no rounds, until another run of the loops begins. There is
        no deadline, and polls are rare, so that they take no core from working ranks. If another
        rank is lost, the watchdog process of the host ends this rank."""
        end = self.draft_links[0] if self.draft_links else self.receiver
        assert end is not None, "a lead waits for its own work"
        while not end.outcome_arrived():
            sleep(REST_S)

    def prepare(self) -> None:
        """Draws synthetic tokens of the first sequences before any round, to save time in the round
        that admits these sequences. Does nothing if transformers decide tokens."""
        workload = self.session.workload
        if self.target is not None:
            self.target.oracle.prepare(workload.tabulated(self.session.topology.group_index))
        for group, worker in enumerate(self.drafts):
            worker.oracle.prepare(workload.tabulated(group))

    def close(self) -> None:
        """Closes this rank's ends of the message channels and frees their communicators."""
        if self.device_rounds is not None:
            self.device_rounds.close()
        for end in (self.lead_link, *self.draft_links, self.sender, self.receiver):
            if end is not None:
                end.close()
        if self._shared is not None:
            self._shared.close()
        for comm in self._comms:
            comm.Free()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Collects garbage now (30 ms), and turns the garbage collector off inside the `with` block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _is_draft_lost() -> bool:
    """Returns whether the draft rank has ended while the job goes on without it."""
    return bool(guard.lost())
