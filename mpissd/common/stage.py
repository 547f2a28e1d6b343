"""A page of shared memory in which a rank stores what it is doing, for its host's watchdog process.

The page has three bytes in use. A store needs no system call and no message.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum

SIZE = mmap.PAGESIZE
STAGE = 0  # offset of the byte in the page that holds the rank's Stage
DOING = 1
WAITING = 2


class Stage(IntEnum):
    """The stages of a job, in order."""

    START = 0  # MPI has not started yet
    OPEN = 1  # devices, weights and communicators are made
    WARM_UP = 2  # forwards are timed, and warm-up rounds run
    ROUNDS = 3  # the measured rounds run
    GATHER = 4  # results are gathered and written
    TEARDOWN = 5  # everything is closed
    DONE = 6  # MPI has ended, or was never started


class Doing(IntEnum):
    """What a rank does in a round. The lead is the target's first rank; its other ranks are
    followers."""

    NOTHING = 0  # the rank is not in a decoding loop
    DRAFT_WAIT = 1  # lead: waits for draft tokens
    VERIFY = 2  # lead and followers: all of a round but these waits
    PLAN_WAIT = 3  # follower: waits for the lead's outcome and draft tokens
    OUTCOME_WAIT = 4  # draft: waits for the target's outcome
    ANSWER = 5  # draft: has the outcome and has not sent draft tokens yet
    GROWTH = 6  # draft: scores the draft tokens that it sent, and drafts further ones ahead


_STAGES = ("start", "start", "warm-up", "rounds", "gather", "teardown", "teardown")


def words(stage: int, doing: int) -> str:
    """Returns a rank's Stage and Doing as text, such as "growth" or "growth (warm-up)"."""
    in_round = Stage.WARM_UP <= stage <= Stage.ROUNDS and doing != Doing.NOTHING
    if not in_round:
        return _STAGES[stage]
    name = Doing(doing).name.lower().replace("_", " ")
    return name if stage == Stage.ROUNDS else f"{name} ({_STAGES[stage]})"


class Page:
    """The memory page of one rank. Only after `share` can another process map it."""

    def __init__(self) -> None:
        self.bytes = memoryview(bytearray(SIZE))

    def share(self) -> int:
        """Moves the page into shared memory, which the system frees with the last process that maps
        it. Returns its file descriptor, which the caller closes."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("mpissd")
        else:  # Python was built for an older glibc, as conda's and uv's are
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, SIZE)
        shared = mmap.mmap(fd, SIZE)
        shared[:] = self.bytes.tobytes()
        self.bytes = memoryview(shared)
        return fd


OWN = Page()  # the page of this process, which is one rank
