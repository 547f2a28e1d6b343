"""`mpissd ARGUMENTS…` on a machine whose rank 1 has no memory for buffers of more than 24 rows:

mpirun -np 2 python -m mpi4py -m tests.mpi.sweep_job sweep --grid=…
"""

import sys
from typing import Any

from mpissd.__main__ import main
from mpissd.engine.backend.profile import EmulatedBackend

MOST_ROWS = 24


def forget_memory() -> None:
    """On this rank, from now on."""
    full = EmulatedBackend.activation

    def activation(self: EmulatedBackend, rows: int, width: int) -> Any:
        if rows > MOST_ROWS:
            raise MemoryError(f"{rows} rows wanted, {MOST_ROWS} free")
        return full(self, rows, width)

    EmulatedBackend.activation = activation  # type: ignore[method-assign]


if __name__ == "__main__":
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        forget_memory()
    sys.exit(main(sys.argv[1:]))
