"""Online learning in the loops: the lead teaches a learner, and the draft takes newer weights.

`Teaching` sends the learner the results of each verified round. `Updates` receives, checks and
packs a draft's newer weights between rounds, and swaps them in at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mpissd.common.errors import ProtocolError
from mpissd.common.rounds import Ints
from mpissd.engine.comm import learner_messages
from mpissd.engine.comm.learner_messages import Assembly
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.checkpoint import unpacked
from mpissd.engine.oracle.logits import LogitsTarget
from mpissd.engine.round.draft import Drafter
from mpissd.engine.round.sequence import Batch
from mpissd.engine.round.target import RoundObserver

if TYPE_CHECKING:
    from mpissd.engine.comm.mpi_learner import LessonOutlet, PieceInbox  # importing it starts MPI

_DONE = object()
_PATIENCE = 3  # diverged versions after which a draft takes no more


class Updates:
    """Takes a draft's newer weights over, in units that each fit between two rounds.

    The new weights are packed into memory of their own while the old ones draft. The last unit
    copies them over the old ones and has the drafter forget the old cache. After a version whose
    logits are not finite, the weights loaded at the start draft again.

    report: for the result row. swaps: of each version that was taken, in order, its number, bytes,
    and the longest time that it held up a round, in µs. refused_versions: why others were refused.
    """

    def __init__(self, inbox: PieceInbox, drafter: Drafter) -> None:
        stepper = drafter.worker.stepper
        assert isinstance(stepper, Stepper), "new weights of a model that computes nothing"
        self._inbox, self._drafter, self._stepper = inbox, drafter, stepper
        self._assembly = Assembly()
        self._packing: Iterator[None] | None = None
        self._leaving: Iterator[None] | None = None  # packs the loaded weights again
        self._num_bytes, self._longest_s = 0, 0.0
        self._newest = self._diverged = 0  # the last version's number; how many diverged
        self.report: dict[str, list[Any]] = {"swaps": [], "refused_versions": []}

    def work(self) -> bool:
        """Does one unit of work between two rounds; returns whether there was any."""
        start, drafter = perf_counter(), self._drafter
        before = drafter.version
        is_leaving = self._packing is not None and self._packing is self._leaving
        if drafter.divergence is not None and not is_leaving:
            # Goes back to the weights that were loaded; drops packed weights.
            self.report["refused_versions"].append(f"version {before}: {drafter.divergence}")
            self._diverged += 1
            self._packing = self._leaving = self._steps(0, None)
        try:
            if self._packing is None:
                did = self._receive()
            else:
                did = True
                if next(self._packing, _DONE) is _DONE:
                    self._packing = None
        except ProtocolError as error:
            self._packing, did = None, True
            self.report["refused_versions"].append(str(error))
        self._longest_s = max(self._longest_s, perf_counter() - start)
        if drafter.version not in (0, before):
            longest_us = round(self._longest_s * 1e6, 1)
            swap = {
                "version": drafter.version,
                "num_bytes": self._num_bytes,
                "longest_us": longest_us,
            }
            self.report["swaps"].append(swap)
            self._longest_s = 0.0
        return did

    def _receive(self) -> bool:
        message = self._inbox.take()
        if message is None:
            return False
        if self._diverged >= _PATIENCE:
            return True  # so that its sender may end
        complete = self._assembly.add(message)
        if complete is None:
            return True
        version, data = complete
        if version <= self._newest:
            raise ProtocolError(f"version {version} after version {self._newest}")
        self._newest, self._num_bytes = version, data.nbytes
        self._packing = self._steps(version, data)
        return True

    def _steps(self, version: int, data: memoryview | None) -> Iterator[None]:
        """Packs a version's weights (None: those that were loaded), and changes the drafter to
        them."""
        arrays = None
        if data is not None:
            arrays = unpacked(data)
            yield
        yield from self._stepper.reload(arrays)
        self._drafter.change(version)


class Teaching(RoundObserver):
    """Sends the target's logits that decided a round's tokens.

    Decoding never waits for the learner: if it does not keep up, a round's rows are dropped, and
    the next message brings its tokens.
    """

    def __init__(self, oracle: LogitsTarget, outlet: LessonOutlet) -> None:
        self._oracle, self._outlet = oracle, outlet
        self._sent: dict[tuple[int, int], int] = {}  # number of tokens sent, by sequence
        self.rounds = self.dropped = self.rows = self.num_bytes = 0
        self.spent_s = 0.0

    def judged(self, batch: Batch, accepted: Ints, bonus: Ints) -> None:
        """Sends a judged round's logits before another forward overwrites them.

        Without room for a message, no logits are read.
        """
        start, oracle = perf_counter(), self._oracle
        self.rounds += 1
        if not self._outlet.has_room():
            self.dropped += 1
        else:
            lessons = oracle.lessons(batch, accepted, bonus, self._sent)
            logits = [oracle.logits_of(row) for one in lessons for row in one.rows]
            message = learner_messages.write_lessons(lessons, logits)
            self._outlet.send(message)
            self._sent = {one.name: one.start + len(one.tokens) for one in lessons}
            self.rows += len(logits)
            self.num_bytes += message.nbytes
        self.spent_s += perf_counter() - start

    def to_dict(self) -> dict[str, Any]:
        """Returns the cost of teaching for the result row, as means of a round."""
        rounds = max(1, self.rounds)
        return {
            "rows_per_round": round(self.rows / rounds, 3),
            "bytes_per_round": round(self.num_bytes / rounds, 1),
            "us_per_round": round(self.spent_s / rounds * 1e6, 2),
            "dropped_rounds": self.dropped,
        }
