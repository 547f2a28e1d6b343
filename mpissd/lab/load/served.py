"""The results of requests, and their row."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpissd.common.load_row import SCHEMA, LoadRow
from mpissd.lab.load.arrivals import Load

ANSWERED, REFUSED = 200, 429
_COUNTS = ("drafted", "accepted", "hits", "rounds")
_SERVER = (
    "draft mode backend device_name tp num_drafts replicas world_size lookahead max_running "
    "acceptance hit_law"
).split()


@dataclass(frozen=True)
class Served:
    """One request's end. Times are in seconds from its arrival; status: 200 answered, 429 refused,
    any other failed. late_s: delay of its sending. speculation: drafted, accepted, hits, rounds, if
    the server reports them."""

    at_s: float
    status: int
    ttft_s: float = np.nan
    latency_s: float = np.nan
    num_tokens: int = 0
    prompt_tokens: int = 0
    late_s: float = 0.0
    speculation: Mapping[str, int] | None = None

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; NaN for answers of one token."""
        if self.num_tokens < 2:
            return np.nan
        return (self.latency_s - self.ttft_s) / (self.num_tokens - 1)

    def is_good(self, ttft_s: float, tpot_s: float) -> bool:
        """Whether it was answered and kept the objective."""
        kept = self.ttft_s <= ttft_s and not self.tpot_s > tpot_s
        return self.status == ANSWERED and kept


def row_of(
    load: Load,
    served: Sequence[Served],
    objective: tuple[float, float],
    about: Mapping[str, Any],
    named: Mapping[str, Any],
) -> LoadRow:
    """Returns the row of a load. about: the server's own description. named: the other keys."""
    answered = [each for each in served if each.status == ANSWERED]
    good = sum(each.is_good(*objective) for each in served)
    wall = _wall(served)
    tokens = sum(each.num_tokens for each in served)
    refused = sum(each.status == REFUSED for each in served)
    told: dict[str, Any] = {name: about.get(name) for name in _SERVER}
    told |= {name: _sum(answered, name) for name in _COUNTS}
    return LoadRow(
        schema=SCHEMA,
        **told,
        **named,
        arrivals=load.source,
        rate=load.rate if math.isfinite(load.rate) else None,
        duration_s=load.duration_s,
        num_requests=len(served),
        num_answered=len(answered),
        num_refused=refused,
        num_failed=len(served) - len(answered) - refused,
        most_together=_most_together(answered),
        wall_s=wall,
        num_tokens=tokens,
        tok_per_s=tokens / wall if wall else 0.0,
        ttft_s=_times([each.ttft_s for each in answered]),
        tpot_s=_times([each.tpot_s for each in answered]),
        latency_s=_times([each.latency_s for each in answered]),
        objective=dict(zip(("ttft_s", "tpot_s"), objective, strict=True)),
        goodput_per_s=good / wall if wall else 0.0,
        good_share=good / len(served),
        client_late_s=max(each.late_s for each in served),
    )


def arrays(served: Sequence[Served]) -> dict[str, NDArray[Any]]:
    """Returns an array a number for each request, for OUT/loads."""
    times, counts = ("at_s", "ttft_s", "latency_s"), ("num_tokens", "prompt_tokens", "status")
    kinds = [(name, "f4") for name in times] + [(name, "i4") for name in counts]
    return {name: np.array([getattr(each, name) for each in served], kind) for name, kind in kinds}


def _wall(served: Sequence[Served]) -> float:
    """Returns the seconds from the first arrival to the last answer, or arrival without one."""
    if not any(each.status == ANSWERED for each in served):
        return 0.0
    begins = [each.at_s for each in served]
    answered = [each.at_s + each.latency_s for each in served if each.status == ANSWERED]
    return max(*answered, *begins) - min(begins)


def _times(found: Sequence[float]) -> dict[str, float] | None:
    known = np.array([each for each in found if not np.isnan(each)])
    if not len(known):
        return None
    p50, p90, p99 = (float(each) for each in np.percentile(known, (50, 90, 99)))
    return {"mean": float(known.mean()), "p50": p50, "p90": p90, "p99": p99}


def _most_together(answered: Sequence[Served]) -> int:
    """Returns the most requests that were under way at one time."""
    begins = [(each.at_s, 1) for each in answered]
    ends = [(each.at_s + each.latency_s, -1) for each in answered]
    steps = [step for _, step in sorted(begins + ends)]
    return int(np.cumsum(steps).max()) if steps else 0


def _sum(answered: Sequence[Served], name: str) -> int | None:
    known = [each.speculation for each in answered if each.speculation is not None]
    return sum(int(each.get(name, 0)) for each in known) if known else None
