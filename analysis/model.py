"""Predictions from measured times by closed formulas (mpissd/common/theory.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from analysis.select import Case, where
from mpissd.common.config import RunConfig
from mpissd.common.rivals import between
from mpissd.common.theory import expected_tokens, speedup_sd, speedup_ssd

_LOOKED_UP = float(RunConfig.acceptance_fast.removeprefix("alpha:"))


@dataclass(frozen=True)
class Times:
    """Median seconds of a case on tp target GPUs, from its rows at one batch size.

    ar: a round of AR; ar_wide: one on tp + 1 GPUs. verify: a verification; verify_wide: one on tp +
    1 GPUs, from SD inline's rows, or scaled like a round of AR if there are none. step: a draft
    step of SD; miss_step: one of SSD after a miss; grow: a step over all branches. host: the time
    of an SD round beyond verification and drafting. most_k: the largest K measured, beyond which no
    method is modelled. is_expected: whether ar_wide was not measured, and is interpolated in 1/T
    between tp and the next measured T; with none beyond, it is tp/(tp + 1). Verification and draft
    step hardly depend on K (reading weights bounds both), so one value of each is used for every K.
    """

    tp: int
    ar: float
    ar_wide: float
    verify_wide: float
    is_expected: bool
    verify: float
    step: float
    miss_step: float
    grow: float
    host: float
    most_k: int

    @classmethod
    def of(cls, case: Case, batch_size: int = 1) -> Times | None:
        """Computes the times from a case's rows; None without AR, or without SD and SSD at one
        alpha and K."""
        ar, wide = (case.ar_on(case.tp + extra, batch_size) for extra in (0, 1))
        sd = case.method("SD", batch_size=batch_size).dropna(subset=["step_s"])
        ssd = case.method("SSD", batch_size=batch_size).dropna(subset=["t_growth_s"])
        cells = (set(zip(r["alpha"], r["lookahead"], strict=True)) for r in (sd, ssd))
        if ar is None or not set.intersection(*cells):
            return None
        growth = ssd["t_growth_s"] / (ssd["lookahead"] + 1)  # One glue forward and K steps.
        verify, ar_s = float(sd["t_target_s"].median()), float(ar["round_s"])
        ar_wide = _ar_beyond(case, ar_s) if wide is None else float(wide["round_s"])
        inline = where(case.wide, batch_size=batch_size, gpus=case.tp + 1, method="SD inline")
        inline_s = inline["t_target_s"].median()
        return cls(
            tp=case.tp,
            ar=ar_s,
            ar_wide=ar_wide,
            verify_wide=verify * ar_wide / ar_s if math.isnan(inline_s) else float(inline_s),
            is_expected=wide is None,
            verify=verify,
            step=float(sd["step_s"].median()),
            miss_step=float(ssd["step_s"].fillna(sd["step_s"].median()).median()),
            grow=float(growth.median()),
            host=float((sd["round_s"] - sd["t_target_s"] - sd["t_draft_s"]).median()),
            most_k=int(max(sd["lookahead"].max(), ssd["lookahead"].max())),
        )

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
            t_backup=lookahead * self.miss_step / self.ar,
            batch_size=batch_size,
        )

    def best_sd(self, alpha: float) -> float:
        """Returns the gain of SD at its best K."""
        return max(self.sd(alpha, k) for k in range(1, self.most_k + 1))

    def best_sd_wide(self, alpha: float) -> float:
        """Returns the gain of SD inline on tp + 1 GPUs at its best K."""
        return replace(self, verify=self.verify_wide).best_sd(alpha)

    def best_ssd(self, alpha: float, p_hit: float) -> float:
        """Returns the gain of SSD at its best K."""
        return max(self.ssd(alpha, k, p_hit) for k in range(1, self.most_k + 1))

    def best_other(self, alpha: float) -> float:
        """Returns the gain of the best other use of tp + 1 GPUs, a lookup's among them."""
        return max(self.lookup_wide, self.best_sd(alpha), self.best_sd_wide(alpha))

    @property
    def lookup_wide(self) -> float:
        """The gain of a lookup of the default acceptance on tp + 1 GPUs; AR's is smaller."""
        return expected_tokens(_LOOKED_UP, 8) * self.ar / (self.verify_wide + self.host)

    @property
    def _verify(self) -> float:
        return (self.verify + self.host) / self.ar


def _ar_beyond(case: Case, ar_s: float) -> float:
    """Returns the expected seconds of a round of AR on tp + 1 GPUs, which has no rows."""
    rows = where(case.beyond, mode="ar", batch_size=1)
    if rows.empty:
        return ar_s * case.tp / (case.tp + 1)
    far = int(rows["tp"].min())
    far_s = float(where(rows, tp=far)["round_s"].median())
    return between(case.tp + 1, (case.tp, ar_s), (far, far_s))


def over_batch(
    times: Times, alpha: float, lookahead: int, p_hit: float, b: int, rho: float
) -> float:
    """Returns the gain of SSD over SD at batch size b; SD's round is one in which all miss.

    All hit or miss together with probability rho, or independently: P(all hit) is rho·h + (1 −
    rho)·h^b.
    """
    all_hit = rho * p_hit + (1 - rho) * p_hit**b
    return times.ssd(alpha, lookahead, all_hit ** (1 / b), b) / times.sd(alpha, lookahead)
