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
    paused = PausedForwards(lambda rows, lists: 0.01 * rows * (1 + lists), buffer, sleep=sleep)
    for rows, lists in ((3, False), (1, True)):
        paused.upload(rows, TOKENS[:rows], lists=lists)
        start = time.perf_counter()
        paused.launch()
        paused.wait(Waiter(60.0, spin=False))
        lasts = 0.01 * rows * (1 + lists)
        assert time.perf_counter() - start >= lasts
        assert paused.done() and paused.elapsed_s() == lasts
    assert buffer.tolist() == [7, 8, 9, 0]  # the real upload
    paused.close()


def test_a_poll_never_blocks() -> None:
    paused = PausedForwards(lambda rows, lists: 3600.0, np.zeros(3, np.int32), sleep=False)
    paused.upload(3, TOKENS)
    paused.launch()
    assert not paused.done()
    with pytest.raises(FaultError, match="pause"):
        paused.wait(Waiter(0.1, spin=False))
