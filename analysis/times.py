"""A case's measured times, and the closed formulas (mpissd/common/theory.py) evaluated with them.

Medians of rows at batch 1: t_ar (a round of AR), verify (a verification), step (a draft step), grow
(a step over all branches), host (the time of an SD round beyond verification and drafting).
Verification and draft step hardly depend on K (r(M) is flat while reading weights bounds both), so
one value of each is used for every K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from analysis.select import Case
from mpissd.common.config import RunConfig
from mpissd.common.theory import expected_tokens, speedup_sd, speedup_ssd

_LOOKED_UP = float(RunConfig.acceptance_fast.removeprefix("alpha:"))


@dataclass(frozen=True)
class Times:
    """Median seconds of a case on tp target GPUs.

    ar_wide: a round of AR on tp + 1 GPUs. verify_wide: a verification there, from SD inline's rows,
    or else scaled like a round of AR. is_expected: whether ar_wide was not measured, and is
    interpolated in 1/T between tp and the next measured T; with none beyond, it is tp/(tp + 1).
    """

    tp: int
    ar: float
    ar_wide: float
    verify_wide: float
    is_expected: bool
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
        ar_s = float(ar["round_s"])
        wide_s = _ar_beyond(case, ar_s) if wide is None else float(wide["round_s"])
        return cls(
            tp=case.tp,
            ar=ar_s,
            ar_wide=wide_s,
            verify_wide=_verify_wide(case, batch_size, verify * wide_s / ar_s),
            is_expected=wide is None,
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
        """Returns the gain of SD inline on tp + 1 GPUs at its best K."""
        wide = replace(self, verify=self.verify_wide)
        return wide.best_sd(alpha, most)

    def best_other(self, alpha: float) -> float:
        """Returns the gain of the best other use of tp + 1 GPUs, a lookup's among them."""
        return max(self.lookup_wide, self.best_sd(alpha), self.best_sd_wide(alpha))

    @property
    def lookup_wide(self) -> float:
        """The gain of a lookup of the default acceptance on tp + 1 GPUs; AR's is smaller."""
        return expected_tokens(_LOOKED_UP, 8) * self.ar / (self.verify_wide + self.host)

    def best_ssd(self, alpha: float, p_hit: float, most: int = 16) -> float:
        """Returns the gain of SSD at its best K."""
        return max(self.ssd(alpha, k, p_hit) for k in range(1, most + 1))

    @property
    def _verify(self) -> float:
        return (self.verify + self.host) / self.ar


def _ar_beyond(case: Case, ar_s: float) -> float:
    """Returns what to expect of a round of AR on tp + 1 GPUs, of which there are no rows."""
    rows = case.beyond[(case.beyond["mode"] == "ar") & (case.beyond["batch_size"] == 1)]
    if rows.empty:
        return ar_s * case.tp / (case.tp + 1)
    far = int(rows["tp"].min())
    far_s = float(rows.loc[rows["tp"] == far, "round_s"].median())
    share = (1 / (case.tp + 1) - 1 / far) / (1 / case.tp - 1 / far)
    return far_s + share * (ar_s - far_s)


def _verify_wide(case: Case, batch_size: int, otherwise: float) -> float:
    rows = case.wide[(case.wide["batch_size"] == batch_size) & (case.wide["gpus"] == case.tp + 1)]
    inline = rows[rows["method"] == "SD inline"]["t_target_s"].dropna()
    return float(inline.median()) if len(inline) else otherwise


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
