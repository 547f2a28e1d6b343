"""A job in which one rank is struck: python -m mpi4py -m tests.mpi.struck run FLAGS…

STRIKE in the environment says whom, how and when: "RANK HOW PHASE AFTER", AFTER being how many
times the rank comes to that phase before. The time of the strike is left in the file STRUCK.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mpissd import __main__ as application
from mpissd.common import guard
from mpissd.common.stage import DOING, OWN, STAGE, Doing, Stage
from mpissd.common.trace import DraftLedger, Ledger
from mpissd.engine.comm.topology import launcher_rank

STAGES = {
    "start": Stage.OPEN,
    "warm-up": Stage.WARM_UP,
    "gather": Stage.GATHER,
    "teardown": Stage.TEARDOWN,
}
DOINGS = {"verify": Doing.VERIFY, "growth": Doing.GROWTH}


class Struck(Exception):
    """What a struck rank raises."""


def strike(how: str) -> None:
    """Does it to this process, now."""
    Path(os.environ["STRUCK"]).write_text(repr(time.time()))
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "hang":
        while True:
            time.sleep(1.0)
    elif how == "late":
        time.sleep(1.5)
    elif how == "exit":
        sys.exit(0)
    elif how == "_exit":
        os._exit(0)
    else:
        raise Struck("by the test")


def arm(how: str, phase: str, after: int) -> None:
    """Strikes when this rank is in `phase` for the `after`-th time."""
    left = [after]

    def seen(in_phase: bool) -> None:
        if in_phase:
            left[0] -= 1
            if left[0] == 0:
                strike(how)

    if phase == "join":  # before MPI
        guard.join = followed(guard.join, lambda: seen(True))  # type: ignore[assignment]
    elif phase in STAGES:
        wanted = STAGES[phase]
        guard.stage = followed(guard.stage, lambda: seen(OWN.bytes[STAGE] == wanted))  # type: ignore[assignment]
    elif phase == "left":  # the rank's part is over, MPI is not
        guard.leave = followed(guard.leave, lambda: seen(True))  # type: ignore[assignment]
    else:
        doing = DOINGS[phase]

        def in_round() -> bool:
            return OWN.bytes[STAGE] == Stage.ROUNDS and OWN.bytes[DOING] == doing

        kind = DraftLedger if phase == "growth" else Ledger
        kind.mark = followed(kind.mark, lambda: seen(in_round()))  # type: ignore[method-assign]


def followed(function: Callable[..., None], then: Callable[[], None]) -> Callable[..., None]:
    """The function, and `then` after each call."""

    def both(*args: object, **kwargs: object) -> None:
        function(*args, **kwargs)
        then()

    return both


if __name__ == "__main__":
    rank, how, phase, after = os.environ["STRIKE"].split()
    if launcher_rank() == int(rank):
        arm(how, phase, int(after))
    sys.exit(application.main())
