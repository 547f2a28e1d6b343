"""Messages between real ranks, many and long.

`python -m mpi4py -m tests.mpi.test_comm NAME` makes a check: it fails on the rank that sees it,
which ends the job; rank 0 prints "good" if it passes.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpissd.common.rounds import Outcome, Request, Speculation
from mpissd.common.wait import Waiter
from mpissd.engine.comm.link import DraftEnd, LeadEnd
from mpissd.engine.comm.mpi_link import PlanReceiver, PlanSender, mpi_boxes
from mpissd.engine.comm.wire import LinkShape
from tests.mpi.harness import ended, needs_mpi, start
from tests.scripts import resident_bytes

pytestmark = needs_mpi
WAITER = Waiter(60.0, spin=False)


def long_plans(world: Any) -> None:
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


def memory(world: Any) -> None:
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
            used.append(resident_bytes())
    world.Barrier()
    for end in (lead, draft):
        if end is not None:
            end.close()
    assert used[1] - used[0] < 1 << 20, used


CHECKS: dict[str, Callable[[Any], None]] = {check.__name__: check for check in (long_plans, memory)}
# A single copy is made while the sender is in MPI.
WITHOUT = {"OMPI_MCA_smsc": "^cma", "OMPI_MCA_btl_vader_single_copy_mechanism": "none"}


@pytest.mark.parametrize(("name", "ranks"), [("memory", 3), ("long_plans", 2)])
def test_messages(name: str, ranks: int) -> None:
    env = WITHOUT if name == "long_plans" else {}
    done = ended(start(ranks, "tests.mpi.test_comm", name, env=env))
    assert (done.code, done.out) == (0, "good\n"), done.err[-2000:]


if __name__ == "__main__":
    from mpi4py import MPI

    CHECKS[sys.argv[1]](MPI.COMM_WORLD)
    MPI.COMM_WORLD.Barrier()
    if MPI.COMM_WORLD.rank == 0:
        print("good")
