"""The checks that tests/mpi/test_comm.py runs: python -m mpi4py -m tests.mpi.ranks NAME

Each check fails on the rank that sees it, which ends the job; rank 0 prints "good" if all pass.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

from mpissd.common.errors import ConfigError, ProtocolError
from mpissd.common.presets import ModelShape
from mpissd.common.rounds import Event, Outcome, Request, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.comm.mpi_link import PlanReceiver, PlanSender, mpi_boxes
from mpissd.engine.comm.topology import Refused, agree, open_topology
from mpissd.engine.comm.wire import LinkShape
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stacks import GemmStack, GemmWeights

WAITER = Waiter(60.0, spin=False)
SHAPE = ModelShape("gated", 3, 24, 12, 12, 4, 36, True, 96)
ROWS = 5


def forward(group: Group) -> GemmStack:
    options = ForwardOptions(lm_head=True, top_k=2)
    shard = Shard(SHAPE, group.size, group.rank)
    backend = NumpyBackend()
    weights = GemmWeights(backend, shard, options, max_rows=8, seed=7)
    stack = GemmStack(backend, group, shard, options, weights, max_rows=8, max_sequences=1)
    stack.buffers.tokens[:ROWS] = np.arange(ROWS)
    stack.body(ROWS)()
    return stack


def group(world: MPI.Intracomm) -> None:
    """The shards of all ranks are the whole model, bit by bit the same on every rank."""
    found = open_group(NumpyBackend(), world, "auto", WAITER)
    assert (found.name, found.size, found.rank) == ("mpi", world.size, world.rank)
    stack, whole = forward(found), forward(SoloGroup())
    hidden = stack.buffers.hidden[:ROWS]
    np.testing.assert_allclose(hidden, whole.buffers.hidden[:ROWS], rtol=2e-4, atol=2e-5)
    every = world.allgather(hidden.tobytes())
    assert len(set(every)) == 1
    own = np.full((2, 3), world.rank, np.int32)
    gathered = np.full((2 * world.size, 3), -1, np.int32)
    found.all_gather(own[:, :3], gathered)
    assert gathered[:, 0].tolist() == [rank for rank in range(world.size) for _ in range(2)]
    best = (
        stack.candidates.by_k[2]
        .all_values[: world.size * ROWS]
        .reshape(world.size, ROWS, 2)[:, :, 0]
    )
    np.testing.assert_allclose(
        best.max(axis=0), whole.candidates.by_k[2].values[:ROWS, 0], rtol=2e-4, atol=2e-5
    )


def plans(world: MPI.Intracomm) -> None:
    """Each follower receives each plan, and refuses a plan of another round."""
    shape, batch = LinkShape(2, 2, 3), np.zeros((2, Outcome.WIDTH), np.int32)
    sends = [(-1, False), (0, False), (1, True), (7, True)]
    drafts = [Speculation.empty(r + 1, 0 if stop else 2, 3) for r, stop in sends]
    if world.rank == 0:
        sender = PlanSender(world, shape, WAITER)
        for (round_, stop), speculation in zip(sends, drafts, strict=True):
            rows = batch.copy()
            rows[:, 2] = Event.RELEASE if stop else Event.COMMIT
            rows[:, 4] = round_ + 10
            sender.publish(Outcome(round_, rows), speculation, stop)
        assert sender.num_messages == len(sends) * (world.size - 1)
        sender.close()
        return
    receiver = PlanReceiver(world, shape, WAITER)
    for round_, stop in sends[:-1]:
        outcome, speculation, stopped = receiver.plan(round_ + 1)
        assert (outcome.round, speculation.round, stopped) == (round_, round_ + 1, stop)
        assert outcome.bonus.tolist() == [round_ + 10] * 2
        assert len(speculation.rows) == (0 if stop else 2)
    with pytest.raises(ProtocolError, match="round is 7, expected 2"):
        receiver.plan(3)


def long_plans(world: MPI.Intracomm) -> None:
    """A plan is on its way without the lead's help: a forward on a GPU waits for every rank, and
    the lead that waits for it makes no call of MPI."""
    prompt = tuple(range(5000))
    shape = LinkShape(0, 1, 3, prompt_tokens=len(prompt))
    request = Request(0, prompt[-1], 0, prompt)
    with tempfile.TemporaryDirectory() as folder:
        told = Path(world.bcast(folder)) / "told"
        if world.rank == 0:
            sender = PlanSender(world, shape, WAITER)
            sender.publish(Outcome.admission(-1, [request]), Speculation.empty(0, 1, 3))
            until = time.monotonic() + 10
            while not told.exists() and time.monotonic() < until:
                time.sleep(1e-3)
            assert told.exists(), "the follower waits for the lead's next call of MPI"
            sender.close()
        else:
            outcome, _, _ = PlanReceiver(world, shape, WAITER).plan(0)
            assert outcome.prompts[0, 0].prompt == prompt
            told.touch()
        world.Barrier()


def link(world: MPI.Intracomm) -> None:
    """Lead 0, draft 1: messages survive reuse of their buffers; polls never block."""
    shape = LinkShape(0, 2, 3)
    if world.rank == 0:
        lead = LeadEnd(shape, WAITER, *mpi_boxes(world, 1, WAITER))
        for round_ in range(5):
            requests = [Request(round_, 7), Request(round_ + 100, 8)]
            lead.send_outcome(Outcome.admission(round_ - 1, requests), stop=round_ == 4)
            if round_ < 4:
                got = lead.speculation(round_, 2)
                assert got.tokens.tolist() == [[round_] * 3, [round_ + 1] * 3]
        assert lead.num_messages == 9
        world.Barrier()
        lead.close()
    elif world.rank == 1:
        draft = DraftEnd(shape, WAITER, *mpi_boxes(world, 0, WAITER))
        for round_ in range(5):
            while not draft.outcome_arrived():
                time.sleep(1e-4)
            outcome, stop = draft.outcome()
            assert outcome.ids.tolist() == [round_, round_ + 100] and stop == (round_ == 4)
            if not stop:
                assert not draft.outcome_arrived()  # the next one was not asked for yet
                answer = Speculation.empty(round_, 2, 3)
                answer.num_draft[:] = 3
                answer.tokens[:] = [[round_] * 3, [round_ + 1] * 3]
                draft.send_speculation(answer)
                answer.rows[:] = -5  # its buffer was copied
        world.Barrier()
        draft.close()
    else:
        world.Barrier()


def refused(world: MPI.Intracomm) -> None:
    """One rank's error is raised on every rank, with its line and code; without one, none is."""
    agree(world, None)
    error = ConfigError(f"seen by {world.rank}") if world.rank >= 1 else None
    with pytest.raises(Refused, match="seen by 1") as caught:
        agree(world, error)
    assert caught.value.exit_code == 2


def topology(world: MPI.Intracomm) -> None:
    """Targets first, then drafts; each group has a communicator and a lead of its own."""
    for groups in (1, 2):
        found, tp = open_topology(1, groups), (world.size - 1) // groups
        assert (found.tp, found.groups, found.num_drafts) == (tp, groups, 1)
        assert found.is_lead == (world.rank == 0)
        assert found.is_draft == (world.rank == world.size - 1 == found.first_draft)
        assert found.leads_group == (not found.is_draft and world.rank % tp == 0)
        assert found.group.size == (1 if found.is_draft else tp)
        assert found.group_index == world.rank // tp
        assert found.local_rank == world.rank and len(found.hosts) == world.size
    with pytest.raises(ConfigError, match="too small"):
        open_topology(world.size)


def memory(world: MPI.Intracomm) -> None:
    """Messages of every kind, many times: no request and no buffer is leaked."""
    shape, rounds = LinkShape(0, 1, 2, vocab=50, prompt_tokens=40), 4000
    request = Request(0, 7, 0, (3,) * 39 + (7,))
    row, used = np.full(50, 0.02, np.float32), []
    is_lead, last = world.rank == 0, world.size - 1
    boxes = mpi_boxes(world, last if is_lead else 0, WAITER)
    lead = LeadEnd(shape, WAITER, *boxes) if is_lead else None
    draft = DraftEnd(shape, WAITER, *boxes) if world.rank == last else None
    for round_ in range(rounds):
        if lead is not None:
            lead.send_outcome(Outcome.admission(round_ - 1, [request]))
            lead.speculation(round_, 1)
            lead.proposals(round_, 2)
        if draft is not None:
            outcome, _ = draft.outcome(round_ - 1)
            assert outcome.prompts[0, 0] == request
            draft.send_speculation(Speculation.empty(round_, 1, 2, sampled=True))
            draft.send_proposals(round_, [row, row])
        if round_ in (rounds // 10, rounds - 1):
            used.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)
    world.Barrier()
    for end in (lead, draft):
        if end is not None:
            end.close()
    assert used[1] - used[0] < 1 << 20, used


CHECKS: dict[str, Callable[[MPI.Intracomm], None]] = {
    check.__name__: check for check in (group, plans, long_plans, link, refused, topology, memory)
}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        CHECKS[name](MPI.COMM_WORLD)
        MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        print("good")
