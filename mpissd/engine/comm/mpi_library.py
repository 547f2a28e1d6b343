"""The MPI library of this process and its world. Importing this module starts MPI."""

from __future__ import annotations

from mpi4py import MPI


def identity() -> tuple[int, int, str]:
    """Returns (rank, size of the world, the library's version as text)."""
    world = MPI.COMM_WORLD
    return world.rank, world.size, str(MPI.Get_library_version())
