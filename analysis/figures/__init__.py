"""Lists all figures by name, each with the function that draws it from result rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..rows import Data
from ..style import Poster
from .hits import batch_scaling, cache_hits, fan_out, pareto
from .kinds import drafts, kinds, saguaro
from .latency import latency
from .rates import throughput
from .roofline import roofline, window
from .study import hidden, measured, where_it_pays


@dataclass(frozen=True)
class Spec:
    """A figure's entry in the list: the function that draws it, its description, and whether it is
    drawn once for each model pair."""

    draw: Callable[[Data], Poster]
    about: str
    per_pair: bool = False


FIGURES = {
    "throughput": Spec(throughput, "AR, SD and SSD throughput over alpha and K", per_pair=True),
    "cache_hits": Spec(cache_hits, "what a cache-hit rate is worth"),
    "fan_out": Spec(fan_out, "branch budgets, uniform against geometric"),
    "latency": Spec(latency, "where a round goes, stacked"),
    "roofline": Spec(roofline, "products, forwards, collectives against measured ceilings"),
    "batch": Spec(batch_scaling, "batch scaling and the p_hit^b cliff"),
    "window": Spec(window, "draft forwards that fit inside one verification"),
    "pareto": Spec(pareto, "tok/s per GPU against tok/s per sequence"),
    "drafts": Spec(drafts, "drafts of equal parameters, from wide to deep"),
    "kinds": Spec(kinds, "kinds of draft: T_SD against acceptance, with lines of equal speedup"),
    "saguaro": Spec(saguaro, "hit rate against acceptance over Saguaro C"),
    "measured": Spec(measured, "every measured use of the same GPUs, a bar each"),
    "where_it_pays": Spec(where_it_pays, "the best use by GPUs, T, link, batch and draft"),
    "hidden": Spec(hidden, "SSD over SD inline, by what hits hide and what a GPU saves"),
}
