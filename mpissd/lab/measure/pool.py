"""Joins the reports of several target groups that share their drafts to the reports of a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords, outcome_digest, percentiles_us
from mpissd.common.trace import LeadPhase
from mpissd.engine.decode.draft import Drafter
from mpissd.engine.model.shared import GroupView, SharedForwards
from mpissd.lab.measure.reports import DraftReport, LeadReport, hit_rate_of, num_tokens_of

_DRAFT_WAIT = 2 + LeadPhase.DRAFT_WAIT
_NS = 1e-9


def joined_leads(leads: Sequence[LeadReport]) -> LeadReport:
    """Returns the report of all groups' rounds, numbered group after group.

    Its wall is the longest group's: all groups begin together.
    """
    counts = [len(lead.records) for lead in leads]
    total = max(1, sum(counts))

    def mean(values: Sequence[float]) -> float:
        return sum(n * value for n, value in zip(counts, values, strict=True)) / total

    reduced = [lead.all_reduce_s for lead in leads if lead.all_reduce_s is not None]
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
        proposals=(
            mean([lead.proposals[0] for lead in leads]),
            mean([lead.proposals[1] for lead in leads]),
        ),
        all_reduce_s=sum(reduced) if len(reduced) == len(leads) else None,
    )


def joined_drafts(drafts: Sequence[DraftReport]) -> DraftReport:
    """Returns the report of one draft on all groups' rounds, numbered group after group."""
    return replace(
        drafts[0],
        rounds=_renumbered([draft.rounds for draft in drafts]),
        ledger=_renumbered([draft.ledger for draft in drafts]),
        learned={},
    )


def _renumbered(tables: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Returns the rows of all tables, whose first column then counts from 0."""
    whole = np.concatenate(tables)
    whole[:, 0] = np.arange(len(whole))
    return whole


def of_each_group(
    leads: Sequence[LeadReport], limit: int | None, *, grows: bool
) -> list[dict[str, Any]]:
    """Returns the row's entry of each group.

    limit: most tokens of a sequence that count. grows: whether there is a cache to hit.
    """
    return [_of_group(lead, limit, grows) for lead in leads]


def _of_group(lead: LeadReport, limit: int | None, grows: bool) -> dict[str, Any]:
    count, sequences = num_tokens_of(lead.records, limit), lead.records.sequences()
    return {
        "tok_per_s": round(count / lead.wall_s, 3),
        "num_tokens": count,
        "num_rounds": len(lead.records),
        "wall_s": round(lead.wall_s, 9),
        "acceptance_length": round(float(sequences[:, 3].mean() + 1), 5),
        "hit_rate": hit_rate_of(sequences) if grows else None,
        "round_us": percentiles_us(lead.ledger[:, 1] * _NS),
        "draft_wait_us": draft_wait_us(lead),
        "outcome_digest": outcome_digest(sequences),
    }


def draft_wait_us(lead: LeadReport) -> dict[str, float | int | None]:
    """Returns how long the lead waited for speculations, over rounds, in microseconds."""
    return percentiles_us(lead.ledger[:, _DRAFT_WAIT] * _NS)


def forwards_of(
    drafters: Sequence[Drafter], rounds: Sequence[tuple[int, int]]
) -> NDArray[np.int64] | None:
    """Returns the shared forwards of the measured rounds (SharedForwards.COLUMNS), and after them a
    row with the window's beginning and end; None if no forward is shared.

    rounds: of each group, its first measured round and the one after its last.
    """
    seat = drafters[0].worker.stepper
    if not isinstance(seat, GroupView):
        return None
    begin, end = _window(drafters, rounds)
    log = seat.shared.log()
    inside = log[(log[:, 0] >= begin) & (log[:, 0] < end)]
    return np.concatenate([inside, [[begin, end, 0, 0]]])


def _window(drafters: Sequence[Drafter], rounds: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns when the first group's measured rounds began on the draft, and the last one's ended,
    in ns."""
    slices = [d.ledger.slices(*r) for d, r in zip(drafters, rounds, strict=True)]
    known = [one for one in slices if len(one)]
    return min(int(one[0, 2]) for one in known), max(int(one[-1, 3]) for one in known)


def pool_fields(forwards: NDArray[np.int64]) -> dict[str, float | int]:
    """Returns the row's fields on a draft's shared forwards; forwards: from `forwards_of`."""
    begin, end = forwards[-1, :2].tolist()
    columns = dict(zip(SharedForwards.COLUMNS, forwards[:-1].T, strict=True))
    count = len(forwards) - 1
    each = {name: float(columns[name].mean()) if count else 0.0 for name in ("rows", "seats")}
    return {
        "forwards": count,
        "rows": round(each["rows"], 3),
        "seats": round(each["seats"], 3),
        "busy": round(float(columns["device_ns"].sum()) / max(1, end - begin), 5),
    }
