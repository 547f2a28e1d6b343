"""Measures what a draft's steps take behind a verification, beyond steps back to back.

Between two rounds of draft steps the target reads its weights, keys and values through
the same caches, so the first steps of a round read the draft's from memory. On a CPU, 5 steps of a
draft of 6 MB took 440 µs longer than five times one of 208 µs. Growing branches hides this in SSD.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mpissd.engine.job import Job
from mpissd.engine.model.stepper import Stepper
from mpissd.engine.session.rank import Rank
from mpissd.engine.session.session import Session
from mpissd.engine.workload.placement import timed_places
from mpissd.lab.measure.host_costs import ForwardTimes, pause_of
from mpissd.lab.predict.costs import HostCosts

_ROUNDS = 12


def with_cold_steps(
    rank: Rank, draft: ForwardTimes | None, host: HostCosts | None
) -> HostCosts | None:
    """Returns the host costs with what the steps of a round take beyond those in `draft`.

    Collective over the job's world; `host` is None but on the lead. It is part of draft_assemble.
    """
    session = rank.session
    if not _is_cold(session) or draft is None:
        return host
    took = [_draft_s(rank) for _ in range(_ROUNDS)]
    every = session.topology.world.gather(float(np.median(took[1:])))
    if every is None or host is None:
        return None
    each = pause_of(draft)(_rows(session.job)) * _steps(session.job)
    beyond = every[session.topology.tp if session.topology.num_drafts else 0] - each
    return replace(host, draft_assemble=host.draft_assemble + max(0.0, beyond))


def _is_cold(session: Session) -> bool:
    job = session.job
    return job.drafts_by_transformer and not job.fan_out and session.backend.info.kind != "emulated"


def _steps(job: Job) -> int:
    return job.num_forwards(job.backup_lookahead)


def _rows(job: Job) -> int:
    return -(-job.config.batch_size // max(1, job.config.drafts))


def _draft_s(rank: Rank) -> float:
    """Runs a verification, and then a round's draft steps; returns the seconds of these steps."""
    session = rank.session
    session.barrier()
    if rank.target is not None:
        _forward_s(rank.target.stepper, session.job.verify_rows, session)
    session.barrier()
    if rank.draft is None:
        return 0.0
    rows = _rows(session.job)
    return sum(_forward_s(rank.draft.stepper, rows, session) for _ in range(_steps(session.job)))


def _forward_s(stepper: object, rows: int, session: Session) -> float:
    assert isinstance(stepper, Stepper), "calibration times real forwards"
    tokens = np.arange(rows, dtype=np.int32) % stepper.shard.shape.vocab_size
    sequences = session.job.config.batch_size
    stepper.upload(rows, tokens, timed_places(rows, sequences, stepper.options))
    stepper.launch()
    stepper.wait(session.waiter)
    stepper.release(range(sequences))
    return stepper.elapsed_s()
