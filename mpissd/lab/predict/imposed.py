"""The price of imposed hits: the branches that the default hit model needs for the same rate.

An imposed p_hit hits as often with one candidate a row as with ten, so such a run grows fewer
branches than a measured hit model would need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mpissd.common.real_pairs import DEFAULT, least_uniform
from mpissd.common.rounds import Source
from mpissd.engine.job import Job
from mpissd.engine.spec.fanout import MAX_BRANCHES
from mpissd.engine.spec.hits import named_hit_law
from mpissd.lab.predict.costs import DeviceCosts, HostCosts
from mpissd.lab.predict.simulation import expected


def under_default_law(job: Job) -> Job | None:
    """Returns the job under the default hit model, with the least uniform fan-out hitting as often.

    Returns None if the job imposes no hits, or no fan-out reaches their rate.
    """
    if not job.fan_out or not job.hit_law.p_hit:
        return None
    law, hazards = named_hit_law("smollm2"), job.acceptance[Source.CACHE].hazards
    most = MAX_BRANCHES // len(job.fan_out)
    least = least_uniform(job.hit_law.p_hit, hazards, DEFAULT, most)
    if least is None:
        return None
    config = replace(job.config, p_hit=None, hit_law=None, fan_out=f"uniform:{least}")
    lists = (least,) * len(job.fan_out)
    return replace(job, config=config, hit_law=law, fan_out=lists, fan_out_miss=lists)


def imposed_hits(job: Job, device: DeviceCosts, host: HostCosts) -> dict[str, Any] | None:
    """Returns {hit_law, branch_budget, expected_tok_per_s} of that job; None without imposed hits.

    The last two are None if no fan-out hits as often. Forwards with more rows than were measured
    are extrapolated.
    """
    if not job.fan_out or not job.hit_law.p_hit:
        return None
    label, honest = named_hit_law("smollm2").label, under_default_law(job)
    if honest is None:
        return {"hit_law": label, "branch_budget": None, "expected_tok_per_s": None}
    rate = float(expected(honest, device, host).tok_per_s[0])
    budget = sum(honest.fan_out)
    return {"hit_law": label, "branch_budget": budget, "expected_tok_per_s": rate}


def price_of(price: Mapping[str, Any] | None, imposed_tok_per_s: float) -> str:
    """Formats the result of imposed_hits next to the measured rate; "" without imposed hits."""
    if price is None:
        return ""
    if price["branch_budget"] is None:
        return f"imposed: no fan-out of {price['hit_law']} hits as often"
    return (
        f"imposed: with the {price['branch_budget']} branches that {price['hit_law']} needs, "
        f"{price['expected_tok_per_s']:.1f} tok/s predicted, {imposed_tok_per_s:.1f} as run"
    )
