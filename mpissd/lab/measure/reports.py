"""What the ranks measured in the pass that counts; the result row is made of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.records import RoundRecords
from mpissd.engine.decode.draft import Drafter
from mpissd.lab.measure.ab import Overhead
from mpissd.lab.measure.calibrate import JobProfile


@dataclass(frozen=True)
class LeadReport:
    """What the lead measured. ledger [rounds, 2 + phases]: round, wall_ns, ns of each phase."""

    records: RoundRecords
    first_round: int
    last_round: int
    wall_s: float
    ledger: NDArray[np.int64]
    phases: list[str]
    messages_per_round: float
    bytes_per_round: float
    all_reduce_s: float | None  # in all rounds, where the host runs the collectives
    draft_lost_round: int | None  # of the measured rounds: the first without a draft


@dataclass(frozen=True)
class DraftReport:
    """What a draft, on its rank or inline, measured in the same rounds; ledger as the lead's."""

    rounds: NDArray[Any]  # Drafter.COLUMNS
    ledger: NDArray[np.int64]
    phases: list[str]
    learned: dict[str, Any]  # Controls.learned

    def column(self, name: str) -> NDArray[np.float64]:
        """A column of `rounds` by its name in Drafter.COLUMNS."""
        return np.asarray(self.rounds[:, Drafter.COLUMNS.index(name)], np.float64)


@dataclass(frozen=True)
class Measured:
    """The reports of all ranks, and what the job measured of itself beside them."""

    lead: LeadReport
    draft: DraftReport | None  # of the first draft; None in AR, and where it was lost
    profile: JobProfile
    rank_digests: list[int | None]  # by world rank: of the outcomes it heard
    ledger_overhead: Overhead | None
