"""The end of a server that finishes what it has: it takes nothing new, within a time."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpissd.serve.http.lead import Lead


class Drain:
    """What happens between SIGTERM and the end.

    From the signal on /ready is 503. For `notice_s` requests are still taken, so that a balancer
    that asks /ready now and then has turned away before one is refused; then new ones get 503 with
    Retry-After. The server ends with its last request, or `longest_s` behind the signal.
    """

    def __init__(
        self,
        lead: Lead,
        longest_s: float = 0.0,
        notice_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """longest_s: 0 for a server that does not drain."""
        self._lead, self._clock = lead, clock
        self._longest_s, self._notice_s = longest_s, notice_s
        self._began_s: float | None = None
        self._refuses_s = 0.0
        self._unfinished = 0
        self.on_begin: Callable[[], object] = lambda: None

    def begin(self) -> bool:
        """Begins, from within a signal handler; returns False where it cannot, or has begun."""
        if not self._longest_s or self._began_s is not None:
            return False
        self._began_s = self._clock()
        return True

    def is_over(self, num_requests: int) -> bool:
        """Goes on; returns whether the server shall end. num_requests: under way."""
        if self._began_s is None:
            return False
        if not self._lead.is_leaving:
            self._lead.is_leaving = True
            self._refuses_s = self._notice_s if self._lead.is_serving else 0.0
            self.on_begin()
        self._unfinished = num_requests
        passed = self._clock() - self._began_s
        self._lead.is_refusing = passed >= min(self._refuses_s, self._longest_s)
        return passed >= self._longest_s or (self._lead.is_refusing and not num_requests)

    def ending(self) -> str | None:
        """Returns what is to be said at the server's end; None where nothing was drained."""
        if self._began_s is None:
            return None
        cut, passed = self._unfinished, self._clock() - self._began_s
        return f"drained in {passed:.1f} s; requests cut off: {cut or 'none'}"
