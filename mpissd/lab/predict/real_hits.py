"""Adds to an advice the best SSD under real pairs' hit models, and the price of imposed hits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mpissd.common.config import RunConfig
from mpissd.common.real_pairs import REAL_PAIRS, SOURCE
from mpissd.common.rivals import Family
from mpissd.lab.predict.advice import ExtraGpu, gain_text
from mpissd.lab.predict.advisor import plan
from mpissd.lab.predict.costs import HostCosts
from mpissd.lab.predict.imposed import imposed_hits, price_of
from mpissd.lab.predict.places import job_of
from mpissd.lab.predict.search import Choice, Placement

_HITS = ("p_hit", "hit_law", "laws")


@dataclass(frozen=True)
class RealHits:
    """The best SSD under one measured hit model, and the gain of its extra GPU over other uses."""

    hit_law: str
    extra: ExtraGpu

    def __str__(self) -> str:
        ssd, gain = self.extra.ssd, self.extra.gain_at_equal_gpus
        use = f"the best other use of {ssd.gpus}"
        over = "" if gain is None else f", over {use}: {gain_text(gain)}"
        over += " (derived)" * self.extra.is_derived
        what = f"{self.hit_law} ({REAL_PAIRS[self.hit_law].prompts})"
        return f"{what}: SSD {ssd.tok_per_s:.1f} tok/s, hit rate {ssd.hit_rate:.2f}{over}"

    def to_dict(self) -> dict[str, Any]:
        """Returns the entries of a plan's JSON."""
        return {
            "hit_law": self.hit_law,
            "source": f"{SOURCE}, {REAL_PAIRS[self.hit_law].prompts}",
            "ssd": asdict(self.extra.ssd),
            "gain_at_equal_gpus": self.extra.gain_at_equal_gpus,
        }


def real_hits(
    config: RunConfig,
    host: HostCosts,
    places: Sequence[Placement],
    gpus: int,
    unjudged: Collection[Family] = (),
) -> list[RealHits]:
    """Searches the best SSD under every real pair's hit model; none if `config` sets one itself."""
    if any(getattr(config, name) is not None for name in _HITS):
        return []
    runs = ((name, replace(config, hit_law=name)) for name in REAL_PAIRS)
    advices = ((name, plan(run, host, places, gpus, unjudged)) for name, run in runs)
    return [RealHits(name, a.extra_gpu) for name, a in advices if a.extra_gpu is not None]


def lines(priced: Sequence[RealHits]) -> list[str]:
    """Returns the lines in which `plan` prints the results; none without results."""
    title = f"predicted with hits as {SOURCE}:"
    return [title, *(f"  {hits}" for hits in priced)] if priced else []


def price_line(config: RunConfig, ssd: Choice | None, places: Sequence[Placement]) -> str:
    """Returns the line on the price of an imposed p_hit at the best SSD; "" if none is imposed."""
    if ssd is None or config.p_hit is None:
        return ""
    place = next(place for place in places if place.tp == ssd.tp)
    host = place.host(ssd.method, HostCosts())
    return price_of(imposed_hits(job_of(config, ssd), place.device, host), ssd.tok_per_s)
