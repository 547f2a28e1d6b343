"""T target ranks as threads of one process, with a group that adds up by hand."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from mpissd.engine.comm.group import Group

Found = TypeVar("Found")


class ThreadGroup(Group):
    """T threads that add up by hand: all put their array down, and each takes the sum."""

    name = "threads"

    def __init__(self, size: int, rank: int, table: list[Any], barrier: threading.Barrier) -> None:
        super().__init__(size, rank)
        self._table, self._barrier = table, barrier
        self.num_reduces = 0

    def everyone(self, array: Any) -> list[Any]:
        self._table[self.rank] = array.copy()
        self._barrier.wait(60)
        every = list(self._table)
        self._barrier.wait(60)
        return every

    def all_reduce(self, array: Any) -> None:
        self.num_reduces += 1
        array[...] = sum(self.everyone(array))

    def all_gather(self, local: Any, gathered: Any) -> None:
        gathered[...] = np.concatenate(self.everyone(local)).reshape(gathered.shape)

    def abort(self) -> None:
        self._barrier.abort()


def on_ranks(tp: int, play: Callable[[ThreadGroup], Found], within_s: float = 120) -> list[Found]:
    """Returns `play`'s result of each of T ranks; raises the first exception."""
    barrier, table = threading.Barrier(tp), [None] * tp
    groups = [ThreadGroup(tp, rank, table, barrier) for rank in range(tp)]

    def run(group: ThreadGroup) -> Found:
        try:
            return play(group)
        except Exception:
            group.abort()  # no rank waits for this one
            raise

    with ThreadPoolExecutor(tp) as pool:
        futures = [pool.submit(run, group) for group in groups]
        failed = [future.exception(within_s) for future in futures]
        failed.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if failed[0] is not None:
            raise failed[0]
        return [future.result() for future in futures]
