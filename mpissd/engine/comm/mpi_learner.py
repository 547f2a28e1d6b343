"""Online learning over MPI: training examples from the lead, new weights to the draft.

The learner is the last rank of the world. It is split off before the job opens, so the job's own
collectives never wait for it. Nothing of the job waits for its messages either.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from mpissd.engine.comm.mpi_patient import PatientComm

Bytes = NDArray[np.uint8]
_EXAMPLES, _STOP, _REPORT, _VERSION = range(1, 5)  # the messages' tags
_MOST = 8  # messages of examples in flight
_REPORT_S = 10.0  # longest wait of the job for the learner's report
_NAP_S = 1e-3


class LearnerComms:
    """This rank's place in a job with one learner; `world` is the job without it. world_size counts
    the learner. is_learner, is_lead, is_draft: this rank's role; the first rank leads and the one
    before the learner drafts. local_rank: among the ranks of its host."""

    def __init__(self, piece_bytes: int) -> None:
        """Starts MPI and splits the learner off; collective over MPI's world. piece_bytes: the
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
        self._stop: MPI.Request | None = None  # of `stop`; holds its message until it is received

    def stop(self) -> dict[str, Any] | None:
        """Ends the learner, on the lead; returns its report, None if it does not answer in time."""
        self._stop = self._all.Isend(np.zeros(1, np.int32), self._learner, _STOP)
        until = time.monotonic() + _REPORT_S
        while (data := self._probed(self._learner, _REPORT)) is None:
            if time.monotonic() > until:
                return None
            time.sleep(_NAP_S)
        report: dict[str, Any] = json.loads(data.tobytes())
        return report

    def close(self) -> None:
        """Ends the messages in flight, once the job's rounds are over."""
        if self.outlet is not None and self._stop is None:
            self.stop()
        if self.inbox is not None:
            self.inbox.close()

    def examples(self) -> Bytes | None:
        """Returns a round's training examples, on the learner; None if none have arrived."""
        return self._probed(0, _EXAMPLES)

    def must_stop(self) -> bool:
        """Returns whether the lead has ended the learner; what it sent before has arrived."""
        return self._probed(0, _STOP) is not None

    def send_piece(self, message: Bytes) -> MPI.Request:
        """Starts to send the draft a piece of a version."""
        return self._all.Isend(message, self._learner - 1, _VERSION)

    def finish(self, report: dict[str, Any], last: MPI.Request | None) -> None:
        """Ends the learner's messages: the end to the draft, its report to the lead. last: the
        piece that is on its way."""
        if last is not None:
            last.Wait()
        self._all.Send(np.zeros(0, np.uint8), self._learner - 1, _VERSION)
        self._all.Send(np.frombuffer(json.dumps(report).encode(), np.uint8), 0, _REPORT)

    def _probed(self, source: int, tag: int) -> Bytes | None:
        """Receives a message of any length if it has arrived."""
        status = MPI.Status()
        if not self._all.Iprobe(source, tag, status):
            return None
        data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self._all.Recv([data, MPI.BYTE], source, tag)
        return data


class ExampleOutlet:
    """The lead's sends to the learner, which never block; a few may be in flight."""

    def __init__(self, comm: MPI.Comm, learner: int) -> None:
        self._comm, self._learner = comm, learner
        self._sending: list[tuple[MPI.Request, Bytes]] = []

    def has_room(self) -> bool:
        """Returns whether few enough messages are on their way."""
        self._sending = [(request, kept) for request, kept in self._sending if not request.Test()]
        return len(self._sending) < _MOST

    def send(self, message: Bytes) -> None:
        """Starts to send a message, which is on its way until the learner takes it. A plain send of
        a short message would complete before it is received."""
        self._sending.append((self._comm.Issend(message, self._learner, _EXAMPLES), message))


class PieceInbox:
    """Receives the pieces of new weights for a draft."""

    def __init__(self, comm: MPI.Comm, learner: int, piece_bytes: int) -> None:
        self._buffer = np.empty(piece_bytes, np.uint8)
        self._comm, self._learner = comm, learner
        self._request: MPI.Request | None = None
        self._ended = False

    def take(self) -> Bytes | None:
        """Returns the next message, valid until the next call; None if none has arrived."""
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
        """Drops arriving messages until the learner has ended, or the time for that is over."""
        until = time.monotonic() + _REPORT_S
        while not self._ended and time.monotonic() < until:
            if self.take() is None:
                time.sleep(_NAP_S)
        if self._request is not None:
            self._request.Cancel()
            self._request.Wait()
