"""The durations that make up a round, in s: host work by phase, and forwards by row count.

A run times the phases of each round on rank 0 (the lead) and on the draft rank. HostCosts has a
field for each phase of pure host work: `lead_send` is the phase SEND of rank 0. A phase that waits
or launches forwards has no field of its own; its time is computed, with verify_s and draft_s, the
durations of one forward of the target and of the draft:

    DRAFT_WAIT   2·link + the draft's work from `draft_read` to `draft_send` − lead_commit, and the
                 rest of a draft step that is running (the simulation computes this)
    DEVICE_WAIT  verify_s + wake (and what `follower` exceeds upload and launch by)
    SPECULATE    draft_assemble + Σ over draft steps of (draft_s + step)
    GROW         Σ over draft steps of (draft_s + step − joined)
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

EMULATED_ITEMSIZE = 2  # bytes of a weight or an activation on the emulated backend (float16)


@dataclass(frozen=True)
class HostCosts:
    """Median seconds of the host's work in one round. The fields lead_* and draft_* are phases of
    rank 0 and of the draft rank. link: one message between these two, to a rank that polls.
    draft_read: reading a message that had already arrived (0 if never measured: link then includes
    this). follower: from rank 0's sending the round's inputs until the slowest other target rank
    launches (0 at T = 1). glue: the host's share of the draft's forward that scores the last token
    and the drafted ones. step: the host's share of one draft step, a forward that adds a token.
    keys: choosing the candidates for the next token; keys_lane is added for each branch of the
    batch (0 if keys was measured at the same fan-out). joined: by how much a step is shorter while
    branches grow than after a cache miss, if the device starts such steps by itself. wake: delay
    until rank 0 notices that the target's forward has ended."""

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
        """Seconds of rank 0's work between receiving draft tokens and launching their verification,
        and between the end of that forward and the acceptance result."""
        launch = self.lead_broadcast + max(self.lead_upload + self.lead_launch, self.follower)
        return launch + self.wake + self.lead_sample + self.lead_record

    @property
    def ask_s(self) -> float:
        """Seconds of rank 0's work from the acceptance result until it waits for draft tokens."""
        return self.lead_send + self.lead_commit

    @property
    def draft_s(self) -> float:
        """Seconds of the draft's host work before tokens are sent; draft steps are not included."""
        return self.draft_commit + self.draft_lookup + self.draft_assemble

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> HostCosts:
        """Makes the durations from {field: seconds} in a profile's JSON. Older profiles may lack
        lead_upload and joined (then 0), and have nap and patience (ignored). Raises ConfigError if
        another field is missing or unknown."""
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
    """Seconds of a forward as a function of its row count, interpolated linearly between measured
    points. Below the first point the time is constant, because such forwards are memory-bound.
    After the last point the slope of the last two points continues, if it is positive. few: the
    table of a kernel for configurations without forwards of more than `few_rows` rows."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    few: RowTable | None = None
    few_rows: int = 0

    @classmethod
    def of(cls, points: Mapping[Any, float]) -> RowTable:
        """Makes a table from {row count: seconds}; row counts may be strings, as in JSON."""
        rows, seconds = zip(*sorted((int(n), float(s)) for n, s in points.items()), strict=True)
        return cls(rows, seconds)

    def __call__(self, rows: ArrayLike, most_rows: ArrayLike | None = None) -> Floats:
        """Returns the seconds of forwards with `rows` rows, in the shape of `rows`. most_rows: rows
        of the configuration's largest forward, which decide whether `few` is used (None: no)."""
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
    """Seconds of one forward, including all-reduces, by row count: of the target (verify) and of
    the draft (None: AR has no draft). lists: (k, seconds of draft forwards that also select the top
    k tokens of each row) for several k (empty: the selection takes no time)."""

    verify: RowTable
    draft: RowTable | None = None
    lists: tuple[tuple[int, RowTable], ...] = ()

    def draft_s(self, rows: ArrayLike, most_rows: ArrayLike | None = None) -> Floats:
        """Returns the seconds of draft forwards, as RowTable does."""
        assert self.draft is not None, "forwards of a draft that AR lacks"
        return self.draft(rows, most_rows)

    def glue_s(
        self, rows: ArrayLike, candidates: ArrayLike, most_rows: ArrayLike | None = None
    ) -> Floats:
        """Returns the seconds of draft forwards that also select the top `candidates` tokens of
        each row (linear between measured numbers of candidates)."""
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
        """Makes the durations from {row count: seconds} of target (verify) and draft forwards.
        lists: {k: {row count: seconds}} of draft forwards that select the top k tokens."""
        drafts = None if draft is None else RowTable.of(draft)
        tables = {int(k): RowTable.of(points) for k, points in (lists or {}).items()}
        return cls(RowTable.of(verify), drafts, tuple(sorted(tables.items())))

    @classmethod
    def from_profile(
        cls, profile: Profile, job: Job, draft_profile: Profile | None = None
    ) -> DeviceCosts:
        """Returns the durations of a job's forwards by a device profile, at every row count for
        which a forward is compiled. The emulated backend waits for exactly these durations.
        draft_profile: the profile of the draft ranks' device, if that is of another kind."""
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
    """Returns the seconds of one rank's forward at each row count, by a device profile. The row
    count of a job's largest forward decides which kernel all its forwards use; with any_job it is
    not known yet, and the table holds the times of both kernels. sequences: batch size."""
    rows = sorted(rows)
    limit = profile.few_rows

    def table(counts: Sequence[int], largest: int) -> RowTable:
        costs = (shard.cost(n, sequences, EMULATED_ITEMSIZE, options, largest) for n in counts)
        return RowTable(tuple(counts), tuple(float(profile.forward_s(cost)) for cost in costs))

    within = [n for n in rows if n <= limit] if any_job else []
    many = table(rows, max(rows[-1], limit + 1) if any_job else rows[-1])
    return replace(many, few=table(within, within[-1]), few_rows=limit) if within else many
