"""Which MPI this process runs on, and what it says of the world. Importing this starts MPI."""

from __future__ import annotations

from mpi4py import MPI


def identity() -> tuple[int, int, str]:
    """(rank, size, library) of MPI's world."""
    world = MPI.COMM_WORLD
    return world.rank, world.size, str(MPI.Get_library_version())


def leave() -> None:
    """Ends MPI; every rank has to be here."""
    MPI.Finalize()


def abort(code: int) -> None:
    """Ends every rank."""
    MPI.COMM_WORLD.Abort(code)
