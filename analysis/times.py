"""A case's measured times, and the closed formulas (mpissd/common/theory.py) evaluated with them.

Medians of rows at batch 1: t_ar (a round of AR), verify (a verification), step (a draft step), grow
(a step over all branches), host (the time of an SD round beyond verification and drafting).
Verification and draft step hardly depend on K (r(M) is flat while reading weights bounds both), so
one value of each is used for every K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from analysis.select import Case
from mpissd.common.theory import expected_tokens, speedup_sd, speedup_ssd


@dataclass(frozen=True)
class Times:
    """Median seconds of a case on tp target GPUs.

    ar_wide: a round of AR on tp + 1 GPUs, None if not measured. verify_wide: a verification there,
    from SD inline's rows, or else scaled like a round of AR.
    """

    tp: int
    ar: float
    ar_wide: float | None
    verify_wide: float | None
    verify: float
    step: float
    grow: float
    host: float

    @classmethod
    def of(cls, case: Case, batch_size: int = 1) -> Times | None:
        """Computes the times from a case's rows; None without AR, or without SD and SSD at one
        alpha and K."""
        ar, wide = (case.ar_on(case.tp + extra, batch_size) for extra in (0, 1))
        rows = case.rows[case.rows["batch_size"] == batch_size]
        sd, ssd = (rows[rows["method"] == name] for name in ("SD", "SSD"))
        sd, ssd = sd.dropna(subset=["step_s"]), ssd.dropna(subset=["t_growth_s"])
        cells = (set(zip(r["alpha"], r["lookahead"], strict=True)) for r in (sd, ssd))
        if ar is None or not set.intersection(*cells):
            return None
        growth = ssd["t_growth_s"] / (ssd["lookahead"] + 1)  # One glue forward and K steps.
        verify = float(sd["t_target_s"].median())
        return cls(
            tp=case.tp,
            ar=float(ar["round_s"]),
            ar_wide=None if wide is None else float(wide["round_s"]),
            verify_wide=_verify_wide(case, batch_size, verify, ar, wide),
            verify=verify,
            step=float(sd["step_s"].median()),
            grow=float(growth.median()),
            host=float((sd["round_s"] - sd["t_target_s"] - sd["t_draft_s"]).median()),
        )

    def drafting(self, factor: float) -> Times:
        """Returns the times with a draft device whose steps take `factor` times as long."""
        return replace(self, step=self.step * factor, grow=self.grow * factor)

    def sd(self, alpha: float, lookahead: int) -> float:
        """Returns the gain of SD over AR on the same target GPUs."""
        tokens = expected_tokens(alpha, lookahead)
        return speedup_sd(tokens, self._verify, lookahead * self.step / self.ar)

    def ssd(self, alpha: float, lookahead: int, p_hit: float, batch_size: int = 1) -> float:
        """Returns the gain of SSD over AR on the same target GPUs, with backup jit."""
        tokens = expected_tokens(alpha, lookahead)
        return speedup_ssd(
            p_hit,
            tokens,
            tokens,
            verify_ratio=self._verify,
            t_growth=(self.grow * (lookahead + 1) + self.host) / self.ar,
            t_backup=lookahead * self.step / self.ar,
            batch_size=batch_size,
        )

    def best_sd(self, alpha: float, most: int = 16) -> float:
        """Returns the gain of SD at its best K."""
        return max(self.sd(alpha, k) for k in range(1, most + 1))

    def best_sd_wide(self, alpha: float, most: int = 16) -> float:
        """Returns the gain of SD inline on tp + 1 GPUs at its best K; 0 if its times are not
        known."""
        if self.verify_wide is None:
            return 0.0
        wide = replace(self, verify=self.verify_wide)
        return wide.best_sd(alpha, most)

    def best_other(self, alpha: float) -> float:
        """Returns the gain of the best other use of tp + 1 GPUs, of those that are known."""
        ar = max(1.0, 0.0 if self.ar_wide is None else self.ar / self.ar_wide)
        return max(ar, self.best_sd(alpha), self.best_sd_wide(alpha))

    def best_ssd(self, alpha: float, p_hit: float, most: int = 16) -> float:
        """Returns the gain of SSD at its best K."""
        return max(self.ssd(alpha, k, p_hit) for k in range(1, most + 1))

    @property
    def _verify(self) -> float:
        return (self.verify + self.host) / self.ar


def _verify_wide(
    case: Case, batch_size: int, verify: float, ar: pd.Series, wide: pd.Series | None
) -> float | None:
    rows = case.wide[(case.wide["batch_size"] == batch_size) & (case.wide["gpus"] == case.tp + 1)]
    inline = rows[rows["method"] == "SD inline"]["t_target_s"].dropna()
    if len(inline):
        return float(inline.median())
    return None if wide is None else verify * float(wide["round_s"] / ar["round_s"])


def correlated(p_hit: float, batch_size: int, rho: float) -> float:
    """Returns P(all hit): with probability rho all hit or miss together, else independently."""
    return rho * p_hit + (1 - rho) * p_hit**batch_size


def over_batch(
    times: Times, alpha: float, lookahead: int, p_hit: float, b: int, rho: float
) -> float:
    """Returns the gain of SSD over SD if P(all hit) is `correlated`; SD's round is one that all
    miss."""
    all_hit = correlated(p_hit, b, rho)
    same = 1.0 if all_hit <= 0 else float(np.exp(np.log(all_hit) / b))
    if all_hit <= 0:
        same = 0.0
    return times.ssd(alpha, lookahead, same, b) / times.sd(alpha, lookahead)
