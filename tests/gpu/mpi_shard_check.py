"""Does a model on T ranks give one rank's results? Every all-reduce, forward after forward.

    mpirun -np 2 python -m mpi4py tests/gpu/mpi_shard_check.py --backend=cupy     one rank a GPU
    mpirun -np 2 python -m mpi4py tests/gpu/mpi_shard_check.py --backend=host     no GPU at all

With more ranks than GPUs the ranks share: oneshot and NCCL must then be refused in one line, and
`auto` must fall back to staged. On one rank, both reduce over a group of one. `host` is a
device whose memory is the host's; `numpy` checks the group for host arrays. The models `five` and
`three` are transformers with as many KV heads, which two ranks split unevenly. The last lines are
a table; exit code 1 if a row failed.
"""

import argparse
import sys
import time
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.errors import ConfigError, FaultError
from mpissd.common.presets import ModelShape, resolve_model
from mpissd.common.wait import Waiter
from mpissd.engine.backend.base import Backend
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.group import Group, SoloGroup
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.model.shard import ForwardOptions, Shard
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.model.transformer.cupy_ops.megakernel import MegakernelOps
from tests.gpu.agreement import HostDevice, relative_error, tolerance
from tests.gpu.transformer_rig import UNEVEN, Rig, check_lanes, check_rows_alone, prompt, uneven

COMM = MPI.COMM_WORLD
WAITER = Waiter(60.0, spin=False)
TOP_K, LAUNCHES = 2, 3
ONE_A_GPU = ("oneshot", "nccl")
BOUND = {"numpy": 2e-2, "cupy": 8e-3}  # of transformers, with bfloat16 or float16 weights


Row = tuple[bool, str, str, str]  # whether it passed, the choice, what was checked, a note


def main() -> int:
    """Runs every choice on every model; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=("cupy", "numpy", "host"), default="cupy")
    parser.add_argument("--all_reduce", default="oneshot,nccl,staged,auto")
    parser.add_argument("--models", default="toy-target,1b@2L")
    parser.add_argument("--tokens", type=int, default=140, help="of a transformer's prompt")
    args = parser.parse_args()
    backend, shared = open_backend(args.backend)
    rows: list[Row] = []
    for choice in args.all_reduce.split(","):
        try:
            group = open_choice(backend, choice)
        except ConfigError as error:  # right only if two ranks on one GPU would have met
            sound = choice in ONE_A_GPU and shared and "share GPU" in str(error)
            rows.append((sound, choice, "refused", str(error)))
            continue
        sound = not (shared and group.name in ONE_A_GPU)
        rows.append((sound, choice, f"opens {group.name}", "ranks share a GPU" * shared))
        for name in args.models.split(","):
            if name in UNEVEN:
                rows.append(check_transformer(backend, group, choice, name, args.tokens))
                continue
            for fuse in (False, True):
                rows.append(check(backend, group, choice, resolve_model(name), fuse))
        backend.synchronize()
        if group.name in ONE_A_GPU and COMM.size > 1:
            rows.append(check_abort(backend, group, choice))
        group.close()
    backend.close()
    passed = COMM.allreduce(int(all(row[0] for row in rows)), MPI.MIN)
    if COMM.rank == 0:
        print(f"{COMM.size} rank(s), {backend.name} on {backend.info.name}")
        for good, choice, what, note in rows:
            print(f"{'pass' if good else 'FAIL'}  {choice:8s} {what:26s} {note}")
        print("passed" if passed else "FAILED", flush=True)
    return 1 - passed


def open_backend(name: str) -> tuple[Backend, bool]:
    """This rank's backend, and whether ranks share a GPU."""
    if name == "numpy":
        return NumpyBackend(), False
    if name == "host":
        return HostDevice(f"host memory {COMM.rank}"), False
    import cupy

    from mpissd.engine.backend.cupy_backend import CupyBackend

    count = cupy.cuda.runtime.getDeviceCount()
    return CupyBackend(COMM.rank), count < COMM.size


def open_choice(backend: Backend, choice: str) -> Group:
    """The group that `choice` names."""
    if COMM.size == 1 and choice in ONE_A_GPU:
        from mpissd.engine.comm.mpi_group import NcclGroup, OneshotGroup

        return (NcclGroup if choice == "nccl" else OneshotGroup)(backend, COMM, WAITER)
    if backend.name == "host":
        from mpissd.engine.comm.mpi_group import open_device_group

        return open_device_group(backend, COMM, choice, WAITER)
    return open_group(backend, COMM, choice, WAITER)


def check(backend: Backend, group: Group, choice: str, shape: ModelShape, fuse: bool) -> Row:
    """LAUNCHES forwards with other tokens each: sharded against whole, and rank against rank.

    The sharded model, and its graph, end with this call: before the group is closed.
    """
    options = ForwardOptions(fuse=fuse, lm_head=shape.vocab_size < 10_000, top_k=TOP_K)
    told = {"buckets": [8], "num_sequences": 1, "seed": 1}
    shard = Shard(shape, COMM.size, COMM.rank)
    sharded = Stepper(backend, group, shard, options, **told)
    whole = Stepper(NumpyBackend(), SoloGroup(), Shard(shape), options, **told)
    bound = tolerance(4 * shape.num_layers)
    worst, agree = 0.0, True
    for launch in range(LAUNCHES):
        out, ref = forward(sharded, launch), forward(whole, launch)
        error = relative_error(out, ref)
        worst = max(worst, error if np.isfinite(error) else np.inf)
        agree = agree and len(set(COMM.allgather(out.tobytes()))) == 1
        agree = agree and len(set(COMM.allgather(sharded.stack.candidates.ids.tobytes()))) == 1
    top = ids_are_best(sharded, whole, bound)
    captured = bool(getattr(sharded.current, "captured", False))
    what = f"{shape.name} {'fused' if fuse else 'seven'} {'graph' if captured else 'eager'}"
    note = f"error {worst:.1e} of {bound:.1e}, ranks {'agree' if agree else 'DIFFER'}"
    note += f", ids {'right' if top else 'WRONG'}"
    return worst <= bound and agree and top, choice, what, note


def check_transformer(backend: Any, group: Group, choice: str, name: str, count: int) -> Row:
    """Logits against the whole model's reference, and bit for bit between forwards of one row and
    of many."""
    MegakernelOps.least_hidden = 0
    rig = Rig(backend, uneven(name), max_rows=40, capacity=256, group=group)
    tokens = prompt(rig, count)
    parts = COMM.allgather(rig.fill(tokens, 32))
    error = relative_error(np.concatenate(parts, axis=1), rig.reference(tokens))
    same = "rows and lanes have the same bits"
    try:
        check_rows_alone(rig, min(count, 40), [2, 5, 9, 17, 32, 40])
        check_lanes(rig, min(count, 126), 3)
    except AssertionError as wrong:
        same = f"rank {COMM.rank}: {wrong}"
    told = [said for said in COMM.allgather(same) if said.startswith("rank")]
    what = f"{name} {rig.stack.weights.kernel}, vocabulary {[part.shape[1] for part in parts]}"
    note = f"error {error:.1e}, {(told or [same])[0]}"
    return error <= BOUND[backend.name] and not told, choice, what, note


def check_abort(backend: Any, group: Any, choice: str) -> Row:
    """Rank 0 reduces with absent peers: a deadline ends the wait, an abort the kernel."""
    gave_up = COMM.rank > 0
    lonely = backend.activation(1, 1024)  # held until the abort: freeing it waits for the device
    if COMM.rank == 0:
        group.all_reduce(lonely)
        try:
            Waiter(1.0, spin=False).until(backend.fence(), "a peer that never comes")
        except FaultError:
            gave_up = True
    COMM.Barrier()
    start = time.perf_counter()
    group.abort()
    backend.synchronize()
    note = f"the device was free after {time.perf_counter() - start:.2f} s"
    return gave_up, choice, "abort of a lone all-reduce", note


def forward(model: Stepper, seed: int) -> Any:
    """The hidden vectors after one forward of random tokens, on the host."""
    tokens = np.random.default_rng(seed).integers(0, 100_000, 8).astype(np.int32)
    COMM.Barrier()
    model.upload(8, tokens, lists=True)
    model.launch()
    model.wait(WAITER)
    return model.backend.to_host(model.stack.buffers.hidden)


def ids_are_best(sharded: Stepper, whole: Stepper, bound: float) -> bool:
    """Each rank's ids are its shard's best in the whole model's scores, but for near ties."""
    buffers = whole.stack.buffers
    if buffers.logits is None:
        return True
    parts = np.split(buffers.logits, COMM.size, axis=1)
    ids = sharded.stack.candidates.ids[: COMM.size * 8 * TOP_K].reshape(COMM.size, 8, TOP_K)
    slack = 8 * bound * buffers.logits.std()
    return all(
        (np.take_along_axis(part, mine, 1) >= -np.sort(-part, axis=1)[:, :TOP_K] - slack).all()
        for part, mine in zip(parts, ids, strict=True)
    )


if __name__ == "__main__":
    sys.exit(main())
