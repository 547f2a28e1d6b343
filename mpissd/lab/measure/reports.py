"""Reports of the ranks on the measured pass, from which the result row is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords, is_first_round
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.updates import Report as UpdateReport
from mpissd.lab.measure.calibrate import JobProfile
from mpissd.lab.measure.host_costs import WarmUp


@dataclass(frozen=True)
class LeadReport:
    """The lead's report on the measured rounds.

    ledger: int64 [rounds, 2 + phases], with columns round, wall_ns, and ns of each phase.
    """

    records: RoundRecords
    first_round: int
    last_round: int
    wall_s: float
    ledger: NDArray[np.int64]
    phases: list[str]
    warm_up: WarmUp
    messages_per_round: float
    bytes_per_round: float
    prefill_s: float  # spent on prompts
    proposals: tuple[float, float]  # bytes of distributions, and µs the lead waited, a round
    all_reduce_s: float | None  # host seconds in all-reduces, over all rounds; None on a device
    draft_lost_round: int | None  # the first measured round without a draft
    learner: dict[str, Any] | None = None  # its report and cost; None without one
    kernel: str | None = None  # names of the kernels that read the target's weights
    draws: str = "host"  # where sampled tokens are drawn


@dataclass(frozen=True)
class DraftReport:
    """A draft's report on the measured rounds, from its own rank or inline on the lead.

    ledger: as in LeadReport.
    """

    rounds: NDArray[Any]  # [n, Drafter.COLUMNS]
    ledger: NDArray[np.int64]
    phases: list[str]
    learned: dict[str, Any]  # from RankCounts.to_dict
    warm_up: WarmUp
    forwards: NDArray[np.int64] | None = None  # those that target groups share (measure.pool)
    updates: UpdateReport | None = None  # of newer weights; None without a learner

    def column(self, name: str) -> NDArray[np.float64]:
        """Returns the column of `rounds` that has this name in Drafter.COLUMNS."""
        return np.asarray(self.rounds[:, Drafter.COLUMNS.index(name)], np.float64)


@dataclass(frozen=True)
class Measured:
    """The reports of all ranks, with the job's profile."""

    lead: LeadReport
    draft: DraftReport | None  # the first draft's report; None in AR or if the draft was lost
    profile: JobProfile
    rank_digests: list[int | None]  # by world rank, the digest of the outcomes that it received
    groups: Sequence[LeadReport] = ()  # of each target group, if several share the drafts


def num_tokens_of(records: RoundRecords, enough: int | None) -> int:
    """Returns the tokens of all sequences; those beyond `enough` of a sequence do not count."""
    counts = [len(tokens) for tokens in records.token_arrays().values()]
    return sum(counts) if enough is None else sum(min(count, enough) for count in counts)


def hit_rate_of(sequences: NDArray[np.int64], lost_round: int | None = None) -> float | None:
    """Returns the share of hits, first rounds and those without a draft left out; None: no round.

    sequences: [n, 8], from RoundRecords.sequences.
    """
    counted = ~is_first_round(sequences)
    if lost_round is not None:
        counted &= sequences[:, 0] < lost_round
    hits = sequences[counted, 6]
    return round(float(hits.mean()), 5) if len(hits) else None
