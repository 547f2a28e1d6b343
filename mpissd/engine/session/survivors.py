"""Who is left to report when the pass that counts is over."""

from __future__ import annotations

from mpi4py import MPI

from mpissd.engine.session.session import Session


def survivors(session: Session, *, draft_lost: bool) -> MPI.Comm:
    """All ranks; where the draft was lost, the targets. Collective over the targets where it may
    be. draft_lost: as the lead knows it, whose word counts."""
    topology = session.topology
    if session.job.config.on_draft_loss == "abort" or topology.is_draft:
        return topology.world
    return topology.group if topology.group.bcast(draft_lost) else topology.world
