"""The collectives of T target ranks: of host arrays by MPI, and of device arrays by CUDA kernels or
NCCL within a CUDA graph, or through host memory by MPI.

    --all_reduce   its implementation
    auto           oneshot if it can be opened and its test sums are right; else nccl if CuPy has
                   NCCL and no two ranks share a GPU; else staged
    oneshot        kernels that write to each other's memory, for the GPUs of one host
    nccl           NCCL; a ConfigError where it is not available
    staged         copies to page-locked host memory, sums by MPI in float32, copies back; works
                   with any MPI, but not in CUDA graphs

CUDA graphs that captured NCCL operations are destroyed before the communicator; the other order
hangs. If the device still waits for another rank, NCCL is aborted, and this rank then has to leave
by MPI.Abort. Device memory is freed last, because freeing it waits for the device. MPI never gets a
device pointer: a library that cannot read device memory crashes on it.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.wait import Waiter
from mpissd.engine.backend import kernels
from mpissd.engine.backend.base import Backend
from mpissd.engine.comm.group import Group, SoloGroup

_CLOSE_S = 1.0  # the longest time that `close` waits for enqueued GPU work, in seconds
MAX_RANKS = 8
BLOCKS = 64  # thread blocks in a launch of the kernel `exchange`
THREADS = 256  # threads of each block
CAPACITY = 1 << 19  # the most words (two float16 each) of one exchange; 2 MiB
TOLERANCE = 2e-3  # the largest relative error that the test sums at start-up may have
PEERS = np.dtype(  # the layout of struct Peers in kernels/inbox.cu
    [
        ("inbox", np.uint64, MAX_RANKS),
        ("done", np.uint64),
        ("rank", np.int32),
        ("size", np.int32),
        ("capacity", np.int64),
    ]
)
_SUM = 0  # mode of the kernel `exchange`: sums arrays
_GATHER = 1
_TRIAL_S = 20.0
# Numbers of float16 in the test sums: from less than a thread block to more than one exchange.
_TRIAL_SIZES = 2, 510, 8192, 2 * CAPACITY + 4
_TRIALS = 3  # test sums of each size; they use the inbox's two slots in turn


class GpuPlace(NamedTuple):
    """Where a rank runs: its host, the PCI bus id of its GPU, and whether its CuPy has NCCL."""

    host: str
    bus_id: str
    nccl: bool


def choose(choice: str, places: Sequence[GpuPlace], *, oneshot: bool = True) -> str:
    """Resolves the flag --all_reduce to "oneshot", "nccl" or "staged", the same on every rank.
    choice: the flag's value. places: the host and GPU of every rank. oneshot: whether "auto" may
    become "oneshot". Raises ConfigError for a choice that these ranks cannot use."""
    first: dict[tuple[str, str], int] = {}
    shared = no_nccl = ""  # reasons against NCCL, "" if none: a shared GPU; a CuPy without NCCL
    for rank, place in enumerate(places):
        other = first.setdefault((place.host, place.bus_id), rank)
        if other != rank and not shared:
            shared = f"ranks {other} and {rank} share GPU {place.bus_id} of {place.host}"
        if not place.nccl and not no_nccl:
            no_nccl = f"CuPy has no NCCL on rank {rank}"
    hosts = {place.host for place in places}
    not_oneshot = shared
    if len(places) > MAX_RANKS:
        not_oneshot = f"{len(places)} ranks, at most {MAX_RANKS}"
    if len(hosts) > 1:
        not_oneshot = f"ranks on {len(hosts)} hosts"
    reasons = {"oneshot": not_oneshot, "nccl": shared or no_nccl, "staged": ""}
    if choice == "auto":
        best = ("oneshot", "nccl", "staged")[not oneshot :]
        return next(name for name in best if not reasons[name])
    if reasons[choice]:
        allowed = [other for other, reason in reasons.items() if not reason]
        raise ConfigError(
            f"all-reduce {choice!r}: {reasons[choice]}; allowed: {', '.join([*allowed, 'auto'])}"
        )
    return choice


def open_group(backend: Backend, comm: MPI.Comm, choice: str, waiter: Waiter) -> Group:
    """Opens the collectives of the target ranks of `comm`. Collective. choice: the value of
    --all_reduce. Raises ConfigError if the backend, the devices or the MPI library cannot do it."""
    if backend.name != "cupy" and choice != "auto":
        raise ConfigError(f"all_reduce={choice} with backend={backend.name}: allowed: auto")
    if backend.name == "emulated":
        return SoloGroup(comm.size, comm.rank)
    if comm.size == 1:
        return SoloGroup()
    if backend.name == "numpy":
        return MpiGroup(comm, waiter)
    return open_device_group(backend, comm, choice, waiter)


def open_device_group(backend: Backend, comm: MPI.Comm, choice: str, waiter: Waiter) -> Group:
    """Opens the collectives of target ranks that have a GPU each, as open_group does."""
    device: Any = backend
    info = backend.info
    has_nccl = False
    if info.kind == "gpu":
        with suppress(ImportError):
            from cupy.cuda import nccl

            has_nccl = bool(nccl.available)
    places = comm.allgather(GpuPlace(MPI.Get_processor_name(), info.bus_id or "?", has_nccl))
    name = choose(choice, places, oneshot=info.kind == "gpu")
    why = ""
    if name == "oneshot":
        try:
            return OneshotGroup(device, comm, waiter)
        except ConfigError as error:  # every rank raises it
            if choice == "oneshot":
                raise
            why = str(error).rpartition("; allowed")[0]
            name = choose(choice, places, oneshot=False)
    group = (NcclGroup if name == "nccl" else StagedGroup)(device, comm, waiter)
    group.not_oneshot = why
    return group


class MpiGroup(Group):
    """Collectives of host arrays by nonblocking MPI; waits have a deadline and can sleep."""

    name = "mpi"
    capturable = False
    spent_s: float = 0.0

    def __init__(self, comm: MPI.Comm, waiter: Waiter) -> None:
        super().__init__(comm.size, comm.rank)
        self._comm = comm
        self._waiter = waiter

    def all_reduce(self, array: Any) -> None:
        start = perf_counter()
        request = self._comm.Iallreduce(MPI.IN_PLACE, array, op=MPI.SUM)
        self._waiter.until(request.Test, "all-reduce")
        self.spent_s += perf_counter() - start

    def all_gather(self, local: Any, gathered: Any) -> None:
        start = perf_counter()
        request = self._comm.Iallgather(np.ascontiguousarray(local), gathered)
        self._waiter.until(request.Test, "all-gather")
        self.spent_s += perf_counter() - start


class NcclGroup(Group):
    """Collectives by NCCL on the backend's CUDA stream; CUDA graphs may capture them."""

    name = "nccl"

    def __init__(self, device: Any, comm: MPI.Comm, waiter: Waiter) -> None:
        import cupy
        from cupy.cuda import nccl

        super().__init__(comm.size, comm.rank)
        self._device = device
        self._stream = device.stream.ptr
        self._half = nccl.NCCL_FLOAT16
        self._word = nccl.NCCL_INT32
        self._sum = nccl.NCCL_SUM
        self._error = nccl.NcclError
        identity = comm.bcast(nccl.get_unique_id() if comm.rank == 0 else None)
        self._nccl: Any = nccl.NcclCommunicator(comm.size, identity, comm.rank)
        # NCCL connects at the first operations, which a graph must not capture.
        with device.stream:
            halves = cupy.zeros((1, 1024), np.float16)
            words = cupy.zeros(256, np.int32)
            gathered = cupy.zeros(256 * self.size, np.int32)
        self.all_reduce(halves)
        self.all_gather(words, gathered)
        is_over = device.fence()

        def connected() -> bool:
            self.check()
            return bool(is_over())

        waiter.until(connected, "NCCL's first all-reduce")

    def all_reduce(self, array: Any) -> None:
        assert array.flags.c_contiguous and array.itemsize == 2, f"{array.dtype} {array.strides}"
        self._device.flush()
        at = array.data.ptr
        self._nccl.allReduce(at, at, array.size, self._half, self._sum, self._stream)

    def all_gather(self, local: Any, gathered: Any) -> None:
        assert local.itemsize == 4 and gathered.size == self.size * local.size
        self._device.flush()
        self._nccl.allGather(
            local.data.ptr, gathered.data.ptr, local.size, self._word, self._stream
        )

    def check(self) -> None:
        if self._nccl is None:
            return
        try:
            self._nccl.check_async_error()
        except self._error as error:
            raise FaultError(f"NCCL on rank {self.rank}: {error}") from error

    def abort(self) -> None:
        """Aborts the communicator, and with it NCCL's kernels that wait for a dead rank."""
        if self._nccl is not None:
            self._nccl.abort()
            self._nccl = None

    def close(self) -> None:
        """Destroys the device's CUDA graphs, then the communicator; aborts the communicator if
        other ranks have not finished after 1 s."""
        if self._nccl is None:
            return
        self._device.destroy_graphs()
        try:
            Waiter(_CLOSE_S, spin=False).until(self._device.fence(), "NCCL to end")
        except FaultError:
            self.abort()
            return
        self._nccl.destroy()
        self._nccl = None


class OneshotGroup(Group):
    """Collectives of up to 8 GPUs of one host, which map each other's memory by CUDA IPC. CUDA
    graphs may capture them.

    Each rank has an inbox in its GPU memory, into which all others write (kernels/inbox.cu). One
    store carries a data word and the number of its exchange, so that data cross NVLink once and no
    handshake is needed. Sums are made in float32 in rank order, so that all ranks get the same
    bits. The kernel `exchange` sums one array; the persistent kernels sum their own results.
    They do so only if all ranks have the same kind of GPU, and therefore equal kernels.

    If a rank never arrives, the kernels stop waiting at the waiter's deadline, or when `abort` sets
    the backend's stop word. The sums are then NaN, and the wait for the forward raises FaultError.
    """

    name = "oneshot"
    done_counts = BLOCKS

    def __init__(self, device: Any, comm: MPI.Comm, waiter: Waiter) -> None:
        """Maps the other ranks' inboxes and compares some sums with MPI's. Collective. Raises
        ConfigError on every rank if a rank cannot map an inbox, or if a sum is wrong."""
        super().__init__(comm.size, comm.rank)
        self._device = device
        self._comm = comm
        self._waiter = waiter
        self.capacity = CAPACITY
        self._inbox_bytes = 2 * comm.size * CAPACITY * 8
        self.limit_ns = np.uint64(int(waiter.deadline_s * 1e9))
        mps = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        self.in_kernels = len({*comm.allgather((device.info.name, mps))}) == 1
        self._inbox = 0  # the device address of this rank's inbox; 0 while there is none
        self._mapped: list[int] = []
        self._peers: Any = None
        try:
            self._agree(self._map(), "mapping each other's memory")
            self._agree(self._trial(), "sums at start-up")
        except ConfigError:
            self.close()
            raise
        device.limit_waits(waiter.deadline_s)

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
        """Makes all present and later kernels of this rank stop waiting for other ranks."""
        self._device.stop[0] = 1

    def close(self) -> None:
        """Unmaps the other ranks' inboxes and frees this rank's; waits for a missing rank at most 3
        s. The backend can open other collectives afterwards, also after an abort."""
        if not self._inbox:
            return
        self._device.destroy_graphs()
        is_over = self._device.fence()
        waiter = Waiter(_CLOSE_S, spin=False)
        try:
            waiter.until(is_over, "exchanges to end")
        except FaultError:
            self.abort()
            waiter.until(is_over, "exchanges to give up")
        from cupy.cuda import runtime

        for mapped in self._mapped:
            runtime.ipcCloseMemHandle(mapped)
        self._mapped.clear()
        inbox = self._inbox
        self._inbox = 0
        self._peers = None
        with suppress(FaultError):  # A missing rank may still write to this memory.
            waiter.until(self._comm.Ibarrier().Test, "all ranks to unmap the inboxes")
            runtime.free(inbox)
        self._device.stop[0] = 0

    def _exchange(self, source: int, to: int, words: int, mode: int) -> None:
        stop = self._device.stop.ctypes.data
        pointers = self._peers, np.uintp(source), np.uintp(to)
        args = (*pointers, np.int64(words), np.int32(mode), np.uintp(stop), self.limit_ns)
        with self._device.stream:
            self._kernel((BLOCKS,), (THREADS,), args)

    def _map(self) -> str | None:
        """Allocates this rank's inbox and maps the other ranks'. Collective. Returns None, or the
        reason why it failed here."""
        reason = handle = None
        size = self._inbox_bytes + 4 * BLOCKS  # each block has a counter after the inbox
        try:
            import cupy
            from cupy.cuda import runtime

            module = cupy.RawModule(code=kernels.source(kernels.EXCHANGE), options=("--std=c++14",))
            self._kernel = module.get_function("exchange")
            self._inbox = int(runtime.malloc(size))
            runtime.memset(self._inbox, 0, size)
            runtime.deviceSynchronize()
            handle = bytes(runtime.ipcGetMemHandle(self._inbox))
        except (ImportError, RuntimeError) as error:  # CUDA's errors are RuntimeErrors
            reason = str(error)
        handles = self._comm.allgather(handle)
        if reason is not None or None in handles:
            return reason  # The reason is None if only another rank failed.
        peers = np.zeros(1, PEERS)
        inboxes = np.zeros(MAX_RANKS, np.uint64)
        try:
            for rank in range(self.size):
                inboxes[rank] = self._inbox
                if rank != self.rank:
                    inboxes[rank] = runtime.ipcOpenMemHandle(handles[rank])
                    self._mapped.append(int(inboxes[rank]))
            done = self._inbox + self._inbox_bytes
            peers[0] = (inboxes, done, self.rank, self.size, self.capacity)
            self._peers = cupy.asarray(peers.view(np.uint8))
            self.everybody = int(self._peers.data.ptr)  # the address of struct Peers
            runtime.deviceSynchronize()
        except RuntimeError as error:
            return str(error)
        return None

    def _trial(self) -> str | None:
        """Tests all_reduce: compares its sums of random numbers with MPI's sums. Collective.
        Returns None if they agree, or the relative error as text if it exceeds TOLERANCE."""
        limit = self.limit_ns
        self.limit_ns = np.uint64(int(_TRIAL_S * 1e9))
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
        self.limit_ns = limit
        return f"relative error {worst:.1e}" if worst > TOLERANCE else None

    def _agree(self, reason: str | None, what: str) -> None:
        """Raises ConfigError on all ranks if one passes a reason why `what` failed. Collective."""
        for rank, why in enumerate(self._comm.allgather(reason)):
            if why is not None:
                raise ConfigError(
                    f"all-reduce 'oneshot': {what} failed on rank {rank} ({why[:256]}); "
                    "allowed: nccl, staged, auto"
                )


class StagedGroup(Group):
    """Collectives of device arrays through host memory by MPI. Sums are made in float32 and rounded
    once. Each call waits for the stream and then calls MPI, so CUDA graphs cannot capture it."""

    name = "staged"
    capturable = False

    def __init__(self, device: Any, comm: MPI.Comm, waiter: Waiter) -> None:
        super().__init__(comm.size, comm.rank)
        self._device = device
        self._comm = comm
        self._waiter = waiter
        self._memory: dict[Any, Any] = {}  # staging buffers, kept for reuse, by size or shape

    def _settle(self) -> None:  # Waits for the stream, which MPI does not do.
        self._waiter.until(self._device.fence(), "forward, up to an all-reduce")

    def all_reduce(self, array: Any) -> None:
        halves = self._host((array.size + 1) // 2).view(np.float16)[: array.size]
        self._device.copy_out(array, halves)
        self._settle()
        total = halves.astype(np.float32)
        request = self._comm.Iallreduce(MPI.IN_PLACE, total, op=MPI.SUM)
        self._waiter.until(request.Test, "staged all-reduce")
        halves[...] = total
        self._device.copy_in(halves, array)

    def all_gather(self, local: Any, gathered: Any) -> None:
        staged = self._host(gathered.size)
        self._device.copy_out(local, staged[self.rank * local.size :][: local.size])
        self._settle()
        request = self._comm.Iallgather(MPI.IN_PLACE, staged)
        self._waiter.until(request.Test, "staged all-gather")
        self._device.copy_in(staged, gathered)

    def _host(self, count: int) -> Any:
        """Returns a kept buffer of `count` int32 in page-locked host memory."""
        if count not in self._memory:
            self._memory[count] = self._device.host_ints(count)
        return self._memory[count]
