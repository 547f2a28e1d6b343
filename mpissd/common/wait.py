"""Waits that poll, give up the core where cores are scarce, and fail after a deadline.

Every wait of the decoding loops goes through a Waiter. So a dead or stopped rank ends the job with
one line, and no job hangs until Slurm's time limit.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpissd.common import guard
from mpissd.common.errors import FaultError
from mpissd.common.stage import OWN, WAITING

_PR_SET_TIMERSLACK = 29
_POLLS_BETWEEN_CLOCK_READS = 64
_SPIN_S = 20e-6  # seconds of polling before the first sleep: enough for a message that is underway
# Seconds of polling before the first sleep, if there are exactly as many cores as ranks.
PATIENT_SPIN_S = 200e-6
_NAP_S = 20e-6  # seconds of a sleep between two polls
_LONG_S = 5e-3  # seconds after which a wait is shown to the watchdog, and polls less often
_LONG_NAP_S = 50e-6
_ALARM_S = 0.2  # seconds between two calls of Waiter.alarm
_ASLEEP_S = 1.0  # seconds between two polls above which this process must have been stopped


def sharpen_sleep() -> None:
    """Asks Linux to end this thread's sleeps at most 1 µs late. The default is 50 µs."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


class Overdue(FaultError):
    """Raised if a wait for another rank lasts longer than its deadline."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Ends the process with exit code 5 and one line about `what` if the block takes longer than
    `seconds`; meant for calls that cannot be polled, such as the teardown of a library. The
    launcher then ends the other ranks."""

    def give_up() -> None:
        text = f"{what}: not over after {seconds:.0f} s (--deadline_s)"
        if not guard.failed(text, "waited"):
            sys.stderr.write(f"mpissd: {text}\n")
            sys.stderr.flush()
        os._exit(FaultError.exit_code)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Waiter:
    """Waits for events by spinning, or by polling with short sleeps. Spinning sees the event
    soonest but needs a core for each rank: with five ranks on two cores a round took 18.7 ms by
    spinning and 12.9 ms with sleeps, where 12.5 ms were ideal."""

    def __init__(self, deadline_s: float, spin: bool, spin_s: float = _SPIN_S) -> None:
        """Sets how to wait. deadline_s: the longest wait in s. spin: whether to poll without ever
        sleeping; otherwise a wait polls without sleeping only in its first spin_s seconds."""
        self.deadline_s = deadline_s
        self.spin = spin
        self.spin_s = spin_s
        # Called every 0.2 s during a long wait; raises an error if the event can no longer come.
        self.alarm: Callable[[], None] | None = None
        self.between: Callable[[], object] | None = None  # called between two polls

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Returns once test() is true. Raises Overdue, whose message begins with `what`, after
        deadline_s. Time in which this process was stopped does not count."""
        if test():
            return
        start = last = time.perf_counter()
        is_long = False
        alarm_s = _ALARM_S
        asleep = 0.0  # seconds in which this process was stopped
        while True:
            for _ in range(_POLLS_BETWEEN_CLOCK_READS if self.spin else 4):
                if test():
                    if is_long:
                        OWN.bytes[WAITING] = 0
                    return
                if self.between is not None:
                    self.between()
            now = time.perf_counter()
            if now - last > _ASLEEP_S:
                asleep += now - last
            last = now
            waited = now - start
            if waited > _LONG_S:
                is_long = True
                OWN.bytes[WAITING] = 1
                if self.alarm is not None and waited > alarm_s:
                    alarm_s = waited + _ALARM_S
                    self.alarm()
                if waited - asleep > self.deadline_s:
                    raise Overdue(f"{what}: nothing for {waited:.1f} s (--deadline_s)")
            if self.spin:
                time.sleep(0)  # gives the core to another process that can run
            elif waited > self.spin_s:
                time.sleep(_NAP_S if waited < _LONG_S else _LONG_NAP_S)

    def sleep_until(self, end: float) -> None:
        """Returns when time.perf_counter() reaches `end`; sleeps until just before, then polls."""
        while (left := end - time.perf_counter()) > 0:
            if self.between is not None:
                self.between()
            if left > _NAP_S:
                time.sleep(left - _NAP_S / 2 if left > 1e-3 else left / 2)
