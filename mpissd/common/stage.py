"""A page of shared memory: a rank stores its activity in it, and the warden reads it.

Three bytes are used. Storing one needs no system call and no message.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum

SIZE = mmap.PAGESIZE
STAGE = 0  # offsets of the three bytes in the page
DOING = 1
WAITING = 2


class Stage(IntEnum):
    """The stages of a job, in order."""

    START = 0  # until MPI has started
    OPEN = 1  # opens devices, makes weights and communicators
    WARM_UP = 2  # calibrates, and runs rounds on throw-away sequences
    ROUNDS = 3  # runs the measured rounds
    GATHER = 4  # gathers reports, writes the row and the files
    TEARDOWN = 5  # closes everything
    DONE = 6  # MPI has ended, or never started


class Doing(IntEnum):
    """Activity of a rank within a round."""

    NOTHING = 0  # runs no loop
    DRAFT_WAIT = 1  # lead: has asked for a speculation and waits for it
    VERIFY = 2  # lead and follower: the rest of the round
    PLAN_WAIT = 3  # follower: waits for the lead's plan
    OUTCOME_WAIT = 4  # draft: waits for an outcome
    ANSWER = 5  # draft: has the outcome and has not yet sent the speculation
    GROWTH = 6  # draft: runs the glue forward and grows branches


_STAGES = ("start", "start", "warm-up", "rounds", "gather", "teardown", "teardown")


def words(stage: int, doing: int) -> str:
    """Returns an activity as the user reads it: "growth", "growth (warm-up)", "gather"."""
    in_round = Stage.WARM_UP <= stage <= Stage.ROUNDS and doing != Doing.NOTHING
    if not in_round:
        return _STAGES[stage]
    name = Doing(doing).name.lower().replace("_", " ")
    return name if stage == Stage.ROUNDS else f"{name} ({_STAGES[stage]})"


class Page:
    """The three bytes of one rank; after `share` the watchdog can map them."""

    def __init__(self) -> None:
        self.bytes = memoryview(bytearray(SIZE))

    def share(self) -> int:
        """Moves the page into memory that another process can map, freed with the last process that
        maps it; returns its file descriptor, which the caller closes."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("mpissd")
        else:  # a Python that was built for an older glibc, as conda's and uv's
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, SIZE)
        shared = mmap.mmap(fd, SIZE)
        shared[:] = self.bytes.tobytes()
        self.bytes = memoryview(shared)
        return fd


OWN = Page()  # the page of this process's rank
