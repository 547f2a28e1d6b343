"""The sequences of a run: `batch_size` at a time; the next one starts when one has ended."""

from __future__ import annotations

from mpissd.common.rounds import Request
from mpissd.engine.decode.target import RoundResult, TargetLoop
from mpissd.engine.workload.base import Workload


class Sequences:
    """Follows the sequences of one pass on the lead, and decides which of them join and leave.

    A sequence ends when the workload ends it (Workload.endings), or with num_tokens tokens.
    """

    def __init__(self, workload: Workload, group: int = 0) -> None:
        """Takes the sequences of one target group."""
        config = workload.job.config
        self._workload, self._limit = workload, config.token_limit
        self._endings = workload.endings()
        self._left = workload.share(group)
        self._emitted: dict[int, int] = {}  # emitted tokens of each live sequence, by request id
        # Of the sequences that ended by themselves: how many tokens count.
        self.ends: dict[int, int] = {}

    @property
    def are_live(self) -> bool:
        """Whether a sequence is left to decode."""
        return bool(self._emitted)

    def first(self) -> list[Request]:
        """Returns the sequences that begin: at most batch_size."""
        return self._next(self._workload.job.config.batch_size)

    def take(self, result: RoundResult, loop: TargetLoop) -> None:
        """Counts a round's tokens, releases sequences that ended, and admits as many new ones."""
        if self._limit is None and self._endings is None:
            return
        gone = [name for name, tokens in result.emitted() if self._ends(name, tokens)]
        if gone:
            loop.finish(gone)
            loop.admit(self._next(len(gone)))

    def _next(self, count: int) -> list[Request]:
        count = min(count, len(self._left))
        requests = self._workload.requests(self._left.start, count)
        self._left = self._left[count:]
        self._emitted |= {request.request_id: 0 for request in requests}
        return requests

    def _ends(self, request_id: int, tokens: list[int]) -> bool:
        before, kept = self._emitted[request_id], None
        if self._endings is not None:
            kept = self._endings.kept(request_id, before, tokens)
        self._emitted[request_id] += len(tokens)
        if kept is not None:
            self.ends[request_id] = before + kept
        is_over = self._limit is not None and self._emitted[request_id] >= self._limit
        if kept is None and not is_over:
            return False
        del self._emitted[request_id]
        return True
