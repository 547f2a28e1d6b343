"""Computes the device times of a row: forwards, draft steps, the floor, and the device's share."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpissd.common.records import median
from mpissd.engine.job import Job
from mpissd.engine.session.session import Session
from mpissd.lab.measure.calibrate import JobProfile
from mpissd.lab.measure.reports import Measured


def device_times(session: Session, measured: Measured) -> dict[str, Any]:
    """Returns the row's keys from t_target_s to cache_bytes."""
    job, records = session.job, measured.lead.records
    full = records.num_rows() == job.verify_rows
    t_target = median(np.asarray(records.t_target_s)[full])
    t_draft = _t_draft(job, measured)
    t_growth = None
    if measured.draft is not None and job.fan_out:
        t_growth = median(measured.draft.column("t_growth_s"))
    floor, floor_s = _floor(session, measured.profile)
    timed = t_target is not None and t_target > 0
    return {
        "t_target_s": t_target,
        "t_draft_s": t_draft,
        "t_growth_s": t_growth,
        "T_SD": t_draft / t_target if timed and t_draft is not None and t_target else None,
        "floor_us": None if floor_s is None else round(floor_s * 1e6, 3),
        "floor_fraction": round(floor_s / t_target, 4) if timed and floor_s and t_target else None,
        **floor,
        "cache_bytes": session.backend.info.cache_bytes,
    }


def _t_draft(job: Job, measured: Measured) -> float | None:
    """Returns the median seconds in which K tokens are drafted; None without a draft model.

    Measured if at least 10 rounds missed the cache completely, or computed from the calibrated
    draft forward.
    """
    if measured.draft is not None:
        times = measured.draft.column("t_draft_s")
        if np.isfinite(times).sum() >= 10:
            return median(times)
    if job.draft is None or job.config.is_lookup:
        return None
    step = measured.profile.device.draft_s(job.config.batch_size) + measured.profile.host.step
    return float(job.num_forwards(job.lookahead) * step)


def _floor(session: Session, profile: JobProfile) -> tuple[dict[str, Any], float | None]:
    """Returns the floor of a verification: row keys for its work and rates, and its seconds.

    The work is the bytes that a target rank must read and the flops that it must compute. The floor
    is the longer of the two times at the measured rates (THEORY, floors), or None if a rate is
    unknown.
    """
    job = session.job
    shard = job.target_shard
    itemsize = session.backend.itemsize
    cost = shard.cost(job.verify_rows, job.config.batch_size, itemsize, job.options)
    size, read, peak = cost.weight_bytes + cost.kv_bytes, *rates(profile).values()
    values = {"floor_bytes": size, "floor_flops": cost.flops, **rates(profile)}
    return values, max(size / read, cost.flops / peak) if read and peak else None


def rates(profile: JobProfile) -> dict[str, float | None]:
    """Returns the read rate and peak flops of the lead's device by their row keys."""
    return {
        "read_bytes_per_s": profile.read_bytes_per_s,
        "peak_flops_per_s": profile.peak_flops_per_s,
    }


def device_means(measured: Measured) -> dict[str, float | None]:
    """Returns how the lead's device spends the mean round, in microseconds.

    forward: the target's forward without collectives; all_reduce: its collectives; idle: the rest
    of the round. Unknown parts are None.
    """
    lead = measured.lead
    busy = float(np.mean(lead.records.t_target_s)) * 1e6
    reduce_s = measured.profile.all_reduce_s  # per verification of b(K+1) rows
    if lead.all_reduce_s is not None:
        reduce_s = lead.all_reduce_s / len(lead.records)
    reduced = None if reduce_s is None else min(busy, reduce_s * 1e6)
    return {
        "forward": None if reduced is None else round(busy - reduced, 3),
        "all_reduce": None if reduced is None else round(reduced, 3),
        "idle": round(float(lead.ledger[:, 1].mean()) * 1e-3 - busy, 3),
    }
