"""The parts of a round in seconds: host work by phase, and forwards by row count.

HostCosts has a field for each host phase of the ledger, such as lead_send for LeadPhase.SEND. The
phases that wait for something else, or launch forwards, are sums:

    DRAFT_WAIT   2·link + the draft's work from `draft_read` to `draft_send` − lead_commit
                 (+ delays by growth, which the simulation computes)
    DEVICE_WAIT  verify_s + wake (and `follower` beyond upload and launch)
    SPECULATE    draft_assemble + Σ over the steps of (draft_s + step)
    GROW         Σ over the steps of (draft_s + step − joined)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpissd.common.errors import ConfigError, unknown
from mpissd.engine.backend.profile import Profile
from mpissd.engine.job import Job
from mpissd.engine.model.shard import ForwardOptions
from mpissd.engine.model.stacks import AnyShard

Floats = NDArray[np.float64]

EMULATED_ITEMSIZE = 2  # bytes of a weight and of an all-reduced element on the emulated backend


@dataclass(frozen=True)
class HostCosts:
    """Median seconds of host work and of the link; the module's docstring lists each field's phase.
    link: one way to a polling rank (draft → lead: including reading the message). draft_read: from
    finding OUTCOME to having read it, as WAIT measures it in rounds where growth kept the message
    waiting (0 if there are none: the link then includes it). follower: from the plan's publication
    to the launch on the slowest follower (0 at T = 1, and where ranks do not wait for each other,
    as on the emulated backend). glue, step: the host's part of a glue forward and of one draft step
    (launch, delay of the wait's end, collect). keys_lane: for each of the b·ΣF lanes (0 in a job's
    own costs, whose keys were measured with the same fan-out). joined: seconds by which a growth
    step is shorter than a backup's, where the device joins growth steps. wake: the delay with which
    a wait for the target's forward ends."""

    lead_send: float = 0.0
    lead_commit: float = 0.0
    lead_broadcast: float = 0.0
    lead_upload: float = 0.0
    lead_launch: float = 0.0
    lead_sample: float = 0.0
    lead_record: float = 0.0
    link: float = 0.0
    follower: float = 0.0
    draft_read: float = 0.0
    draft_commit: float = 0.0
    draft_lookup: float = 0.0
    draft_assemble: float = 0.0
    draft_send: float = 0.0
    draft_record: float = 0.0
    glue: float = 0.0
    keys: float = 0.0
    keys_lane: float = 0.0
    step: float = 0.0
    joined: float = 0.0
    wake: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (is_number and 0 <= value < math.inf):
                raise ConfigError(f"host cost {name}={value}: allowed: seconds, at least 0")

    @property
    def lead_s(self) -> float:
        """Seconds on the lead from speculation to launch, and from the forward to the outcome."""
        launch = self.lead_broadcast + max(self.lead_upload + self.lead_launch, self.follower)
        return launch + self.wake + self.lead_sample + self.lead_record

    @property
    def ask_s(self) -> float:
        """Seconds on the lead from the outcome until it waits for the speculation."""
        return self.lead_send + self.lead_commit

    @property
    def draft_s(self) -> float:
        """Seconds of drafting, without draft steps and messages."""
        return self.draft_commit + self.draft_lookup + self.draft_assemble

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostCosts:
        """Reads {field: seconds} of a profile's JSON; raises ConfigError for a field that is
        missing or unknown. lead_upload and joined may be missing: older profiles count the former
        in lead_launch, and have costs of naps as well, which are 0 on GPUs."""
        names = [field.name for field in fields(cls)]
        values = {"lead_upload": 0.0, "joined": 0.0, **values}
        values = {name: value for name, value in values.items() if name not in ("nap", "patience")}
        if others := [name for name in values if name not in names]:
            raise unknown("host cost", others[0], names)
        if missing := [name for name in names if name not in values]:
            raise ConfigError(f"host costs: missing {', '.join(missing)}")
        return cls(**values)


@dataclass(frozen=True)
class RowTable:
    """Seconds of a forward by its row count: measured points, linearly interpolated. Fewer rows
    than the first point cost as much as it does (a forward is memory-bound there). After the last
    point, the slope of the last two points continues if it is positive. few: the table for jobs
    whose forwards have at most `few_rows` rows, if those use another kernel."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    few: RowTable | None = None
    few_rows: int = 0

    @classmethod
    def of(cls, points: Mapping[Any, float]) -> RowTable:
        """Makes a table from {rows: seconds}; JSON's rows are text."""
        rows, seconds = zip(*sorted((int(n), float(s)) for n, s in points.items()), strict=True)
        return cls(rows, seconds)

    def __call__(self, rows: ArrayLike, most_rows: ArrayLike | None = None) -> Floats:
        """Returns seconds for row counts of any shape. most_rows: the rows of their jobs' largest
        forward, which selects the table (None: this)."""
        wanted = np.asarray(rows, np.float64)
        times = np.interp(wanted, self.rows, self.seconds)
        if len(self.rows) > 1:
            run = self.rows[-1] - self.rows[-2]
            slope = max(0.0, self.seconds[-1] - self.seconds[-2]) / run
            times = times + slope * np.maximum(wanted - self.rows[-1], 0)
        if self.few is not None and most_rows is not None:
            times = np.where(np.asarray(most_rows) <= self.few_rows, self.few(rows), times)
        return np.asarray(times, np.float64)


@dataclass(frozen=True)
class DeviceCosts:
    """Seconds of one forward, all-reduces included, by the row count it was compiled for."""

    verify: RowTable
    draft: RowTable | None = None  # None: there is no draft (AR).
    # (k, draft forwards that read out k candidates a row), k rising; empty: as long as with one.
    lists: tuple[tuple[int, RowTable], ...] = ()

    def draft_s(self, rows: ArrayLike, most_rows: ArrayLike | None = None) -> Floats:
        """Returns the seconds of draft forwards with these rows; most_rows: as in RowTable."""
        assert self.draft is not None, "forwards of a draft that AR lacks"
        return self.draft(rows, most_rows)

    def glue_s(
        self, rows: ArrayLike, candidates: ArrayLike, most_rows: ArrayLike | None = None
    ) -> Floats:
        """Returns the seconds of draft forwards that read `candidates` of each of these rows.
        Between measured numbers of candidates time is linear. most_rows: as in RowTable."""
        if not self.lists:
            return self.draft_s(rows, most_rows)
        counts = [count for count, _ in self.lists]
        times = np.array([table(rows, most_rows) for _, table in self.lists])
        place = np.interp(np.asarray(candidates, np.float64), counts, np.arange(len(counts)))
        weights = np.maximum(0.0, 1.0 - np.abs(np.arange(len(counts)) - place[..., None]))
        return np.asarray((np.moveaxis(times, 0, -1) * weights).sum(axis=-1), np.float64)

    @classmethod
    def from_points(
        cls,
        verify: Mapping[Any, float],
        draft: Mapping[Any, float] | None = None,
        lists: Mapping[Any, Mapping[Any, float]] | None = None,
    ) -> DeviceCosts:
        """Makes the costs from measured {rows: seconds} of the target and of the draft. lists: {k:
        {rows: seconds}} of the draft's forwards that read k candidates a row."""
        drafts = None if draft is None else RowTable.of(draft)
        tables = {int(k): RowTable.of(points) for k, points in (lists or {}).items()}
        return cls(RowTable.of(verify), drafts, tuple(sorted(tables.items())))

    @classmethod
    def from_profile(
        cls, profile: Profile, job: Job, draft_profile: Profile | None = None
    ) -> DeviceCosts:
        """Returns the emulated backend's durations for every bucket of a job, bit-identical.
        draft_profile: the profile of the draft ranks' devices, if they differ."""
        batch = job.config.batch_size
        drafts = draft_profile or profile
        verify = forwards(profile, job.target_shard, job.target_buckets(), batch, job.options)
        draft = job.draft_shard
        if draft is None:
            return cls(verify)
        rows = job.draft_buckets()
        tables = {
            k: forwards(drafts, draft, rows, batch, replace(job.draft_options, top_k=k))
            for k in {1, job.draft_options.top_k}
        }
        return cls(verify, tables.pop(1), tuple(sorted(tables.items())))


def forwards(
    profile: Profile,
    shard: AnyShard,
    rows: Iterable[int],
    sequences: int,
    options: ForwardOptions,
    *,
    any_job: bool = False,
) -> RowTable:
    """Returns the seconds of one rank's forward at each row count, by the profile. The job's
    largest forward has the most of these rows, which selects the kernel. any_job: that row count is
    not chosen yet, so that the table holds both kernels."""
    rows = sorted(rows)
    limit = profile.few_rows

    def table(counts: Sequence[int], largest: int) -> RowTable:
        costs = (shard.cost(n, sequences, EMULATED_ITEMSIZE, options, largest) for n in counts)
        return RowTable(tuple(counts), tuple(float(profile.forward_s(cost)) for cost in costs))

    within = [n for n in rows if n <= limit] if any_job else []
    many = table(rows, max(rows[-1], limit + 1) if any_job else rows[-1])
    return replace(many, few=table(within, within[-1]), few_rows=limit) if within else many
