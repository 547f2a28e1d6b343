"""Ranks with emulated GPUs that map each other's memory: threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from mpissd.engine.backend import kernels
from mpissd.engine.comm.device_oneshot import MAX_RANKS, PEERS
from mpissd.engine.comm.group import Group
from tests.emulator.launcher import EmulatedGpu, aligned
from tests.thread_group import ThreadGroup, on_ranks

CAPACITY, BLOCKS, THREADS = 1 << 14, 2, 32
Found = TypeVar("Found")


class EmulatedOneshot(Group):
    """The group of device_oneshot, whose kernels are emulated."""

    name, done_counts, capacity, limit_ns = "oneshot", BLOCKS, CAPACITY, 10**15

    def __init__(self, gpu: EmulatedGpu, threads: ThreadGroup, inboxes: list[Any]) -> None:
        super().__init__(threads.size, threads.rank)
        self._gpu, self._threads, self._inboxes = gpu, threads, inboxes
        self.done = gpu.launcher(early=False).zeros((BLOCKS,), np.uint32)
        self._peers = aligned((1,), PEERS)
        self._peers["inbox"] = 0
        self._peers["inbox"][0, : self.size] = [inbox.ctypes.data for inbox in inboxes]
        self._peers["done"], self._peers["capacity"] = self.done.ctypes.data, CAPACITY
        self._peers["rank"], self._peers["size"] = self.rank, self.size
        assert len(inboxes) <= MAX_RANKS

    @property
    def everybody(self) -> int:
        """The address of struct Peers."""
        return int(self._peers.ctypes.data)

    def everyone(self, own: Any) -> list[Any]:
        """What all ranks bring."""
        return self._threads.everyone(own)

    def all_reduce(self, array: Any) -> None:
        self._exchange(array, array, array.size // 2, 0)

    def all_gather(self, local: Any, gathered: Any) -> None:
        self._exchange(local, gathered, local.size, 1)

    def _exchange(self, source: Any, to: Any, words: int, mode: int) -> None:
        launcher, stop = self._gpu.launcher(early=False), np.uintp(self._gpu.stop.ctypes.data)
        sizes = np.int64(words), np.int32(mode)
        args = (self._peers, source, to, *sizes, stop, np.uint64(self.limit_ns))
        kernel = launcher.function("exchange", kernels.EXCHANGE)
        launcher.launch(kernel, (BLOCKS,), (THREADS,), args)


def on_gpus(
    tp: int, folder: Path, play: Callable[[EmulatedGpu, Group], Found], within_s: float = 300
) -> list[Found]:
    """What `play` returns on each of T emulated GPUs; raises what it raised first."""
    gpus = [EmulatedGpu(folder / str(rank)) for rank in range(tp)]
    words = 2 * tp * CAPACITY
    inboxes = [gpu.launcher(early=False).zeros((words,), np.uint64) for gpu in gpus]

    def run(group: ThreadGroup) -> Found:
        try:
            gpu = gpus[group.rank]
            return play(gpu, EmulatedOneshot(gpu, group, inboxes))
        except BaseException:
            for gpu in gpus:
                gpu.stop[0] = 1  # no kernel waits for this rank
            raise

    return on_ranks(tp, run, within_s)
