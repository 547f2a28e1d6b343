"""Find the ranks that are left to report after the measured pass."""

from __future__ import annotations

from mpi4py import MPI

from mpissd.engine.session.session import Session


def survivors(session: Session, *, draft_lost: bool) -> MPI.Comm:
    """Returns the communicator of the living ranks: all, or the targets if the draft was lost.

    draft_lost: read only on the lead, which broadcasts it. Collective over the target ranks, if the
    configuration allows the run to go on without its draft.
    """
    topology = session.topology
    if session.job.config.on_draft_loss == "abort" or topology.is_draft:
        return topology.world
    return topology.group if topology.group.bcast(draft_lost) else topology.world
