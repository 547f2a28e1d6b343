"""All-reduces by one kernel, on memory that the GPUs of one host share by CUDA IPC.

Each rank has an inbox into which all others write (kernels/inbox.cu). One store carries a word and
the number of its exchange, so that data cross NVLink once and no handshake is needed. Sums are made
in float32 in rank order, so that all ranks get the same bits. A chain of products (cupy_chain)
exchanges within its own kernel; all other arrays go through the kernel `exchange`.

If a rank never comes, the kernels give up at the waiter's deadline, or when `abort` sets the
backend's stop word. The sums are then NaN, and the program that waits for them raises FaultError.

Close in this order: destroy the graphs, let enqueued work end, unmap the others' inboxes, wait
until every rank has done so, free the inbox. If a rank is missing, the inbox stays until the
process ends.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.wait import Waiter
from mpissd.engine.backend import kernels
from mpissd.engine.comm.group import Group

MAX_RANKS = 8
BLOCKS, THREADS = 64, 256  # launch sizes of the kernel `exchange`
CAPACITY = 1 << 19  # words of two float16 in an exchange, 2 MiB; larger arrays take several
TOLERANCE = 2e-3  # largest relative error of the trial sums
PEERS = np.dtype(  # struct Peers
    [
        ("inbox", np.uint64, MAX_RANKS),
        ("done", np.uint64),
        ("rank", np.int32),
        ("size", np.int32),
        ("capacity", np.int64),
    ]
)
_SUM, _GATHER = 0, 1
_CLOSE_S, _TRIAL_S = 1.0, 20.0
_TRIAL_SIZES = 2, 510, 8192, 2 * CAPACITY + 4  # float16: less than a block … two exchanges
_TRIALS = 3  # sums of each size: one in either slot of the inbox, and the first slot again


class OneshotGroup(Group):
    """The group of up to 8 GPUs of one host; graphs may capture its operations."""

    name = "oneshot"
    done_counts = BLOCKS

    def __init__(self, device: Any, comm: MPI.Comm, waiter: Waiter) -> None:
        """Maps the others' memory and tries sums. Collective.

        Raises ConfigError on every rank where memory cannot be mapped or a sum is wrong.
        """
        super().__init__(comm.size, comm.rank)
        self._device, self._comm, self._waiter = device, comm, waiter
        self.capacity = CAPACITY
        self._inbox_bytes = 2 * comm.size * CAPACITY * 8
        self._limit = np.uint64(int(waiter.deadline_s * 1e9))
        self._own = 0
        self._mapped: list[int] = []
        self._peers: Any = None
        try:
            self._agree(self._open(), "mapping each other's memory")
            self._agree(self._trial(), "sums at start-up")
        except ConfigError:
            self.close()
            raise
        device.limit_waits(waiter.deadline_s)

    @property
    def everybody(self) -> int:
        """The device address of the kernels' struct Peers."""
        return int(self._peers.data.ptr)

    def all_reduce(self, array: Any) -> None:
        assert array.flags.c_contiguous and array.itemsize == 2, f"{array.dtype} {array.strides}"
        if array.ndim == 2 and self._device.sum_last(array, self):
            return
        self._device.flush()
        assert array.size % 2 == 0, f"{array.shape}: an odd number of float16"
        at = array.data.ptr
        for first in range(0, array.size // 2, self.capacity):
            words = min(self.capacity, array.size // 2 - first)
            self._exchange(at + 4 * first, at + 4 * first, words, _SUM)

    def all_gather(self, local: Any, gathered: Any) -> None:
        assert local.itemsize == 4 and gathered.size == self.size * local.size
        assert local.size <= self.capacity, f"{local.size} words, at most {self.capacity}"
        self._device.flush()
        self._exchange(local.data.ptr, gathered.data.ptr, local.size, _GATHER)

    def abort(self) -> None:
        """Ends the waits in this rank's kernels, also in kernels that start later."""
        self._device.stop[0] = 1

    def close(self) -> None:
        """Unmaps and frees the inboxes; waits some seconds for a missing rank at most.

        An inbox that another rank may still write to is not freed. The backend can open another
        group afterwards, also after an abort.
        """
        if not self._own:
            return
        self._device.destroy_graphs()
        over = self._device.fence()
        try:
            Waiter(_CLOSE_S, spin=False).until(over, "exchanges to end")
        except FaultError:
            self.abort()
            Waiter(_CLOSE_S, spin=False).until(over, "exchanges to give up")
        from cupy.cuda import runtime

        for inbox in self._mapped:
            runtime.ipcCloseMemHandle(inbox)
        self._mapped.clear()
        own, self._own, self._peers = self._own, 0, None
        with suppress(FaultError):  # a missing rank may still write to the inbox
            everybody = self._comm.Ibarrier()
            Waiter(_CLOSE_S, spin=False).until(everybody.Test, "all ranks to unmap the inboxes")
            runtime.free(own)
        self._device.stop[0] = 0

    def _exchange(self, source: int, to: int, words: int, mode: int) -> None:
        stop = self._device.stop.ctypes.data
        pointers = self._peers, np.uintp(source), np.uintp(to)
        args = (*pointers, np.int64(words), np.int32(mode), np.uintp(stop), self._limit)
        with self._device.stream:
            self._kernel((BLOCKS,), (THREADS,), args)

    def _open(self) -> str | None:
        """Makes this rank's inbox and maps the others'; returns why it failed. Collective."""
        reason, handle = None, None
        size = self._inbox_bytes + 4 * BLOCKS  # with the counters of exchanges
        try:
            import cupy
            from cupy.cuda import runtime

            module = cupy.RawModule(code=kernels.source(kernels.EXCHANGE), options=("--std=c++14",))
            self._kernel = module.get_function("exchange")
            self._own = int(runtime.malloc(size))
            runtime.memset(self._own, 0, size)
            runtime.deviceSynchronize()
            handle = bytes(runtime.ipcGetMemHandle(self._own))
        except (ImportError, RuntimeError) as error:  # CUDA's errors are RuntimeErrors
            reason = str(error)
        handles = self._comm.allgather(handle)
        if reason is not None or None in handles:
            return reason  # It is None if only another rank failed.
        peers, inboxes = np.zeros(1, PEERS), np.zeros(MAX_RANKS, np.uint64)
        try:
            for rank in range(self.size):
                inboxes[rank] = self._own
                if rank != self.rank:
                    inboxes[rank] = runtime.ipcOpenMemHandle(handles[rank])
                    self._mapped.append(int(inboxes[rank]))
            peers["inbox"], peers["done"] = inboxes, self._own + self._inbox_bytes
            peers["rank"], peers["size"], peers["capacity"] = self.rank, self.size, self.capacity
            self._peers = cupy.asarray(peers.view(np.uint8))
            runtime.deviceSynchronize()
        except RuntimeError as error:
            return str(error)
        return None

    def _trial(self) -> str | None:
        """Compares sums of random numbers with MPI's; returns the error, or None."""
        limit, self._limit = self._limit, np.uint64(int(_TRIAL_S * 1e9))
        worst = 0.0
        for size in _TRIAL_SIZES:
            array = self._device.activation(1, size)
            for trial in range(_TRIALS):
                rng = np.random.default_rng((size, trial, self.rank))
                values = rng.standard_normal((1, size)).astype(np.float16).astype(np.float32)
                self._device.from_host(values, array)
                self.all_reduce(array)
                request = self._comm.Iallreduce(MPI.IN_PLACE, values)
                self._waiter.until(request.Test, "sums of the host")
                summed = self._device.to_host(array)
                error = np.linalg.norm(summed - values) / np.linalg.norm(values)
                worst = max(worst, float(error)) if np.isfinite(error) else np.inf
        self._limit = limit
        return f"relative error {worst:.1e}" if worst > TOLERANCE else None

    def _agree(self, reason: str | None, what: str) -> None:
        """Raises ConfigError on every rank if any rank has a reason. Collective."""
        for rank, why in enumerate(self._comm.allgather(reason)):
            if why is not None:
                raise ConfigError(
                    f"all-reduce 'oneshot': {what} failed on rank {rank} ({why[:256]}); "
                    "allowed: nccl, staged, auto"
                )
