"""Work that pauses at each of its forwards, so that one loop can serve several groups with it.

A generator yields whenever it has launched a forward, and is resumed when that forward is over. Who
drives it decides what happens in between: forwards of several groups may run as one (model.shared),
or one after the other (`finish`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TypeVar

R = TypeVar("R")
Steps = Generator[None, None, R]


def finish(steps: Steps[R], wait: Callable[[], None]) -> R:
    """Runs all forwards of `steps`, each awaited by `wait`; returns their result."""
    while True:
        try:
            next(steps)
        except StopIteration as over:
            result: R = over.value
            return result
        wait()
