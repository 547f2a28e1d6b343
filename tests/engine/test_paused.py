"""Forwards that only last: what calibration runs the loops over."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpissd.common.errors import FaultError
from mpissd.common.wait import Waiter
from mpissd.engine.model.paused import PausedForwards

TOKENS = np.array([7, 8, 9], np.int32)


@pytest.mark.parametrize("sleep", [True, False])
def test_a_forward_lasts_as_it_is_told(sleep: bool) -> None:
    buffer = np.zeros(4, np.int32)
    paused = PausedForwards(lambda rows: 0.01 * rows, buffer, sleep=sleep)
    for rows in (3, 1):
        paused.upload(rows, TOKENS[:rows])
        start = time.perf_counter()
        paused.launch()
        paused.wait(Waiter(60.0, spin=False))
        assert time.perf_counter() - start >= 0.01 * rows
        assert paused.done() and paused.elapsed_s() == 0.01 * rows
    assert buffer.tolist() == [7, 8, 9, 0]  # the real upload
    paused.close()


def test_a_poll_never_blocks() -> None:
    paused = PausedForwards(lambda rows: 3600.0, np.zeros(3, np.int32), sleep=False)
    paused.upload(3, TOKENS)
    paused.launch()
    assert not paused.done()
    with pytest.raises(FaultError, match="pause"):
        paused.wait(Waiter(0.1, spin=False))
