"""Reports of the ranks on the measured pass, from which the result row is built.

Reports of several target groups that share their drafts are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.decode.learning import Updates
from mpissd.engine.model.stepper import GroupView
from mpissd.lab.measure.calibrate import JobProfile, WarmUp


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
    forwards: NDArray[np.int64] | None = None  # forwards that target groups share
    updates: dict[str, list[Any]] | None = None  # Updates.report; None without a learner

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


def joined_leads(leads: Sequence[LeadReport]) -> LeadReport:
    """Returns the report of all groups' rounds, numbered group after group.

    Its wall is the longest group's: all groups begin together.
    """
    counts = [len(lead.records) for lead in leads]
    total = max(1, sum(counts))

    def mean(values: Sequence[float]) -> float:
        return sum(n * value for n, value in zip(counts, values, strict=True)) / total

    reduced = [lead.all_reduce_s for lead in leads if lead.all_reduce_s is not None]
    of_proposals = zip(*(lead.proposals for lead in leads), strict=True)
    proposed, waited = (mean(values) for values in of_proposals)
    return replace(
        leads[0],
        records=RoundRecords.joined([lead.records for lead in leads]),
        first_round=0,
        last_round=total,
        wall_s=max(lead.wall_s for lead in leads),
        ledger=_renumbered([lead.ledger for lead in leads]),
        messages_per_round=mean([lead.messages_per_round for lead in leads]),
        bytes_per_round=mean([lead.bytes_per_round for lead in leads]),
        prefill_s=max(lead.prefill_s for lead in leads),
        proposals=(proposed, waited),
        all_reduce_s=sum(reduced) if len(reduced) == len(leads) else None,
    )


def draft_report(
    drafters: Sequence[Drafter], spans: Sequence[tuple[int, int]], updates: Updates | None
) -> DraftReport | None:
    """Returns this rank's report as a draft, on all groups' rounds; None if it drafts nothing.

    spans: of each target group, its first measured round and the one after its last.
    """
    pairs = list(zip(drafters, spans, strict=False))
    if not pairs:
        return None
    counts, first = drafters[0].rank_counts, spans[0][0]
    report = DraftReport(
        _renumbered([d.table(*span) for d, span in pairs]),
        _renumbered([d.ledger.table(*span) for d, span in pairs]),
        drafters[0].ledger.names,
        counts.to_dict() if counts is not None and len(pairs) == 1 else {},
        warm_up=WarmUp.of_draft(drafters[0], first),
        updates=None if updates is None else updates.report,
    )
    view = drafters[0].worker.stepper
    if len(pairs) == 1 or not isinstance(view, GroupView):
        return report
    # The shared forwards of the measured rounds (SharedForwards.COLUMNS), and after them a row with
    # the window's beginning and end in ns.
    slices = [one for d, span in pairs if len(one := d.ledger.slices(*span))]
    begin, end = min(int(one[0, 2]) for one in slices), max(int(one[-1, 3]) for one in slices)
    log = view.shared.log()
    inside = log[(log[:, 0] >= begin) & (log[:, 0] < end)]
    return replace(report, forwards=np.concatenate([inside, [[begin, end, 0, 0]]]))


def _renumbered(tables: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Returns the rows of all tables; if there are several, their first column counts from 0."""
    if len(tables) == 1:
        return tables[0]
    whole = np.concatenate(tables)
    whole[:, 0] = np.arange(len(whole))
    return whole
