"""What a rank is doing, in three bytes that the warden reads: a store each, no call, no message."""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum

SIZE = mmap.PAGESIZE
STAGE, DOING, WAITING = 0, 1, 2  # where they lie


class Stage(IntEnum):
    """How far a job has come."""

    START = 0  # until MPI is up
    OPEN = 1  # devices, weights, communicators
    WARM_UP = 2  # calibration, and rounds on throw-away sequences
    ROUNDS = 3
    GATHER = 4  # reports, row and files
    TEARDOWN = 5
    DONE = 6  # MPI is over, or never began


class Doing(IntEnum):
    """Where in a round."""

    NOTHING = 0  # between passes of the loops
    DRAFT_WAIT = 1  # lead: from asking to the speculation
    VERIFY = 2  # lead and follower: the rest of their round
    PLAN_WAIT = 3  # follower
    OUTCOME_WAIT = 4  # draft
    ANSWER = 5  # draft: from the outcome to the speculation
    GROWTH = 6  # draft: glue and branches


_STAGES = ("start", "start", "warm-up", "rounds", "gather", "teardown", "teardown")


def words(stage: int, doing: int) -> str:
    """The phase as the user reads it: "growth", "growth (warm-up)", "gather"."""
    in_round = Stage.WARM_UP <= stage <= Stage.ROUNDS and doing != Doing.NOTHING
    if not in_round:
        return _STAGES[stage]
    name = Doing(doing).name.lower().replace("_", " ")
    return name if stage == Stage.ROUNDS else f"{name} ({_STAGES[stage]})"


class Page:
    """One rank's page: private until `share`d; afterwards the warden maps the same bytes."""

    def __init__(self) -> None:
        self.bytes = memoryview(bytearray(SIZE))

    def share(self) -> int:
        """Moves into memory that another process can map; its file descriptor, the caller's to
        close. The memory goes with the last process that has it."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("mpissd")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, SIZE)
        shared = mmap.mmap(fd, SIZE)
        shared[:] = self.bytes.tobytes()
        self.bytes = memoryview(shared)
        return fd


OWN = Page()  # this process is one rank
