"""The lead's part of online learning: sends a learner the results of each verified round."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from mpissd.common.rounds import Ints
from mpissd.engine.comm import learner_messages
from mpissd.engine.comm.learner_messages import Outlet
from mpissd.engine.workload.oracle import TargetOracle
from mpissd.engine.workload.sequence import Batch


class Teaching:
    """Sends the target's logits at rejected tokens, or at all verified ones.

    Decoding never waits for the learner: if it does not keep up, a round's rows are dropped, and
    the next message brings its tokens.
    """

    def __init__(self, oracle: TargetOracle, outlet: Outlet, *, everywhere: bool) -> None:
        self._oracle, self._outlet, self._everywhere = oracle, outlet, everywhere
        self._sent: dict[tuple[int, int], int] = {}  # tokens that were sent, by sequence
        self.rounds = self.dropped = self.rows = self.num_bytes = 0
        self.spent_s = 0.0

    def __call__(self, batch: Batch, accepted: Ints, bonus: Ints) -> None:
        """Sends a judged round's logits before another forward overwrites them.

        Without room for a message, no logits are read.
        """
        start = perf_counter()
        self.rounds += 1
        if not self._outlet.has_room():
            self.dropped += 1
        else:
            self._send(batch, accepted, bonus)
        self.spent_s += perf_counter() - start

    def _send(self, batch: Batch, accepted: Ints, bonus: Ints) -> None:
        oracle, sent = self._oracle, self._sent
        lessons = oracle.lessons(batch, accepted, bonus, sent, everywhere=self._everywhere)
        logits = [oracle.logits_of(row) for one in lessons for row in one.rows]
        message = learner_messages.write_lessons(lessons, logits)
        self._outlet.send(message)
        self._sent = {one.name: one.start + len(one.tokens) for one in lessons}
        self.rows += len(logits)
        self.num_bytes += message.nbytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the cost of teaching for the result row, as means of a round."""
        rounds = max(1, self.rounds)
        return {
            "rows_per_round": round(self.rows / rounds, 3),
            "bytes_per_round": round(self.num_bytes / rounds, 1),
            "us_per_round": round(self.spent_s / rounds * 1e6, 2),
            "dropped_rounds": self.dropped,
        }
