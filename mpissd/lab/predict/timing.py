"""The durations within one round, in the order in which the loops of `decode` add them up.

sent    the draft starts SPECULATION r                       (THEORY: R)
keys    sent + glue + keys                                   (K: the cache can answer)
asked   sent + link + verification + lead's work + link      (a: OUTCOME r is at the draft)
seen    the first poll ≥ asked; polls come between growth steps, which are never cut short (Q)

A Timing holds one job's durations as tables, so that simulating many rounds only indexes them.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpissd.engine.job import Job
from mpissd.lab.predict.costs import DeviceCosts, Floats, HostCosts

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Timing:
    """Durations of a job's forwards by their load, with the draft's host work included.

    verify_s: [b(K+1)+1] by Σ(num_draft+1). lanes_s: [b+1], one finishing step of n lanes. glue_s:
    [b+1], the glue of n live sequences. keys_s: [b·ΣF+1], making the keys of n candidates.
    growth_s: [b·ΣF+1], one growth step while n branches grow.
    """

    host: HostCosts
    lookahead: int
    verify_s: Floats
    lanes_s: Floats
    glue_s: Floats
    keys_s: Floats
    growth_s: Floats

    @classmethod
    def of(cls, job: Job, device: DeviceCosts, host: HostCosts) -> Timing:
        """Makes the tables of a job; row counts are rounded up to its buckets, as the steppers
        do."""
        batch, width = job.config.batch_size, job.lookahead + 1
        live = np.arange(batch + 1)
        verify = device.verify_s(in_buckets(job.target_buckets(), np.arange(batch * width + 1)))
        if job.draft is None:
            nothing = np.zeros(batch + 1)
            return cls(host, job.lookahead, verify, nothing, nothing, nothing, nothing)
        held = job.draft_buckets()
        branches = np.arange(batch * job.fan_outs.branches + 1)
        keys = np.asarray(host.keys + host.keys_lane * branches, np.float64)
        glue = device.glue_s(in_buckets(held, live * width), job.widest + 1) + host.glue
        growth = device.draft_s(in_buckets(held, branches)) + host.step
        lanes = device.draft_s(in_buckets(held, live)) + host.step
        return cls(host, job.lookahead, verify, lanes, glue, keys, growth)


def in_buckets(buckets: Sequence[int], rows: Ints) -> Ints:
    """Returns the smallest bucket that holds each row count."""
    return np.array([buckets[bisect.bisect_left(buckets, n)] for n in rows.tolist()], np.int64)


def steps_seen(waited: Floats, step_s: Floats, lookahead: int) -> Ints:
    """Returns the growth steps taken when an outcome is seen that arrives `waited` s after growth
    began.

    A step that has begun is finished; K steps end the growth.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.ceil(np.where(waited > 0, waited / step_s, 0.0))
    return np.asarray(np.minimum(steps, lookahead), np.int64)


def found_after_s(waited: Floats, host: HostCosts) -> Floats:
    """Returns the delay from a message's arrival until a rank that has `waited` seconds finds it.

    A rank that begins to wait after the arrival (waited ≤ 0) finds it at once: 0.
    """
    return np.where(waited > host.patience, host.nap, 0.0) * (waited > 0)


def answer_s(
    lanes_s: Floats, hits: Ints, hit_steps: Ints, misses: Ints, miss_steps: Ints
) -> Floats:
    """Returns the seconds of draft steps that finish the hits and draft the misses in shared
    forwards.

    A forward carries all lanes that are still short; then the group that needs more steps goes on.
    """
    finish = np.where(hits > 0, hit_steps, 0)
    backup = np.where(misses > 0, miss_steps, 0)
    shared = np.minimum(finish, backup)
    together = shared * lanes_s[hits + misses]
    alone = (finish - shared) * lanes_s[hits] + (backup - shared) * lanes_s[misses]
    return np.asarray(together + alone, np.float64)
