"""Opens the session that a run would open, reports what it chose, and closes it."""

from __future__ import annotations

from pathlib import Path

from mpissd.common.config import RunConfig
from mpissd.common.errors import ConfigError
from mpissd.common.wait import sharpen_sleep
from mpissd.engine.comm.group import Group
from mpissd.engine.comm.mpi_group import open_group
from mpissd.engine.comm.topology import Refused
from mpissd.engine.session.doubts import doubts
from mpissd.engine.session.session import Session, memory_shares, open_session
from mpissd.ops.doctor.facts import SessionFacts

_WHY = {
    "mpi": "host arrays",
    "oneshot": "the target's GPUs map each other's memory",
    "device": "--cuda_aware_mpi",
}


def rehearse(config: RunConfig) -> SessionFacts:
    """Opens and closes a session, and removes the folders that it made. Collective.

    Returns the same facts on every rank.
    """
    sharpen_sleep()
    made = _missing(Path(config.out))
    try:
        session = open_session(config)
    except Refused as refused:
        return SessionFacts(error=str(refused))
    finally:
        _remove(made)
    try:
        return _chosen(session)
    finally:
        session.resources.close()


def _missing(out: Path) -> list[Path]:
    """Returns the folders that opening a session would make, the deepest first."""
    wanted = [out / "rounds", out / "profiles", out, *out.parents]
    return [folder for folder in wanted if not folder.exists()]


def _remove(made: list[Path]) -> None:
    for folder in made:
        try:
            folder.rmdir()
        except OSError:  # Another rank has removed it, or somebody else wrote into it.
            continue


def _chosen(session: Session) -> SessionFacts:
    job, topology = session.job, session.topology
    itemsize = 4 if session.backend.name == "numpy" else 2
    target, draft = job.rank_bytes(itemsize)
    why = topology.world.bcast(_why(session))
    return SessionFacts(
        backend=session.backend.name,
        device_name=_devices(session),
        all_reduce=topology.world.bcast(session.group.name),
        all_reduce_why=why,
        target=job.target.name,
        draft="" if job.draft is None else job.draft.name,
        needs=[target] * topology.first_draft + [draft] * topology.num_drafts,
        memory=memory_shares(session.infos, topology.hosts),
        doubts=topology.world.bcast(doubts(job) if topology.is_lead else None),
    )


def _devices(session: Session) -> str:
    """Returns the lead's device, and the first draft's if that is of another kind."""
    names, first = [info.name for info in session.infos], session.topology.first_draft
    apart = len(names) > first and names[first] != names[0]
    return f"{names[0]}, drafts on {names[first]}" if apart else names[0]


def _why(session: Session) -> str:
    """Returns the reason for this all-reduce; if a faster one exists, why that was not chosen."""
    group, config = session.group, session.job.config
    if session.topology.tp == 1:
        return "one target rank"
    if session.backend.name == "emulated":
        return "modelled"
    slower = group.name in ("nccl", "staged") and config.all_reduce == "auto"
    if session.topology.is_draft or not slower:
        return "asked for" if config.all_reduce == group.name else _WHY.get(group.name, "")
    try:
        fast: Group = open_group(session.backend, session.topology.group, "oneshot", session.waiter)
    except ConfigError as error:  # All target ranks raise the same error here.
        return str(error).partition("; allowed")[0]
    fast.close()
    return "oneshot opens now, but did not a moment ago"
