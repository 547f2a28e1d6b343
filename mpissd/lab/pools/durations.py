"""Seconds of the forwards and the host work of a draft that several targets share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job, buckets
from mpissd.lab.predict.costs import DeviceCosts, HostCosts, forwards

Seconds = Callable[[int], float]


@dataclass(frozen=True)
class Pool:
    """G equal targets on one draft: the job of each, and all durations.

    job: with one draft rank, of mode sd or ssd. targets: G. device: the forwards of one target, and
    of a draft whose largest forward has the rows of all G. host: host costs of `lab.predict`, for
    one target and its draft.
    """

    job: Job
    targets: int
    device: DeviceCosts
    host: HostCosts

    @classmethod
    def of(cls, job: Job, targets: int, profile: Profile, host: HostCosts) -> Pool:
        """Makes a pool of modelled forwards; row counts go up to those of all targets."""
        shard, batch = job.draft_shard, job.config.batch_size
        assert shard is not None and job.config.drafts == 1, "a pool shares one draft rank"
        alone = DeviceCosts.from_profile(profile, job)
        rows, options = buckets_of(job, targets), job.draft_options
        tables = {
            k: forwards(profile, shard, rows, targets * batch, replace(options, top_k=k))
            for k in {1, options.top_k}
        }
        shared = DeviceCosts(alone.verify, tables.pop(1), tuple(sorted(tables.items())))
        return cls(job, targets, shared, host)

    @property
    def batch(self) -> int:
        """b, the sequences of one target."""
        return self.job.config.batch_size

    @cached_property
    def verify_s(self) -> tuple[float, ...]:
        """Seconds of a verification, by its rows, from 0 to b(K+1)."""
        held = self.job.target_buckets()
        rows = [_bucket(held, n) for n in range(self.job.verify_rows + 1)]
        return tuple(self.device.verify_s(rows).tolist())

    @cached_property
    def step_s(self) -> Seconds:
        """Seconds of a draft forward without a glue in it, by its rows."""
        held = buckets_of(self.job, self.targets)
        return lru_cache(None)(lambda n: float(self.device.draft_s(_bucket(held, n))))

    @cached_property
    def glue_s(self) -> Seconds:
        """Seconds of a draft forward with a glue in it, which reads candidates, by its rows."""
        held, read = buckets_of(self.job, self.targets), self.job.widest + 1
        return lru_cache(None)(lambda n: float(self.device.glue_s(_bucket(held, n), read)))

    def keys_s(self, lanes: int) -> float:
        """Returns the seconds of host work that make the keys of a target's lanes."""
        return self.host.keys + self.host.keys_lane * lanes


def buckets_of(job: Job, targets: int) -> list[int]:
    """Returns the row counts that a draft of G targets computes: one target's, all targets', and
    the powers of two between."""
    batch = job.config.batch_size
    exact = batch, job.verify_rows, batch * max(1, job.num_lanes)
    return buckets(batch, *exact, *(targets * rows for rows in exact))


def _bucket(held: list[int], rows: int) -> int:
    """Returns the smallest of these row counts that holds `rows`, or `rows` beyond the last."""
    at = bisect_left(held, rows)
    return held[at] if at < len(held) else rows
