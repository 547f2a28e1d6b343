"""Does a transformer on T ranks give what it gives on one, and each row the same in any forward?

    mpirun -np 2 python -m mpi4py tests/gpu/mpi_transformer_check.py --backend=cupy
    mpirun -np 2 python -m mpi4py tests/gpu/mpi_transformer_check.py --backend=emulated    no GPU

The tiny models have five and three KV heads, which T = 2 splits unevenly. With more ranks than GPUs
the ranks share one, over the staged all-reduce. All logits are compared with the float32 reference
of the whole model, and bit for bit between forwards of one row and of many. `numpy` checks the
CPU's operations, `emulated` the GPU's kernels on a processor. Exit code 1 where a line says FAIL.

    … mpi_transformer_check.py --backend=cupy --whole

lets up to 32 rows be one kernel that sums over the ranks (MPISSD_WHOLE=2), also of these narrow
models, and compares each of its operations with a twin in NumPy. Two layers of 8B follow: the one
kernel's bits are those of separate kernels, whatever the number of rows, and its tokens those of
one rank by itself, but for near ties.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.device_group import open_device_group
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.model.transformer.cupy_ops.whole import Whole
from mpissd.engine.model.transformer.cupy_ops.whole_ops import OVER_RANKS, VARIABLE
from mpissd.engine.model.transformer.sources import config_of
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import (
    UNEVEN,
    Rig,
    check_lanes,
    check_rows_alone,
    prompt,
    uneven,
)
from tests.whole_twin import differences

COMM = MPI.COMM_WORLD
WAITER = Waiter(60.0, spin=False)
WIDE = ("llama-3.1-8b@2L",)
ROUNDING = 4e-3  # what float16 activations may move a logit by, against the largest
BOUND = {"numpy": 2e-2, "cupy": 8e-3, "emulated": 8e-3}  # bfloat16 or float16 weights


def main() -> int:
    """Runs every model; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=tuple(BOUND), default="cupy")
    parser.add_argument("--tokens", type=int, default=140)
    parser.add_argument("--whole", action="store_true")
    args = parser.parse_args()
    if args.whole:
        os.environ[VARIABLE] = str(OVER_RANKS)
        Whole.least_hidden = Whole.wide = 0
    with tempfile.TemporaryDirectory() as folder:
        backend = open_backend(args.backend, Path(folder))
        group = opened(backend)
        lines = [check(backend, group, name, args) for name in UNEVEN]
        if args.whole:
            lines += [check_whole(backend, group, name, args.tokens) for name in WIDE]
        backend.synchronize()
        group.close()
        backend.close()
    if COMM.rank == 0:
        print(f"{COMM.size} ranks, {args.backend} on {backend.info.name}, {group.name}")
        print("\n".join(line for _, line in lines))
        print("passed" if all(good for good, _ in lines) else "FAILED", flush=True)
    return int(not all(good for good, _ in lines))


def open_backend(name: str, folder: Path) -> Any:
    """This rank's backend; ranks beyond the number of GPUs share them."""
    if name == "numpy":
        return NumpyBackend()
    if name == "emulated":
        from tests.emulator.launcher import EmulatedGpu

        return EmulatedGpu(folder)
    import cupy

    from mpissd.engine.backend.cupy_backend import CupyBackend

    return CupyBackend(COMM.rank % cupy.cuda.runtime.getDeviceCount())


def opened(backend: Any) -> Any:
    """The group that `auto` opens; host memory has no trial of device-aware MPI."""
    if type(backend).__name__ == "EmulatedGpu":
        return open_device_group(backend, COMM, "staged", WAITER)
    return open_group(backend, COMM, "auto", Waiter(20.0, spin=False))


def check(backend: Any, group: Any, name: str, args: argparse.Namespace) -> tuple[bool, str]:
    """Compares logits with the reference and between forwards; (passed, a line), on all ranks."""
    rig = Rig(backend, uneven(name), max_rows=40, capacity=256, group=group)
    tokens = prompt(rig, args.tokens)
    parts = COMM.allgather(rig.fill(tokens, 32))
    error = relative_error(np.concatenate(parts, axis=1), rig.reference(tokens))
    same = "rows and lanes have the same bits"
    try:
        check_rows_alone(rig, min(args.tokens, 40), [2, 5, 9, 17, 32, 40])
        check_lanes(rig, min(args.tokens, 126), 3)
    except AssertionError as wrong:
        same = f"rank {COMM.rank}: {wrong}"
    told = [said for said in COMM.allgather(same) if said.startswith("rank")]
    if rig.stack.weights.kernel == "whole" and group.name == "oneshot":
        error = max(error, *dict(differences(rig, args.tokens, 5, COMM.allgather)).values())
    good = error <= BOUND[args.backend] and not told
    widths = [part.shape[1] for part in parts]
    kernel = rig.stack.weights.kernel
    line = f"{name:6s} {kernel}, vocabulary {widths}, error {error:.1e}, {(told or [same])[0]}"
    return good, f"{'pass' if good else 'FAIL'}  {line}"


def check_whole(backend: Any, group: Any, name: str, count: int) -> tuple[bool, str]:
    """Compares the one kernel with separate kernels and with one rank; as `check`."""
    options: dict[str, Any] = {"max_rows": 32, "page": None, "capacity": 1024}
    rig = Rig(backend, config_of(name), group=group, **options)
    tokens, wrong = prompt(rig, 2 * count), []
    found = rig.fill(tokens, 5)
    Whole.most_rows = 0
    apart = Rig(backend, config_of(name), group=group, weights=rig.stack.weights, **options)
    if not np.array_equal(found, apart.fill(tokens, 5)):
        wrong.append("other bits than separate kernels")
    Whole.most_rows = 32
    try:
        check_rows_alone(rig, min(count, 40), [2, 5, 8, 9, 32])
    except AssertionError as error:
        wrong.append(str(error))
    every = np.concatenate(COMM.allgather(found), axis=1)
    error = margin = 0.0
    if COMM.rank == 0:
        error, margin = compared(Rig(backend, config_of(name), **options).fill(tokens, 5), every)
        if margin > ROUNDING or error > BOUND["cupy"]:
            wrong.append("not the logits of one rank")
    told = [f"rank {n}: {line}" for n, said in enumerate(COMM.allgather(wrong)) for line in said]
    said = told[0] if told else "bits of separate kernels"
    line = f"{name} {rig.stack.weights.kernel}, {said}; of one rank's logits {error:.1e} off, "
    return not told, f"{'FAIL' if told else 'pass'}  {line}tokens by a margin of {margin:.1e}"


def compared(expected: Any, found: Any) -> tuple[float, float]:
    """Returns the relative error, and by how much another token is best at worst."""
    chosen = expected[np.arange(len(expected)), found.argmax(-1)]
    margins = (expected.max(-1) - chosen) / np.abs(expected).max(-1)
    return relative_error(found, expected), float(margins.max())


if __name__ == "__main__":
    sys.exit(main())
