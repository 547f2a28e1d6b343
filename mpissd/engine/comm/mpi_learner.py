"""MPI messages for online training of the draft: training examples go from rank 0 (a target rank)
to the learner, and new weights from the learner to the draft rank.

The learner, the last rank of MPI's world, is split off before the other ranks open the job, so that
collectives of these ranks never wait for it. They do not wait for its messages either.
"""

import json
import time
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.engine.comm.mpi_patient import PatientComm

Bytes = NDArray[np.uint8]
_EXAMPLES, _STOP, _REPORT, _VERSION = range(1, 5)  # MPI tags of the kinds of messages
_MOST = 8  # most messages of examples that may be in flight
_REPORT_S = 10.0  # the longest time, in seconds, that rank 0 waits for the learner's report
_NAP_S = 1e-3


class LearnerComms:
    """The communicators and messages of one rank in a job with a learner, which trains the draft.
    world: all ranks but the learner, or the learner alone. world_size: number of ranks with the
    learner. is_learner (the last rank), is_lead (rank 0), is_draft (the last but one): this rank's
    role. local_rank: the number of this rank on its host."""

    def __init__(self, piece_bytes: int) -> None:
        """Starts MPI and splits the learner off. Collective over MPI's world. piece_bytes: the
        longest message of new weights."""
        self._all = PatientComm(MPI.COMM_WORLD).Dup()
        rank, self.world_size = self._all.rank, self._all.size
        self._learner = self.world_size - 1
        self.local_rank = self._all.Split_type(MPI.COMM_TYPE_SHARED, rank).rank
        self.is_learner, self.is_lead = rank == self._learner, rank == 0
        self.is_draft = rank == self._learner - 1
        self.world = self._all.Split(int(self.is_learner), rank)
        self.outlet = ExampleOutlet(self._all, self._learner) if self.is_lead else None
        self.inbox = PieceInbox(self._all, self._learner, piece_bytes) if self.is_draft else None
        self._stop: MPI.Request | None = None  # keeps the send of the stop message alive

    def stop(self) -> dict[str, Any] | None:
        """On rank 0: ends the learner and returns its report, or None if it does not answer."""
        self._stop = self._all.Isend(np.zeros(1, np.int32), self._learner, _STOP)
        until = time.monotonic() + _REPORT_S
        while (data := self._probed(self._learner, _REPORT)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(_NAP_S)
        report: dict[str, Any] = json.loads(data.tobytes())
        return report

    def close(self) -> None:
        """Finishes this rank's messages with the learner after decoding; rank 0 also stops it."""
        if self.outlet is not None and self._stop is None:
            self.stop()
        if self.inbox is not None:
            self.inbox.close()

    def examples(self) -> Bytes | None:
        """On the learner: returns the training examples of a round; None if none have arrived."""
        return self._probed(0, _EXAMPLES)

    def must_stop(self) -> bool:
        """On the learner: returns whether rank 0's stop message has arrived. All examples that rank
        0 sent earlier have then been received."""
        return self._probed(0, _STOP) is not None

    def send_piece(self, message: Bytes) -> MPI.Request:
        """On the learner: starts to send a piece of the new weights to the draft rank."""
        return self._all.Isend(message, self._learner - 1, _VERSION)

    def finish(self, report: dict[str, Any], last: MPI.Request | None) -> None:
        """On the learner, at its end: tells the draft rank that no more weights follow, and sends
        `report` to rank 0. last: the send of the last weights, which is awaited first."""
        if last is not None:
            last.Wait()
        self._all.Send(np.zeros(0, np.uint8), self._learner - 1, _VERSION)
        self._all.Send(np.frombuffer(json.dumps(report).encode(), np.uint8), 0, _REPORT)

    def _probed(self, source: int, tag: int) -> Bytes | None:
        """Returns a message of rank `source` and this tag, of any length; or None."""
        status = MPI.Status()
        if not self._all.Iprobe(source, tag, status):
            return None
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._all.Recv([data, MPI.BYTE], source, tag)
        return data


class ExampleOutlet:
    """Sends training examples from rank 0 to the learner without ever blocking."""

    def __init__(self, comm: MPI.Comm, learner: int) -> None:
        self._comm, self._learner = comm, learner
        self._sending: list[tuple[MPI.Request, Bytes]] = []

    def has_room(self) -> bool:
        """Returns whether fewer than _MOST messages are in flight, so that one may be sent."""
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        return len(self._sending) < _MOST

    def send(self, message: Bytes) -> None:
        """Starts to send a message, which counts as in flight until the learner receives it. The
        send is synchronous, because a plain send of a short message completes earlier."""
        self._sending.append((self._comm.Issend(message, self._learner, _EXAMPLES), message))


class PieceInbox:
    """Receives new weights from the learner on the draft rank, one piece a message."""

    def __init__(self, comm: MPI.Comm, learner: int, piece_bytes: int) -> None:
        self._buffer = np.empty(piece_bytes, np.uint8)
        self._comm, self._learner = comm, learner
        self._request: MPI.Request | None = None
        self._ended = False

    def take(self) -> Bytes | None:
        """Returns the next piece of weights, which later calls overwrite; or None."""
        if self._ended:
            return None
        if self._request is None:
            self._request = self._comm.Irecv(self._buffer, self._learner, _VERSION)
        status = MPI.Status()
        if not self._request.Test(status):
            return None
        self._request = None
        message = self._buffer[: status.Get_count(MPI.BYTE)]
        self._ended = len(message) == 0
        return None if self._ended else message

    def close(self) -> None:
        """Receives and drops messages until the learner's last one, for at most 10 s."""
        until = time.monotonic() + _REPORT_S
        while not self._ended and time.monotonic() < until:
            if self.take() is None:
                time.sleep(_NAP_S)
        if self._request is not None:
            self._request.Cancel()
            self._request.Wait()
