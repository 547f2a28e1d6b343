"""Waiting: poll, give the core away where it is scarce, give up at a deadline.

Every wait in mpissd goes through a Waiter, so that a dead or stopped peer ends in one clear line
and never in an allocation that hangs until its time limit.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mpissd.errors import FaultError
from mpissd.watch import guard
from mpissd.watch.page import OWN, WAITING

_PR_SET_TIMERSLACK = 29
_POLLS_BETWEEN_CLOCK_READS = 64
_SPIN_S = 20e-6  # a reply that is already on its way arrives within this
PATIENT_SPIN_S = 200e-6  # where every rank has a core, but none is spare
_NAP_S = 20e-6
_LONG_S = 5e-3
_LONG_NAP_S = 50e-6
_ALARM_S = 0.2  # between two looks at what a library knows of its peers
_ASLEEP_S = 1.0  # between two polls: nobody waited meanwhile


def sharpen_sleep() -> None:
    """Asks Linux to end this thread's sleeps within a microsecond (the default slack is 50)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000, 0, 0, 0)


class Overdue(FaultError):
    """A wait outlasted its deadline: whoever is missing is at fault, not who waited."""


@contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Ends the process (exit code 5, one line) where the block takes longer than `seconds`.

    For what cannot be polled, as a library's teardown: a thread watches, and the launcher ends the
    other ranks.
    """

    def give_up() -> None:
        text = f"{what}: not over after {seconds:.0f} s (--deadline_s)"
        if not guard.waited(text):
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
    """Waits until a test is true.

    spin: keep the core (ranks have cores of their own); otherwise nap between polls: five ranks
    that spin on two cores stretch a 12.5 ms round to 18.7 ms, ranks that nap keep it at 12.9.
    """

    def __init__(self, deadline_s: float, spin: bool, spin_s: float = _SPIN_S) -> None:
        """spin_s: without `spin`, how long a wait holds the core before it naps."""
        self.deadline_s = deadline_s
        self.spin = spin
        self.spin_s = spin_s
        self.alarm: Callable[[], None] | None = None  # in a long wait: raises where it is in vain

    def until(self, test: Callable[[], bool], what: str) -> None:
        """Returns once test() is true; Overdue naming `what` after deadline_s."""
        if test():
            return
        start = last = time.perf_counter()
        is_long, alarm_s = False, _ALARM_S
        asleep = 0.0  # this process, by a debugger or by who shares the machine: no fault
        while True:
            for _ in range(_POLLS_BETWEEN_CLOCK_READS if self.spin else 4):
                if test():
                    if is_long:
                        OWN.bytes[WAITING] = 0
                    return
            now = time.perf_counter()
            if now - last > _ASLEEP_S:
                asleep += now - last
            last, waited = now, now - start
            if waited > _LONG_S:
                is_long = True
                OWN.bytes[WAITING] = 1
                if self.alarm is not None and waited > alarm_s:
                    alarm_s = waited + _ALARM_S
                    self.alarm()
                if waited - asleep > self.deadline_s:
                    raise Overdue(f"{what}: nothing for {waited:.1f} s (--deadline_s)")
            if self.spin:
                time.sleep(0)  # yields: another process may need this core more
            elif waited > self.spin_s:
                time.sleep(_NAP_S if waited < _LONG_S else _LONG_NAP_S)

    def sleep_until(self, end: float) -> None:
        """Returns at perf_counter() == end, without holding the core longer than needed."""
        while (left := end - time.perf_counter()) > 0:
            if left > _NAP_S:
                time.sleep(left - _NAP_S / 2 if left > 1e-3 else left / 2)
