"""The numbers that the milestone report prints in its tables 1 and 2 (one V100-32, alpha = .9)."""

from __future__ import annotations

from dataclasses import dataclass

from mpissd.common import theory

ALPHA = 0.9


@dataclass(frozen=True)
class ReportRow:
    """One K of the report's tables 1 and 2, as printed; None where it prints none for this pair."""

    lookahead: int
    t_sd: float
    theory: float | None = None
    achieved: float | None = None

    @property
    def recomputed(self) -> float:
        """The speedup E / (1 + T_SD): the report's formula, applied to its own table 1."""
        return theory.speedup_sd(theory.expected_tokens(ALPHA, self.lookahead), 1.0, self.t_sd)

    @property
    def ratio(self) -> float | None:
        """The recomputed speedup divided by the printed one.

        If the report's table 2 was made by E / (r·(1 + T_SD)), this ratio is its r.
        """
        return None if self.theory is None else self.recomputed / self.theory


REPORT = {
    "8b/1b": (
        ReportRow(2, 0.36, 2.12, 2.19),
        ReportRow(4, 0.69, 2.57, 2.64),
        ReportRow(6, 1.02, 2.73, 2.81),
        ReportRow(8, 1.35, 2.75, 2.87),
        ReportRow(10, 1.67, 2.69, 2.75),
        ReportRow(12, 2.01, 2.60, 2.70),
    ),
    "70b/1b": (
        ReportRow(2, 0.04),
        ReportRow(4, 0.08),
        ReportRow(6, 0.12),
        ReportRow(8, 0.15),
        ReportRow(10, 0.19),
        ReportRow(12, 0.23),
    ),
}
