"""Online learning during decoding: the target's rank 0 sends training examples to a learner rank,
and the draft loads the newer weights that the learner sends.

In each round rank 0 sends the part of each sequence's training example that the round adds. The
learner sends each version of the draft's weights in pieces of up to 1 MiB, so that no piece delays
a round for long. A message without bytes says that no more weights follow.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from struct import Struct
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.checkpoint import unpacked
from mpissd.engine.oracle.logits import LogitsTarget
from mpissd.engine.round.draft import Drafter
from mpissd.engine.round.sequence import Batch
from mpissd.engine.round.target import RoundObserver

if TYPE_CHECKING:
    from mpissd.engine.comm.mpi_learner import ExampleOutlet, PieceInbox  # importing it starts MPI

Bytes = NDArray[np.uint8]
_HEADER = Struct("=2q")  # a piece begins with (version, number of bytes of the whole version)
PIECE_BYTES = _HEADER.size + (1 << 20)  # the most bytes of a message, which takes 0.3 ms
_DONE = object()
_PATIENCE = 3  # after so many versions with non-finite logits, no more are loaded


@dataclass(frozen=True)
class ExamplePart:
    """The part of a sequence's training example that one round adds.

    name: (request id, epoch) of the sequence. start: the position in the sequence of the first
    token of `tokens`. prompt: the length of its prompt. at: the positions after which the target
    decided a token in this round. logits: the target's logits there, float32 [len(at), V].
    """

    name: tuple[int, int]
    start: int
    prompt: int
    tokens: Ints
    at: Ints
    logits: NDArray[np.float32]


def write_parts(parts: Sequence[ExamplePart]) -> Bytes:
    """Returns a message with the example parts of a round, one for each sequence."""
    values = []
    for part in parts:
        arrays = [array.tobytes() for array in (part.tokens, part.at, part.logits)]
        values.append((*part.name, part.start, part.prompt, *arrays))
    return np.frombuffer(pickle.dumps(values), np.uint8)


def read_parts(message: Bytes) -> list[ExamplePart]:
    """Returns the example parts that `write_parts` has written to a message."""
    parts = []
    for request_id, epoch, start, prompt, *arrays in pickle.loads(message.data):
        tokens, at = (np.frombuffer(data, np.int32) for data in arrays[:2])
        logits = np.frombuffer(arrays[2], np.float32).reshape(len(at), -1)
        parts.append(ExamplePart((request_id, epoch), start, prompt, tokens, at, logits))
    return parts


class ExampleSender(RoundObserver):
    """Sends the tokens of each round, and the target's logits that decided them, to the learner.
    Decoding never waits for the learner: if there is no room for a message, the round's logits are
    dropped, and its tokens are sent with the next message."""

    def __init__(self, oracle: LogitsTarget, outlet: ExampleOutlet) -> None:
        self._oracle = oracle
        self._outlet = outlet
        self._sent: dict[tuple[int, int], int] = {}  # {sequence: number of tokens sent}
        self.rounds = self.dropped = self.rows = self.num_bytes = 0
        self.spent_s = 0.0

    def judged(self, batch: Batch, accepted: Ints, bonus: Ints) -> None:
        """Sends a round's tokens and logits, unless there is no room for a message."""
        start = perf_counter()
        self.rounds += 1
        if self._outlet.has_room():
            parts = list(self._parts(batch, accepted, bonus))
            message = write_parts(parts)
            self._outlet.send(message)
            self._sent = {part.name: part.start + len(part.tokens) for part in parts}
            self.rows += sum(len(part.at) for part in parts)
            self.num_bytes += message.nbytes
        else:
            self.dropped += 1
        self.spent_s += perf_counter() - start

    def _parts(self, batch: Batch, accepted: Ints, bonus: Ints) -> Iterator[ExamplePart]:
        """Yields each sequence's example part, with the logits of its accepted and bonus tokens."""
        first = 0  # the sequence's first row in the target's forward
        for row, sequence in enumerate(batch.sequences):
            k = int(accepted[row])
            start = self._sent.get(sequence.name, 0)
            tokens = [*sequence.tokens[start:], *sequence.served[:k], bonus[row]]
            last = len(sequence.tokens) - 1
            yield ExamplePart(
                sequence.name,
                start,
                len(sequence.request.prompt),
                np.array(tokens, np.int32),
                np.arange(last, last + k + 1, dtype=np.int32),
                np.array([self._oracle.logits_of(first + n) for n in range(k + 1)]),
            )
            first += len(sequence.served) + 1

    def to_dict(self) -> dict[str, Any]:
        """Returns the mean size and time of a round's message, and the dropped rounds."""
        rounds = max(1, self.rounds)
        return {
            "rows_per_round": round(self.rows / rounds, 3),
            "bytes_per_round": round(self.num_bytes / rounds, 1),
            "us_per_round": round(self.spent_s / rounds * 1e6, 2),
            "dropped_rounds": self.dropped,
        }


def pieces(version: int, data: bytes) -> Iterator[Bytes]:
    """Yields the messages that send the bytes `data`, one version of the weights, in pieces."""
    header = _HEADER.pack(version, len(data))
    size = PIECE_BYTES - len(header)
    for start in range(0, len(data), size):
        yield np.frombuffer(header + data[start : start + size], np.uint8)


class Updates:
    """Loads newer weights of a draft, in small units of work that each fit between two rounds.

    The new weights are packed into separate memory while the old ones are still used. The last unit
    of work copies them over the old weights and empties the draft's KV cache. After a version whose
    logits are not finite, the weights of the start are loaded again.

    report: values of the result row: "swaps", the number, bytes and longest delay of a round in µs
    of each version that was loaded; "refused_versions", why other versions were refused.
    """

    def __init__(self, inbox: PieceInbox, drafter: Drafter) -> None:
        stepper = drafter.worker.stepper
        assert isinstance(stepper, Stepper), "new weights of a model that computes nothing"
        self._inbox = inbox
        self._drafter = drafter
        self._stepper = stepper
        self._data = bytearray()  # the bytes so far of the version whose pieces arrive
        self._packing: Iterator[None] | None = None
        self._leaving: Iterator[None] | None = None  # its steps pack the first weights again
        self._longest_s = 0.0
        self._newest = self._num_bytes = 0  # the last version's number and its bytes
        self._diverged = 0  # the number of versions with non-finite logits
        self.report: dict[str, list[Any]] = {"swaps": [], "refused_versions": []}

    def work(self) -> bool:
        """Does one unit of work between two rounds. Returns whether there was any work to do."""
        start = perf_counter()
        drafter = self._drafter
        before = drafter.version
        is_leaving = self._packing is not None and self._packing is self._leaving
        if drafter.divergence is not None and not is_leaving:
            # Drops packed weights, and goes back to the weights of the start.
            self.report["refused_versions"].append(f"version {before}: {drafter.divergence}")
            self._diverged += 1
            self._packing = self._leaving = self._steps(0, None)
        try:
            did = True
            if self._packing is None:
                did = self._receive()
            elif next(self._packing, _DONE) is _DONE:
                self._packing = None
        except ProtocolError as error:
            self._packing = None
            self.report["refused_versions"].append(str(error))
        self._longest_s = max(self._longest_s, perf_counter() - start)
        if drafter.version not in (0, before):
            swap: dict[str, Any] = {"version": drafter.version, "num_bytes": self._num_bytes}
            self.report["swaps"].append({**swap, "longest_us": round(self._longest_s * 1e6, 1)})
            self._longest_s = 0.0
        return did

    def _receive(self) -> bool:
        message = self._inbox.take()
        if message is None:
            return False
        if self._diverged >= _PATIENCE:
            return True  # takes and drops a piece, so that the sender can end
        version, total = _HEADER.unpack_from(message.data)
        self._data += message[_HEADER.size :].data
        if len(self._data) < total:
            return True
        data = memoryview(self._data)
        self._data = bytearray()
        if version <= self._newest:
            raise ProtocolError(f"version {version} after version {self._newest}")
        self._newest = version
        self._num_bytes = data.nbytes
        self._packing = self._steps(version, data)
        return True

    def _steps(self, version: int, data: memoryview | None) -> Iterator[None]:
        """Packs weights, one unit of work a step of this iterator; the last step lets the drafter
        use them. data: the weights' bytes (None: the weights of the start)."""
        arrays = None
        if data is not None:
            arrays = unpacked(data)
            yield
        yield from self._stepper.reload(arrays)
        self._drafter.change(version)
