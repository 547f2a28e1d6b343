"""Does a transformer on T ranks give one rank's results, and each row the same in any forward?

    mpirun -np 2 python -m mpi4py tests/gpu/mpi_transformer_check.py --backend=cupy
    mpirun -np 2 python -m mpi4py tests/gpu/mpi_transformer_check.py --backend=numpy    no GPU

The tiny models have five and three KV heads, which T = 2 splits unevenly. With more ranks than GPUs
the ranks share one, over the staged all-reduce. All logits are compared with the float32 reference
of the whole model, and bit for bit between forwards of one row and of many. Exit code 1 if a line
has FAIL.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from mpissd.common.wait import Waiter
from mpissd.engine.backend.numpy_backend import NumpyBackend
from mpissd.engine.comm.mpi_group import open_group
from tests.gpu.agreement import relative_error
from tests.gpu.transformer_rig import (
    UNEVEN,
    Rig,
    check_lanes,
    check_rows_alone,
    prompt,
    uneven,
)

COMM = MPI.COMM_WORLD
BOUND = {"numpy": 2e-2, "cupy": 8e-3}  # bfloat16 or float16 weights


def main() -> int:
    """Runs every model; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=tuple(BOUND), default="cupy")
    parser.add_argument("--tokens", type=int, default=140)
    args = parser.parse_args()
    backend: Any = NumpyBackend()
    if args.backend == "cupy":
        import cupy

        from mpissd.engine.backend.cupy_backend import CupyBackend

        backend = CupyBackend(COMM.rank % cupy.cuda.runtime.getDeviceCount())
    group = open_group(backend, COMM, "auto", Waiter(20.0, spin=False))
    lines = [check(backend, group, name, args) for name in UNEVEN]
    backend.synchronize()
    group.close()
    backend.close()
    if COMM.rank == 0:
        print(f"{COMM.size} ranks, {args.backend} on {backend.info.name}, {group.name}")
        print("\n".join(line for _, line in lines))
        print("passed" if all(good for good, _ in lines) else "FAILED", flush=True)
    return int(not all(good for good, _ in lines))


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
    good = error <= BOUND[args.backend] and not told
    widths = [part.shape[1] for part in parts]
    kernel = rig.stack.weights.kernel
    line = f"{name:6s} {kernel}, vocabulary {widths}, error {error:.1e}, {(told or [same])[0]}"
    return good, f"{'pass' if good else 'FAIL'}  {line}"


if __name__ == "__main__":
    sys.exit(main())
