"""A page of shared memory in which a rank stores what it is doing, for its host's watchdog process.

The page has three bytes in use. A store needs no system call and no message.
"""

import mmap
import os
import tempfile
from enum import IntEnum

SIZE = mmap.PAGESIZE
STAGE = 0  # offset of the byte in the page that holds the rank's Stage
DOING = 1
WAITING = 2


class Stage(IntEnum):
    """The stages of a job on a rank, in order, as a message about a fault names them."""

    START = 0  # MPI has not started yet
    OPEN = 1  # devices, weights and communicators are made
    WARM_UP = 2  # forwards are timed, and warm-up rounds run
    ROUNDS = 3  # the measured rounds run
    GATHER = 4  # results are gathered and written
    TEARDOWN = 5  # everything is closed
    DONE = 6  # MPI has ended, or was never started


class Doing(IntEnum):
    """What a rank does in a round, as a fault's message names it. The comments call the target's
    rank 0 the lead, and the other target ranks followers."""

    NOTHING = 0  # the rank is not in a decoding loop
    DRAFT_WAIT = 1  # the target's rank 0 waits for draft tokens
    VERIFY = 2  # a target rank: all that it does in a round, except waits for other ranks
    PLAN_WAIT = 3  # another target rank waits for rank 0's acceptance results and draft tokens
    OUTCOME_WAIT = 4  # a draft rank waits for the target's acceptance results
    ANSWER = 5  # a draft rank has the acceptance results, and has not sent draft tokens yet
    GROWTH = 6  # a draft rank scores the tokens that it sent, and drafts further ones ahead


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
        else:  # Python lacks memfd_create if built for an older glibc.
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, SIZE)
        shared = mmap.mmap(fd, SIZE)
        shared[:] = self.bytes.tobytes()
        self.bytes = memoryview(shared)
        return fd


OWN = Page()  # the page of this process, which is one rank
