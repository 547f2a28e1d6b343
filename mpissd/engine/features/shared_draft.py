"""A draft whose shards are on all target ranks, where the host issues its forwards.

Rank 0 drafts as if the draft were its own; before each forward it tells the other ranks what to do.
In rounds that the device decides (device_rounds.py), each rank launches its own part.
"""

from typing import Any

from mpissd.common.wait import Waiter
from mpissd.engine.model.stepper import Stepper


class SharedDraft:
    """One rank's end of a draft that the target ranks share."""

    def __init__(self, comm: Any, stepper: Stepper, waiter: Waiter) -> None:
        """comm: an MPI communicator of the target ranks for these messages alone. stepper: this
        rank's part of the draft. waiter: waits for messages."""
        self._comm = comm
        self._stepper = stepper
        self._waiter = waiter
        if comm.rank == 0:
            stepper.tell = self.tell

    def tell(self, method: str, *args: Any, **options: Any) -> None:
        """On rank 0, makes the other ranks call a method; returns when the message has left."""
        message = method, args, options
        sent = [self._comm.isend(message, rank) for rank in range(1, self._comm.size)]
        self._waiter.until(lambda: all(one.Test() for one in sent), "the draft's other ranks")

    def end(self) -> None:
        """Ends a series of forwards. On rank 0: tells the others that the series is over. On these:
        does what rank 0 tells, until then."""
        if self._comm.rank == 0:
            self.tell("")
            return
        while (call := self._received())[0]:
            method, args, options = call
            getattr(self._stepper, method)(*args, **options)
            if method == "launch":
                self._stepper.wait(self._waiter)

    def close(self) -> None:
        self._stepper.tell = None
        self._comm.Free()

    def _received(self) -> tuple[str, Any, Any]:
        found: list[Any] = []

        def has_arrived() -> bool:
            message = self._comm.improbe(0)
            found.extend([] if message is None else [message])
            return bool(found)

        self._waiter.until(has_arrived, "lead: a draft's forward")
        call: tuple[str, Any, Any] = found[0].recv()
        return call
