"""OneshotGroup without MPI: inboxes and kernels of ranks in one process, emulated or on a GPU."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from mpissd.engine.backend import kernels
from mpissd.engine.comm.group import Group
from mpissd.engine.model.transformer.cupy_ops.draws import address

PEERS = np.dtype([("inbox", "u8", 8), ("done", "u8"), ("rank", "i4"), ("size", "i4"),
                  ("capacity", "i8")])  # fmt: skip


class Inboxes(Group):
    """One rank's inbox. blocks, threads: the grid of the kernel `exchange`."""

    name, capacity, limit_ns = "oneshot", 1 << 17, np.uint64(10**15)
    in_kernels = True

    def __init__(
        self, backend: Any, size: int, rank: int, *, blocks: int = 64, threads: int = 256
    ) -> None:
        super().__init__(size, rank)
        self._launcher, self._stop = backend.launcher(early=False), backend.stop
        self._grid, self._threads, self.done_counts = (blocks,), (threads,), blocks
        self._memory = self._launcher.zeros((4 * size * self.capacity,), np.uint32)
        self._done = self._launcher.zeros((blocks,), np.uint32)
        self.inbox = int(address(self._memory))

    def connect(self, inboxes: Iterable[int]) -> None:
        """Takes the addresses of all ranks' inboxes."""
        peers = np.zeros(1, PEERS)
        every = [*inboxes]
        peers["inbox"][0, : len(every)] = every
        peers["done"], peers["capacity"] = address(self._done), self.capacity
        peers["rank"], peers["size"] = self.rank, self.size
        self._peers = self._launcher.uploaded(peers.view(np.uint32), np.uint32)
        self.everybody = int(address(self._peers))

    def all_reduce(self, array: Any) -> None:
        self._exchange(array, array, 0)

    def all_gather(self, local: Any, gathered: Any) -> None:
        self._exchange(local, gathered, 1)

    def _exchange(self, source: Any, to: Any, mode: int) -> None:
        ends = np.uintp(self.everybody), source, to, np.int64(source.nbytes // 4), np.int32(mode)
        args = *ends, np.uintp(self._stop.ctypes.data), self.limit_ns
        self._launcher.launch("exchange", kernels.EXCHANGE, self._grid, self._threads, args)
