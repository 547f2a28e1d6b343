"""The report of a run with a learner: its cost, the draft's versions, acceptance by version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpissd.engine.backend.base import DeviceInfo
from mpissd.engine.comm.mpi_learner import LearnerComms
from mpissd.engine.decode.target import TargetLoop
from mpissd.engine.decode.teaching import Teaching
from mpissd.engine.session.rank import Rank
from mpissd.lab.measure.reports import Measured


def teach(loop: TargetLoop, rank: Rank) -> Teaching | None:
    """Has the loop send every round to the learner from now on; None without a learner."""
    learning = rank.session.learning
    if learning is None or learning.outlet is None:
        return None
    assert rank.target is not None, "a lead without a target"
    everywhere = rank.session.job.config.learning.positions == "all"
    loop.tell()  # drops the warm-up's last round: no receiver yet
    loop.teach = teaching = Teaching(rank.target.oracle, learning.outlet, everywhere=everywhere)
    return teaching


def ended(
    loop: TargetLoop, teaching: Teaching | None, learning: LearnerComms | None
) -> dict[str, Any] | None:
    """Ends the learner after the last measured round; returns its report and its cost.

    `state` is "silent" if the learner's rank did not answer in time, or is gone.
    """
    if teaching is None or learning is None:
        return None
    loop.tell()
    report = learning.stop() or {"state": "silent"}
    return {**report, "cost": teaching.to_dict()}


def shares_gpu_of(measured: Measured, infos: Sequence[DeviceInfo]) -> int | None:
    """Returns the first rank whose GPU the learner has, too; None without one.

    infos: of the job's other ranks.
    """
    gpu = (measured.lead.learner or {}).get("gpu")
    ranks = (rank for rank, info in enumerate(infos) if gpu is not None and info.uuid == gpu)
    return next(ranks, None)


def learner_fields(
    measured: Measured, learners: int, infos: Sequence[DeviceInfo]
) -> dict[str, Any]:
    """Returns the row's keys of a learner; none without one. infos: of the other ranks."""
    lead, draft = measured.lead, measured.draft
    if lead.learner is None:
        return {}
    updates = None if draft is None or draft.updates is None else draft.updates
    by_version = [
        {"version": version, "rounds": rounds, "drafted": drafted, "accepted": accepted,
         "acceptance_length": round(1 + accepted / rounds, 4)}
        for version, rounds, drafted, accepted in lead.records.by_version()
    ]  # fmt: skip
    told = {key: value for key, value in lead.learner.items() if key != "state"}
    told["shares_gpu_of"] = shares_gpu_of(measured, infos)
    return {
        "learners": learners,
        "learner_state": lead.learner["state"],
        "draft_versions": 0 if updates is None else len(updates.swaps),
        "learner": {**told, **({} if updates is None else updates.to_dict())},
        "acceptance_by_version": by_version,
    }
