"""Target groups that share one draft, in one process: the draft in a thread, the leads in this one.

The caller steps the groups in any order; the draft serves every group that asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from mpissd.common.config import RunConfig, parse_flags
from mpissd.common.records import RoundRecords
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import LeadEnd, queue_link
from mpissd.engine.features.pool import GroupForwards, serve_groups
from mpissd.engine.in_process import open_stepper
from mpissd.engine.job import Job, resolve
from mpissd.engine.parts import draft_workers, group_waiters, link_shape, make_drafter
from mpissd.engine.round.speculator import RemoteSpeculator
from mpissd.engine.round.target import TargetLoop
from tests.loop.harness import Guarded

WAITER = Waiter(300.0, spin=False)  # a transformer's first forward is compiled


class Group:
    """One target group: its loop, its sequences and its rounds."""

    def __init__(self, job: Job, number: int, lead: LeadEnd, resources: ExitStack) -> None:
        workload, speculator = job.workload, RemoteSpeculator(lead)
        worker = workload.target_worker(open_stepper(job, job.config.backend, resources))
        batch = job.config.batch_size
        self.loop = TargetLoop(worker, speculator, None, batch, WAITER)
        self.scheduler = workload.scheduler(number)
        self.records = RoundRecords(job.lookahead)
        self.loop.admit(self.scheduler.turn().join)
        self.is_stopped = False

    def step(self) -> None:
        self.scheduler.step(self.loop, self.records)

    def stop(self) -> None:
        if not self.is_stopped:
            self.is_stopped = True
            self.loop.stop()


class Pool:
    """G groups and their draft; use it in a `with` block."""

    def __init__(self, config: RunConfig) -> None:
        self.job = job = resolve(config, 1, backend=config.backend, memory_bytes=None)
        waiters = group_waiters(job, WAITER)
        links = [queue_link(link_shape(job, n), WAITER, waiter) for n, waiter in enumerate(waiters)]
        self._resources = ExitStack()
        draft = open_stepper(job, config.backend, self._resources, drafts=True)
        workers = draft_workers(job, draft)
        pairs = zip(workers, waiters, strict=True)
        drafters = [make_drafter(job, worker, waiter) for worker, waiter in pairs]
        ends = [(end, drafter) for (_, end), drafter in zip(links, drafters, strict=True)]
        forwards = workers[0].stepper
        assert isinstance(forwards, GroupForwards)
        self.thread = Guarded(lambda: serve_groups(ends, forwards.shared, WAITER))
        leads = [lead for lead, _ in links]
        self.groups = [Group(job, n, lead, self._resources) for n, lead in enumerate(leads)]

    def decode(self, order: Sequence[int], rounds: int) -> None:
        """Steps the groups in this order, over and over, until each has so many rounds or none to
        decode."""
        while left := [n for n, group in enumerate(self.groups) if _is_left(group, rounds)]:
            for number in order:
                if number in left and _is_left(self.groups[number], rounds):
                    self.groups[number].step()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for group in self.groups:
            group.stop()
        self.thread.finish()
        self._resources.close()


def _is_left(group: Group, rounds: int) -> bool:
    is_live = bool(group.scheduler.running) and not group.is_stopped
    return len(group.records) < rounds and is_live


def config_of(**flags: object) -> RunConfig:
    return parse_flags({name: str(value) for name, value in flags.items()})


def decided(records: RoundRecords) -> dict[int, list[tuple[int, ...]]]:
    """By sequence, its rounds' decisions: (k, t*, source, hit, num_draft)."""
    rows = records.sequences()
    return {
        int(one): [tuple(row[3:].tolist()) for row in rows[rows[:, 1] == one]]
        for one in np.unique(rows[:, 1])
    }
